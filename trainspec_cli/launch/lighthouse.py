"""The process that keeps which replica groups are there; it is started again on its own port when it ends."""

from __future__ import annotations

import subprocess
import sys

from trainspec_cli.launch.job import Job
from trainspec_cli.launch.place import free_port
from trainspec_cli.launch.spawn import start
from trainspec_cli.spec.resilience import ResilienceSpec

MODULE = "trainspec_cli.engine.elastic.lighthouse"


class Lighthouse:
    def __init__(self, job: Job, resilience: ResilienceSpec, host: str):
        """`host`: this one's address, as the groups reach it; it listens there alone."""
        self.address = f"{host}:{free_port()}"
        milliseconds = [str(round(1000 * s)) for s in (resilience.heartbeat_timeout_s, resilience.exchange_timeout_s)]
        self._job = job
        self._command = [sys.executable, "-m", MODULE, self.address, *milliseconds]
        self._process = self._start()

    def keep_alive(self) -> bool:
        """Start it again where it has ended; -> whether it had."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        return True

    def kill(self) -> None:
        self._process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        return start(self._command, self._job)
