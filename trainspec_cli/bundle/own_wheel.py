"""The wheel of trainspec itself: built from a checkout, or packed again from the files that a wheel has installed."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from trainspec_cli import __version__
from trainspec_cli.errors import MachineError, Problem

NAME = "trainspec"
PACKAGE = Path(__file__).resolve().parent.parent
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: the same files give the same wheel."""
OF_INSTALLATION = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}
"""Files of the dist-info folder that pip writes when it installs."""
GIVE_ONE = "put a wheel of trainspec into a folder, with all the others, and type --wheels FOLDER"


def own_wheel(folder: Path) -> Path:
    """Make the wheel of this trainspec in `folder`, and return it. Raises MachineError where that cannot be done."""
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return _build(checkout, folder)
    return _pack(_installed(), folder)


def _build(checkout: Path, folder: Path) -> Path:
    """Use hatchling where it is installed; else pip gets it."""
    here = ["--no-build-isolation"] if find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *here, "--wheel-dir", str(folder), str(checkout)]
    ended = subprocess.run(command, capture_output=True, text=True)
    built = list(folder.glob(f"{NAME}-*.whl"))
    if ended.returncode or len(built) != 1:
        said = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
        raise _cannot(
            f"{checkout} could not be built into a wheel: {''.join(said)}", f"pip install hatchling, or {GIVE_ONE}"
        )
    return built[0]


def _installed() -> metadata.Distribution:
    try:
        installed = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise _cannot(f"{PACKAGE} is neither a checkout nor installed by pip", GIVE_ONE) from None
    if Path(str(installed.locate_file(PACKAGE.name))).resolve() != PACKAGE:
        raise _cannot(f"{PACKAGE} is not what pip has installed ({installed.locate_file('')})", GIVE_ONE)
    return installed


def _pack(installed: metadata.Distribution, folder: Path) -> Path:
    """Pack the files that the installed RECORD names, each with the digest that stands there."""
    wheel = folder / f"{NAME}-{__version__}-py3-none-any.whl"
    rows = io.StringIO(newline="")
    lines = csv.writer(rows, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _files(installed):
            _write(archive, name, content)
            lines.writerow((name, f"sha256={_digest(content)}", len(content)))
        record = f"{NAME}-{__version__}.dist-info/RECORD"
        lines.writerow((record, "", ""))
        _write(archive, record, rows.getvalue().encode())
    return wheel


def _files(installed: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield what the wheel held. Raises MachineError for a file that is missing or was altered since."""
    repair = "install trainspec again: pip install --force-reinstall --no-deps trainspec"
    for path in installed.files or ():
        if not _is_of_wheel(path):
            continue
        try:
            content = Path(str(path.locate())).read_bytes()
        except OSError as error:
            raise _cannot(f"{path.locate()} cannot be read: {error.strerror}", repair) from error
        if path.hash is None or path.hash.value != _digest(content):
            raise _cannot(f"{path.locate()} was altered after it was installed", repair)
        yield path.as_posix(), content


def _is_of_wheel(path: PurePosixPath) -> bool:
    """Return whether a file came from the wheel: scripts and compiled files are made when it is installed."""
    is_made = path.suffix == ".pyc" or path.name in OF_INSTALLATION
    return not is_made and path.parts[0] in (PACKAGE.name, f"{NAME}-{__version__}.dist-info")


def _digest(content: bytes) -> str:
    """Return the digest as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def _cannot(message: str, hint: str) -> MachineError:
    return MachineError(Problem("no_own_wheel", message, hint=hint, environment=True))
