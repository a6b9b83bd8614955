"""This node: its name and CPU, the user's cache, and which files can be trusted."""

from __future__ import annotations

import errno
import os
import platform
import pwd
import shlex
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainspec_cli.core.environment_names import CACHE
from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.reading.files import expand

CPUINFO = Path("/proc/cpuinfo")


def node_name() -> str:
    """Return Slurm's name for this node, or its hostname outside Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the vendor's name for the CPU, or the architecture if there is none."""
    return _cpu_line("model name", cpuinfo) or platform.processor() or platform.machine()


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the CPU's instruction-set flags; empty if the system does not list them (macOS)."""
    return frozenset(_cpu_line("flags", cpuinfo).split())


def _cpu_line(key: str, cpuinfo: Path) -> str:
    """Return the first value of `key` in /proc/cpuinfo, or ""."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


# Locate the user's cache (prepared data, machine measurements, cluster profiles, memory limits), and the folder with
# the list of runs.


CHOOSE_ANOTHER = f"choose your own folder for prepared data and measured results: {CACHE}=FOLDER"


def cache_dir() -> Path:
    """Return the first of `$TRAINSPEC_CACHE`, `$XDG_CACHE_HOME/trainspec` and `~/.cache/trainspec` that is set; it may
    not exist yet.

    Raises MachineError if it belongs to another user or is world-writable, because a run might then train on data that
    other users put there."""
    folder = _location()
    if folder.exists():
        check_folder(folder, CHOOSE_ANOTHER)
    return folder


def state_dir() -> Path:
    """Return the first of `$TRAINSPEC_CACHE`, `$XDG_STATE_HOME/trainspec` and `~/.local/state/trainspec` that is set,
    for data that cannot be obtained again; it may not exist yet. Raises MachineError in the same cases as
    `cache_dir`."""
    if os.environ.get(CACHE):
        return cache_dir()
    base = os.environ.get("XDG_STATE_HOME")
    folder = (Path(base) if base else Path.home() / ".local" / "state") / "trainspec"
    if folder.exists():
        check_folder(folder, CHOOSE_ANOTHER)
    return folder


def make_cache() -> None:
    """Create the cache, accessible only to this user, if it does not exist.

    Raises MachineError in the same cases as `cache_dir`, and if the cache is not writable."""
    folder = _location()
    try:
        make_folder(folder, CHOOSE_ANOTHER)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _location() -> Path:
    if chosen := os.environ.get(CACHE):
        return expand(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainspec"


def cannot_write(folder: Path, error: OSError) -> MachineError:
    # A full disk and a folder without write permission need different remedies.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            f"no space left to write {folder}",
            code="disk_full",
            hint=f"free space on the disk of {folder.parent}, or choose another folder ({CACHE}=FOLDER)",
        )
    return MachineError(
        f"cannot write {folder}: {error.strerror or error}",
        code="cannot_write",
        hint=f"choose a folder that you can write to ({CACHE}=FOLDER for prepared data)",
    )


# Decide which files can be trusted on a shared machine, and make files private to this user.
#
# A file is trusted if it belongs to this user or to root and is not world-writable. Sharing with a group is the owner's
# choice, so group permissions are ignored.


PRIVATE_UMASK = 0o077
PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
NEVER_READ = ("wandb",)
"""Folders at the top level of a run folder that another program writes and trainspec never reads. For example, Weights
& Biases puts links in its folder: `latest-run`, and `debug-core.log`, which points to its cache in the user's home
folder."""


_private_lock = threading.Lock()
_private_masks: list[int] = []
"""The masks before each of the blocks of `private_files` that are open; the first is the process's usual one."""


@contextmanager
def private_files() -> Iterator[None]:
    """Make all files created in the block, by this process and its children, accessible only to this user. The mask
    belongs to the process, so it is restored when no thread is in such a block any more."""
    with _private_lock:
        _private_masks.append(os.umask(PRIVATE_UMASK))
    try:
        yield
    finally:
        with _private_lock:
            before = _private_masks.pop()
            if not _private_masks:
                os.umask(before)


