"""The inside of a standby (`run/backend/standby.py`): import, wait, and continue as the torchrun of a start."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from trainspec_cli.core.environment_names import GROUP, LAUNCH_ID, MARKS

TITLE = "standby"
"""The process's name while it waits, as shown by `ps` and `top`."""


def stand_by(descriptor: int) -> None:
    """Wait until the owner of the socket asks for a start, and return with that start's arguments, environment and
    output in place. Exits if the owner is gone."""
    with socket.socket(fileno=descriptor) as owner:
        title = Path("/proc/self/comm")
        usual = title.read_text()
        title.write_text(TITLE)
        head, descriptors, _, _ = socket.recv_fds(owner, 8, 1)
        if len(head) < 8:
            sys.exit(0)
        with owner.makefile("rb") as request:
            arguments, environment = json.loads(request.read(int.from_bytes(head, "little")))
    (log,) = descriptors
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
    os.close(log)
    sys.argv[1:] = arguments
    os.environ.clear()
    os.environ.update(environment)
    show_marks(environment)
    title.write_text(usual)


def show_marks(environment: Mapping[str, str]) -> None:
    """Let the system show the variables by which a job's processes are found. It shows the memory that held the
    environment when the program started, so they overwrite the variable that reserved room for them there."""
    shown = b"".join(f"{name}={environment[name]}\0".encode() for name in (LAUNCH_ID, GROUP) if name in environment)
    block = Path("/proc/self/environ").read_bytes()
    room = next(entry for entry in block.split(b"\0") if entry.startswith(f"{MARKS}=".encode()))
    filler = shown + f"{MARKS}=".encode()
    assert len(filler) <= len(room), "the marks have room"
    starts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    env_start = int(starts[50 - 3])  # field 50 of proc_pid_stat(5); the list begins with field 3
    ctypes.memmove(env_start + block.index(room), filler.ljust(len(room), b"."), len(room))
