"""Whole machines, emulated on this one: each has a network of its own (`hosts.py`), its own process ids, host name and
/dev/shm, and can be switched off at once. They share one disk, which can be frozen and filled.

Needs what `hosts.py` needs, and loop devices with ext4.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lab import hosts
from lab.hosts import Hosts, run

FREEZE_S = 0.5
THAW_S = 0.05
"""A slow disk is frozen for 0.5 s at a time, and then serves what waits for 0.05 s."""
INIT = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo ready && while :; do sleep 3600 & wait $!; done"
"""The first process of a machine. It reaps orphans, and everything else on the machine dies with it."""


def lacking() -> str:
    """Why machines cannot be emulated here; empty where they can."""
    missing = [tool for tool in ("mkfs.ext4", "losetup", "fsfreeze", "fallocate") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install e2fsprogs util-linux)"
    if not Path("/dev/loop-control").exists():
        return "no loop devices"
    return hosts.lacking()


class Disk:
    """An ext4 file system in a file, mounted at `folder`."""

    def __init__(self, image: Path, folder: Path, megabytes: int = 512):
        self.folder = folder
        self._ballast = folder / "ballast"
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(megabytes * 2**20)
            run("mkfs.ext4", "-q", "-m", 0, image)
        folder.mkdir(exist_ok=True)
        run("mount", "-o", "loop,noatime", image, folder)

    def fill(self) -> None:
        """Leave no free block."""
        subprocess.run(["fallocate", "-l", str(2**40), self._ballast], capture_output=True)
        free = os.statvfs(self.folder)
        with contextlib.suppress(OSError), self._ballast.open("ab") as file:
            file.write(b"\0" * (free.f_bavail * free.f_bsize + 2**20))

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """During the block, whoever writes waits most of the time. The block itself must not write there."""
        over = threading.Event()

        def freeze_and_thaw() -> None:
            while not over.is_set():
                run("fsfreeze", "--freeze", self.folder)
                over.wait(FREEZE_S)
                run("fsfreeze", "--unfreeze", self.folder)
                time.sleep(THAW_S)

        thread = threading.Thread(target=freeze_and_thaw)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def remove(self) -> None:
        self.empty()
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


class Machine:
    """A machine with the number of its host. It is off at first."""

    def __init__(self, hosts: Hosts, number: int):
        self._hosts = hosts
        self.number = number
        self._outside: subprocess.Popen[str] | None = None
        self._init: psutil.Process | None = None
        self._namespace = ""

    @property
    def is_on(self) -> bool:
        return self._init is not None

    def switch_on(self) -> None:
        unshare = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "bash", "-c", INIT]
        command = [*self._hosts.inside(self.number), *unshare]
        self._outside = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=-3, text=True)
        assert self._outside.stdout is not None and self._outside.stdout.readline() == "ready\n", "it did not start"
        (self._init,) = psutil.Process(self._outside.pid).children()
        self._namespace = str(Path(f"/proc/{self._init.pid}/ns/pid").readlink())

    def switch_off(self) -> None:
        """Kill all processes at once; what was in memory is lost."""
        assert self._init is not None and self._outside is not None, "the machine is on"
        self._init.kill()
        self._outside.wait()
        self._init = None

    def start(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], said: Path) -> Started:
        """Run a command in `folder`; its output is appended to the file `said`."""
        assert self._init is not None, "the machine is on"
        enter = ["nsenter", f"--target={self._init.pid}", "--pid", "--mount", "--uts", "--net"]
        with said.open("ab") as file:
            process = subprocess.Popen(
                [*enter, "env", f"--chdir={folder}", *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Started(process)

    def processes(self) -> list[psutil.Process]:
        """Return all live processes but the first one."""
        found = []
        for pid in psutil.pids():  # process_iter would return objects that remember a name from before it changed
            with contextlib.suppress(OSError, psutil.Error):
                if str(Path(f"/proc/{pid}/ns/pid").readlink()) == self._namespace:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE and process != self._init and process.name() != "sleep":
                        found.append(process)
        return found if self._init else []


class Started:
    """A command on a machine."""

    def __init__(self, outside: subprocess.Popen[bytes]):
        self._outside = outside
        """nsenter, which waits for the command and ends as it does."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._outside.poll()

    @property
    def process(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            return next(iter(psutil.Process(self._outside.pid).children()), None)
        return None

    def resume(self) -> None:
        """Continue after the command was stopped and continued: nsenter stops with it, but does not continue. Its
        machine could not be switched off otherwise, because nobody would reap the command."""
        self._outside.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        if process := self.process:
            process.send_signal(signal.SIGINT)


class Machines:
    """Machines 1 to `count`, switched on, with a shared disk at `folder`/disk."""

    def __init__(self, count: int, folder: Path):
        self.hosts = Hosts(count)
        self.disk = Disk(folder / "disk.img", folder / "disk")
        self.machines = {number: Machine(self.hosts, number) for number in self.hosts.numbers}
        for machine in self.machines.values():
            machine.switch_on()

    def remove(self) -> None:
        for machine in self.machines.values():
            if machine.is_on:
                machine.switch_off()
        self.hosts.remove()
        self.disk.remove()
