"""Install trainspec from this folder into a new virtual environment. No network is used:

    python3 install.py [--check] [VENV]

Every file is first checked against bundle.json. This module is copied to each bundle as install.py, so it imports only
the standard library. `trainspec bundle OUT --check` also calls `examine`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "bundle.json"
WHEELS = "wheels"
INSTALLER = "install.py"
SCHEMA = "trainspec.bundle/1"
CHUNK_BYTES = 2**20
MAX_RECORD_BYTES = 64 * 2**20
EXIT_USAGE, EXIT_LACKING = 2, 4
"""trainspec's own exit codes."""
_PLATFORM = re.compile(r"([a-z0-9]+)_(\d+)_(\d+)_(\w+)")
"""Family, two-part version, and processor."""


@dataclass(frozen=True)
class BundleFault:
    """A problem with a bundle, or with the machine that it is being installed on."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class BundledFile:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class BundleRecord:
    """The content of bundle.json: the systems that a bundle supports, and the digest of every other file in it."""

    version: str
    """The version of trainspec."""
    date: str
    python: str
    """Major and minor version, such as 3.12."""
    platforms: tuple[str, ...]
    extras: tuple[str, ...]
    command: str
    """The command that created the bundle."""
    launches: dict[str, tuple[str, ...]]
    """Recipe -> the arguments of `trainspec launch` in the bundle's folder."""
    files: dict[str, BundledFile]
    """Path in the bundle -> size and digest."""
    schema: str = SCHEMA

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class DamagedRecordError(Exception):
    """bundle.json cannot be used; the message states the reason."""


