"""A process that has imported torch and the engine, and waits to start the workers of a later start on this node.

Importing takes most of a restart's time. A standby is a torchrun that has done it already: it waits on a socket for its
arguments, environment and log, then continues like any other torchrun, and forks the workers. It is used once. If its
owner exits, the socket closes, and it exits too. It has no CUDA context, because it only imports modules.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspec_cli.core.environment_names import (
    GENERATION,
    GROUP,
    LAUNCH_ID,
    MARKS,
    RENDEZVOUS,
    SECRET_FILE,
    START,
    SUPERVISOR,
)
from trainspec_cli.run.job.job import TORCHRUN

OPTION = "--standby"
"""Makes torchrun's entry point wait; followed by the socket's descriptor."""
DELAY_S = 5.0
"""Seconds from a start of workers until the next standby is started, so that its imports do not delay their first
step."""
MARKS_BYTES = 256
"""Room for the variables by which the processes of a job are found (`family.py`, `processes.py`)."""
OF_ONE_START = {
    *(GENERATION, GROUP, LAUNCH_ID, START, SECRET_FILE, SUPERVISOR, RENDEZVOUS),
    *("GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"),
}
"""Variables that are read only after the standby has been taken. If any other differs, the standby is of no use,
because libraries have read it at import."""

_waiting: list[_Standby] = []
"""This process's standby, if it has one."""
_due_s = 0.0
"""The monotonic time from which a new standby may be started."""


class _Standby:
    def __init__(self, environment: Mapping[str, str]):
        self.imported_with = _without_start(environment)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*TORCHRUN, OPTION, str(theirs.fileno())],
                env={**os.environ, **self.imported_with, MARKS: "." * MARKS_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def become(self, arguments: Sequence[str], environment: Mapping[str, str], log: int) -> None:
        """Let it run torchrun with these arguments and this environment; its output goes to the descriptor `log`.
        Raises OSError if it is gone."""
        request = json.dumps([list(arguments), dict(environment)], allow_nan=False).encode()
        socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], [log])
        self._socket.sendall(request)
        self._socket.close()

    def end(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


def keep_standby(environment: Mapping[str, str]) -> None:
    """Start a standby for later starts with the job's `environment`, unless this process has one or it is too early."""
    if sys.platform == "linux" and not _waiting and time.monotonic() >= _due_s:
        _waiting.append(_Standby(environment))
        atexit.register(end_standby)  # one that is still importing would notice only later that its owner is gone


def take_standby(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | None:
    """Let the standby run `command`, a torchrun, with the job's `environment` added to this process's; its output is
    appended to `log`. Return its process; None if there is no standby for this. One that is still importing is used,
    too, because it is ahead of a new process."""
    global _due_s
    if tuple(command[: len(TORCHRUN)]) != TORCHRUN:
        return None
    _due_s = time.monotonic() + DELAY_S
    if not _waiting:
        return None
    standby = _waiting.pop()
    if standby.process.poll() is not None or standby.imported_with != _without_start(environment):
        standby.end()
        return None
    with log.open("ab") as output:
        try:
            standby.become(command[len(TORCHRUN) :], {**os.environ, **environment}, output.fileno())
        except OSError:
            standby.end()
            return None
    return standby.process


def end_standby() -> None:
    """End this process's standby, if it has one."""
    while _waiting:
        _waiting.pop().end()


def _without_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_ONE_START}