def make_folder(folder: Path, hint: str) -> None:
    """Create `folder`, accessible only to this user; leave an existing one unchanged.

    Raises MachineError in the same cases as `check_folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(PRIVATE_FOLDER)
    except FileExistsError:
        check_folder(folder, hint)


def check_folder(folder: Path, hint: str) -> None:
    """Raise MachineError with `hint` if `folder`, or the link to it, cannot be trusted."""
    try:
        stats = (folder.lstat(), folder.stat())
    except OSError as error:
        raise _refuse(f"{folder} cannot be examined: {error.strerror}", hint) from error
    for found in stats:
        if reason := why_not_trusted(found):
            raise _refuse(f"{folder} {reason}", hint)


def check_private(folder: Path, hint: str) -> None:
    """Raise MachineError unless `folder` is a real folder of this user that no other user can open."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _refuse(f"{folder} is not a folder", hint)
    if found.st_uid != os.geteuid():
        raise _refuse(f"{folder} belongs to {_user(found.st_uid)}", hint)
    if found.st_mode & PRIVATE_UMASK:
        raise _refuse(f"{folder} is open to other users", hint)


PIPES = "progress"
"""The folder in a run folder that may contain named pipes of this user."""


def check_tree(root: Path) -> None:
    """Raise MachineError if anything below `root` cannot be trusted, or is a link to a target outside it.

    `root` itself may be a link that belongs to this user. The folders in `NEVER_READ` are checked, but their content is
    not."""
    real = root.resolve()
    copy = f"use your own copy: cp -rP {shlex.quote(str(root))} {shlex.quote(f'./{real.name}-copy')}"
    check_folder(root, f"if you trust everyone who can write to it, {copy}")
    for name, found in _walk(real, tuple(real / folder for folder in NEVER_READ)):
        path = root / name.relative_to(real)
        if reason := why_not_trusted(found):
            raise _refuse(f"{path} {reason}", f"if you trust its content, {copy}")
        if stat.S_ISLNK(found.st_mode):
            target = Path(os.path.realpath(name))
            if not target.is_relative_to(real):
                remove = f"remove the link: rm {shlex.quote(str(path))}"
                hint = f"{remove}; if the run needs its target, put a copy in place of the link"
                raise _refuse(f"{path} is a link to a target outside of {real}: {target}", hint)
        elif stat.S_ISFIFO(found.st_mode) and name.is_relative_to(real / PIPES):
            continue  # a pipe of the hook in user programs (`wings/own_script/hook`)
        elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
            raise _refuse(f"{path} is neither a file nor a folder", f"remove it: rm {shlex.quote(str(path))}")


def read_private(path: Path, max_bytes: int) -> bytes:
    """Return up to `max_bytes` of a regular file. Raises OSError if it belongs to another user, or if others can open
    it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & PRIVATE_UMASK:
            raise OSError(errno.EPERM, "it belongs to another user, or others may read it")
        return file.read(max_bytes)


def is_plain_name(name: object) -> bool:
    """Return True if `name` is a bare file name, which cannot point to another folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def _walk(root: Path, closed: tuple[Path, ...]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything below `root`, with a folder before its content. The content of folders in `closed` is
    skipped."""
    folders = [str(root)]
    while folders:
        try:
            found = list(_scan(folders.pop()))
        except OSError as error:
            hint = f"list the unreadable files: find {shlex.quote(str(root))} > /dev/null"
            raise _refuse(f"some files below {root} cannot be read: {error.strerror}", hint) from error
        yield from ((Path(path), facts) for path, facts in found)
        folders += [path for path, facts in found if stat.S_ISDIR(facts.st_mode) and Path(path) not in closed]


def _scan(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the entries of a folder. Entries that a live run has renamed or removed in the meantime are skipped."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False)


def why_not_trusted(found: os.stat_result) -> str:
    """Return why a file with this owner and mode cannot be trusted; "" if it can."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to {_user(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode):
        return "can be written by every user of this machine"
    return ""


def _user(uid: int) -> str:
    try:
        return f"another user, {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"another user, number {uid}"


def _refuse(message: str, hint: str) -> MachineError:
    return MachineError(Problem("not_trusted", message, hint=hint, environment=True))
