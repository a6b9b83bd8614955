"""Ray on hosts of network namespaces: a head without resources, which holds no node of a run, and others with one CPU
each. A host dies with all of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lab import hosts as lab_hosts
from lab.hosts import Hosts, kill
from lab.ports import free_port
from lab.waiting import PATIENCE_S

HEAD = 1
TOKEN = "a-token-of-the-lab-0123456789abcdef"
FAST = {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3}
"""Ray's checks of its nodes: a dead one is found after about 2 s instead of 15 s."""
READY = "This command will now block forever"
ATTEMPTS = 5


class RayHosts:
    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts = hosts
        self._folder = folder
        # Ray looks for other clusters by address and port among all processes of the machine.
        self._port = free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "RAY_ADDRESS": f"{hosts.address(HEAD)}:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            **{f"RAY_health_check_{name}": str(value) for name, value in FAST.items()},
        }
        for number in hosts.numbers:
            self.start(number)

    def start(self, number: int) -> None:
        """Start Ray on a host, once more if a busy machine is too slow for Ray's own time limits."""
        for attempt in range(ATTEMPTS):
            log = self._folder / f"host{number}_{attempt}.log"
            environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
            with log.open("wb") as output:
                command = [*self.hosts.inside(number), sys.executable, "-m", "ray.scripts.scripts", "start"]
                started = subprocess.Popen(
                    [*command, *self._options(number)],
                    env=environment,
                    cwd=self._folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self._started.append(started)
            deadline_s = time.monotonic() + PATIENCE_S / ATTEMPTS
            while started.poll() is None and time.monotonic() < deadline_s:
                if READY in log.read_text(errors="replace"):
                    return
                time.sleep(0.1)
            self.kill(number)
        raise AssertionError(log.read_text(errors="replace"))

    def with_process(self, name: str) -> list[int]:
        """-> the hosts on which a process with `name` in its command line runs"""
        return [number for number in self.hosts.numbers if any(name in line for line in _command_lines(number))]

    def kill(self, number: int) -> float:
        """Switch a host off. -> when"""
        now = time.time()
        while pids := lab_hosts.pids_on(number):
            for pid in pids:
                kill(pid)
            time.sleep(0.05)
        return now

    def close(self) -> list[int]:
        """-> processes that ran beside Ray's own"""
        for number in self.hosts.numbers:
            self.kill(number)
        for started in self._started:
            started.wait()
        return self.hosts.remove()

    def _options(self, number: int) -> list[str]:
        own = ["--head", f"--port={self._port}", "--include-dashboard=false"] if number == HEAD else []
        joins = [] if number == HEAD else [f"--address={self.hosts.address(HEAD)}:{self._port}"]
        return [
            *own,
            *joins,
            f"--num-cpus={int(number != HEAD)}",
            "--object-store-memory=80000000",
            f"--node-ip-address={self.hosts.address(number)}",
            f"--temp-dir={self._folder}/{number}",
            # Fixed, so that Ray does not wait for its own processes to choose ports.
            *("--runtime-env-agent-port=6400", "--dashboard-agent-listen-port=6401"),
            *("--dashboard-agent-grpc-port=6402", "--metrics-export-port=6403"),
            *("--min-worker-port=10002", "--max-worker-port=14999"),  # below those of `free_port`
            *("--disable-usage-stats", "--no-monitor", "--include-log-monitor=false", "--block"),
        ]


def _command_lines(number: int) -> list[str]:
    lines = []
    for pid in lab_hosts.pids_on(number):
        with suppress(psutil.Error):
            lines.append(" ".join(psutil.Process(pid).cmdline()))
    return lines