def read_bundle(folder: Path) -> BundleRecord:
    """Return the content of bundle.json. Raises DamagedRecordError for content that trainspec would not write."""
    try:
        with (folder / RECORD).open("rb") as file:
            content = json.loads(file.read(MAX_RECORD_BYTES))
    except OSError as error:
        raise DamagedRecordError(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise DamagedRecordError(f"does not have the schema {SCHEMA}")
    texts = {key: _field(content, key, str) for key in ("version", "date", "python", "command")}
    files = {}
    for name, entry in _field(content, "files", dict).items():
        sha256 = entry.get("sha256") if isinstance(entry, dict) else None
        size = entry.get("bytes") if isinstance(entry, dict) else None
        stays_inside = not {"", ".", ".."} & set(name.split("/")) and "\0" not in name
        if not stays_inside or not isinstance(sha256, str) or type(size) is not int:
            raise DamagedRecordError(f"lists the file {name!r}, which is outside the bundle or has no sha256 or size")
        files[name] = BundledFile(sha256, size)
    return BundleRecord(
        **texts,
        platforms=_words(_field(content, "platforms", list)),
        extras=_words(_field(content, "extras", list)),
        launches={name: _words(words) for name, words in _field(content, "launches", dict).items()},
        files=files,
    )


def _field(content: Mapping[str, object], key: str, kind: type) -> Any:
    """Return the field. Its type must be `kind`."""
    if not isinstance(content.get(key), kind):
        raise DamagedRecordError(f"has no `{key}` of Python type {kind.__name__}")
    return content[key]


def _words(listed: object) -> tuple[str, ...]:
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise DamagedRecordError(f"has {listed!r}; expected a list of words")
    return tuple(listed)


def examine(folder: Path) -> list[BundleFault]:
    """Return the bundle's files that are missing, changed, or not listed in bundle.json."""
    try:
        record = read_bundle(folder)
    except DamagedRecordError as error:
        hint = "specify a folder that trainspec bundle created, or copy bundle.json again from the original"
        return [BundleFault("bad_bundle", f"{folder / RECORD} {error}", hint)]
    faults = []
    for name, entry in sorted(record.files.items()):
        again = f"copy {shlex.quote(name)} again from the original bundle, or create a new bundle: {record.command}"
        path = folder / name
        if not os.path.lexists(path):
            faults.append(BundleFault("missing_file", f"{path} is missing", again))
            continue
        try:
            found = sha256_of(path)
        except OSError as error:
            faults.append(BundleFault("unreadable_file", f"{path} cannot be read: {error.strerror or error}", again))
            continue
        if found != entry.sha256:
            message = f"{path} has changed: its sha256 is {found}, but {RECORD} lists {entry.sha256}"
            faults.append(BundleFault("altered_file", message, again))
    # Look only in the bundle's folders, because users may keep other files, such as runs, next to them.
    for top in sorted({name.partition("/")[0] for name in record.files if "/" in name}):
        for path in sorted(path for path in (folder / top).rglob("*") if not path.is_dir() or path.is_symlink()):
            if path.relative_to(folder).as_posix() not in record.files:
                hint = f"move it elsewhere, or remove it: rm {shlex.quote(str(path))}"
                faults.append(BundleFault("extra_file", f"{path} is not listed in {RECORD}", hint))
    return faults


def sha256_of(path: Path) -> str:
    """Return the digest of a regular file. Raises OSError if it cannot be read or is not a regular file."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def machine_faults(record: BundleRecord) -> list[BundleFault]:
    """Return the reasons why this Python on this machine cannot use the bundle's wheels."""
    faults = []
    here = "{}.{}".format(*sys.version_info[:2])
    if here != record.python:
        message = f"the bundle is for Python {record.python}, but this is Python {here} ({sys.executable})"
        hint = f"run python{record.python} {INSTALLER}, or make a bundle with --python {here}"
        faults.append(BundleFault("wrong_python", message, hint))
    if not any(runs_here(name) for name in record.platforms):
        libc = " ".join(platform.libc_ver()).strip()
        machine = f"{sys.platform} on {platform.machine()}" + (f" with {libc}" if libc else "")
        message = f"the bundle is for {', '.join(record.platforms)}, but this machine is {machine}"
        hint = f"make a bundle with --platform {platform_here()} on a machine with a network"
        faults.append(BundleFault("wrong_platform", message, hint))
    return faults


def runs_here(name: str) -> bool:
    """Return whether this machine can use wheels for a platform such as manylinux_2_28_x86_64 or macosx_14_0_arm64."""
    wanted = _PLATFORM.fullmatch(name)
    here = _PLATFORM.fullmatch(platform_here())
    if wanted is None or here is None:
        return False
    is_old_enough = (int(wanted[2]), int(wanted[3])) <= (int(here[2]), int(here[3]))
    return wanted[1] == here[1] and wanted[4] == here[4] and is_old_enough


def platform_here() -> str:
    """Return the newest platform whose wheels this machine can use."""
    machine = platform.machine()
    if sys.platform == "darwin":
        major, minor = [*platform.mac_ver()[0].split("."), "0"][:2]
        return f"macosx_{major}_{minor}_{machine}"
    libc, version = platform.libc_ver()
    if libc != "glibc":
        return f"{sys.platform}_0_0_{machine}"
    return f"manylinux_{version.replace('.', '_')}_{machine}"


def install(folder: Path, record: BundleRecord, target: Path) -> None:
    """Create the virtual environment `target`, which must not exist yet. A failed installation is removed.

    pip runs from its wheel, because some Pythons lack ensurepip. It ignores user settings, because they may name an
    index."""
    try:
        venv.create(target, with_pip=False)
        (pip,) = (folder / WHEELS).glob("pip-*.whl")
        extras = f"[{','.join(record.extras)}]" if record.extras else ""
        wanted = [f"trainspec{extras}=={record.version}", "pip"]
        options = ["--no-index", "--find-links", str(folder / WHEELS), "--no-cache-dir", "--disable-pip-version-check"]
        settings = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        subprocess.run(
            [str(target / "bin" / "python"), str(pip / "pip"), "install", *options, *wanted],
            env={**settings, "PIP_CONFIG_FILE": os.devnull},
            check=True,
        )
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description="Install trainspec from this folder; no network is used.")
    parser.add_argument("venv", nargs="?", type=Path, default=Path("venv"), help="environment to create (./venv)")
    parser.add_argument("--check", action="store_true", help="compare the files with bundle.json and install nothing")
    arguments = parser.parse_args()
    folder = Path(__file__).resolve().parent
    if faults := examine(folder):
        return _print_faults(faults)
    record = read_bundle(folder)
    if faults := machine_faults(record):
        return _print_faults(faults)
    print(f"{len(record.files)} files match {RECORD}", flush=True)
    if arguments.check:
        return 0
    target = arguments.venv
    if os.path.lexists(target):
        hint = f"choose another folder: python3 {INSTALLER} FOLDER; or remove it: rm -r {shlex.quote(str(target))}"
        _print_faults([BundleFault("output_exists", f"{target} already exists", hint)])
        return EXIT_USAGE
    try:
        install(folder, record, target)
    except (OSError, subprocess.CalledProcessError) as error:
        why = f"pip ended with exit code {error.returncode}" if hasattr(error, "returncode") else str(error)
        hint = "see pip's output above; free up some space, or choose a folder that you can write to"
        return _print_faults([BundleFault("cannot_install", f"{target} could not be created: {why}", hint)])
    program = shlex.quote(str(target.absolute() / "bin" / "trainspec"))
    launches = record.launches or {"quickstart": ("recipe=quickstart",)}
    print(f"\ntrainspec {record.version} is installed in {target}. Train with:\n")
    print(f"  cd {shlex.quote(str(folder))}")
    for words in launches.values():
        print(f"  {program} launch {shlex.join(words)}")
    return 0


def _print_faults(faults: list[BundleFault]) -> int:
    for fault in faults:
        print(f"error: {fault.message}\n  hint: {fault.hint}", file=sys.stderr)
    return EXIT_LACKING


if __name__ == "__main__":
    sys.exit(main())
