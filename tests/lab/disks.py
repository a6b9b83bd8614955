"""Emulated nodes that share no disk: on each host (`lab.hosts`), the same path leads to a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab.hosts import Hosts, kill, pids_on


class Disks:
    """Hosts 1 to `count`; on each, `place` is a folder of its own: `folder`/node1, `folder`/node2, ..."""

    def __init__(self, hosts: Hosts, folder: Path, environment: dict[str, str]):
        self.hosts = hosts
        self._folder = folder
        self.place = folder / "own"
        self.place.mkdir()
        self.secret = folder / "nodes.secret"
        self.secret.touch(0o600)
        self.secret.write_bytes(os.urandom(32))
        self._environment = environment | {"TRAINSPEC_NODES_SECRET": str(self.secret)}
        for number in hosts.numbers:
            self.of(number).mkdir()

    def of(self, number: int) -> Path:
        """Return the folder that is `place` on a host."""
        return self._folder / f"node{number}"

    def start(self, number: int, *arguments: object, room: str = "") -> subprocess.Popen[str]:
        """Start `trainspec ARGUMENTS` on a host. `room`: the size of its disk, which is then in memory and lost when
        the command ends (such as 20m); by default it has no limit and stays."""
        mount = f"mount -t tmpfs -o size={room} disk {self.place}" if room else f"mount --bind $0 {self.place}"
        command = [*self.hosts.inside(number), "sh", "-c", f'{mount} && exec "$@"', str(self.of(number))]
        return subprocess.Popen(
            [*command, sys.executable, "-m", "trainspec_cli", *map(str, arguments)],
            cwd=self._folder,
            env=self._environment | {"TRAINSPEC_CACHE": str(self.place / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def switch_off(self, number: int) -> None:
        """Cut a host's cable and kill all of its processes. Its disk stays, and is back when its cable is healed."""
        self.hosts.cut(number)
        for pid in pids_on(number):
            kill(pid)
