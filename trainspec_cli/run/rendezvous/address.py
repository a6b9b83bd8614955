"""The supervisor's handle on a job's rendezvous server. It restarts the server on the same port when the server
exits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from trainspec_cli.core.environment_names import RENDEZVOUS, SECRET_FILE
from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.backend.family import start
from trainspec_cli.run.backend.processes import KILL_TIMEOUT_S
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.job.machine import listen
from trainspec_cli.run.rendezvous import server as rendezvous_server

RESTART_INTERVAL_S = 1.0
START_S = 10.0
"""A server that exits within this many seconds has failed to start. On a busy machine, starting one takes several
seconds."""
MAX_FAILURES = 5


class Rendezvous:
    """The server's process and its listening socket. The supervisor keeps the socket, so that no other process gets the
    port."""

    def __init__(
        self, job: Job, resilience: ResilienceSpec, secret_file: Path, host: str, port: int = 0, *, name: str = ""
    ):
        """Start a server on `host`, this node's address on the job's interface. Raises MachineError. Other nodes reach
        it by `name`, or by the address itself if `name` is empty. `port` 0 means any free port."""
        self._job = job
        self._secret_file = secret_file
        self._silence_s = resilience.heartbeat_timeout_s
        self._patience_s = resilience.exchange_timeout_s
        self._listener = listen(host, port)
        self.address = f"{name or host}:{self._listener.getsockname()[1]}"
        self._failures = 0
        self._process = self._start(pause_s=0.0)

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables with the server's address and the path of its secret."""
        return {RENDEZVOUS: self.address, SECRET_FILE: str(self._secret_file)}

    def keep_alive(self) -> bool:
        """Restart the server if it has exited; return True if so. Raises MachineError if the server keeps exiting
        immediately."""
        lived_s = time.monotonic() - self._started_s
        if self._process.poll() is None or lived_s < RESTART_INTERVAL_S:
            return False
        self._failures = self._failures + 1 if lived_s < START_S else 0
        if self._failures > MAX_FAILURES:
            message = "the rendezvous server exits as soon as it is started"
            hint = f"look at {self._job.torchrun_log}"
            raise MachineError(Problem("rendezvous", message, hint=hint, environment=True))
        self._process = self._start(pause_s=self._silence_s)
        return True

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the server, free the port and remove the secret."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        self._listener.close()
        self._secret_file.unlink(missing_ok=True)

    def _start(self, pause_s: float) -> subprocess.Popen[bytes]:
        self._started_s, descriptor = time.monotonic(), self._listener.fileno()
        times_s = (self._silence_s, self._patience_s, pause_s, self._job.stop_grace_s)
        arguments = [descriptor, os.getpid(), self._secret_file, *times_s]
        command = [sys.executable, "-m", rendezvous_server.__name__, *map(str, arguments)]
        return start(command, self._job, pass_fds=(descriptor,))
