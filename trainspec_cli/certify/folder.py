"""The folder of a certification that goes on where it was stopped: runs that have ended are not made again.

FOLDER/certification.json says what it is of: another version of trainspec or torch, another machine or another model is
refused. FOLDER/NAME/ holds a run; one that did not end is removed and made from its beginning.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli import __version__
from trainspec_cli.certify.certificate import spec_version
from trainspec_cli.certify.families import FAMILIES, LOSSES
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.launcher.job.identity import machine_identity
from trainspec_cli.launcher.job.provenance import versions
from trainspec_cli.reading.files import UnreadableFileError, read_object
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.canonical import canonical_json, to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.records import FieldError, read_record
from trainspec_cli.spec.results.tools import CertifyRun
from trainspec_cli.trust import make_folder

HEADER, LOCK = "certification.json", "lock"
RESULT, ASKED = "result.json", "asked.json"
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Subject:
    """What a certification measures, and on what. Each field has to be the same when it goes on."""

    trainspec: str
    code_sha256: str
    """Digest of trainspec's own code."""
    training_spec: str
    versions: dict[str, str]
    machine_id: str
    machine: Machine
    models_sha256: str
    """Digest of the models and the losses that the clauses are measured on."""
    engine: str = ""
    """The command of another engine; empty for trainspec's own."""


@dataclass(frozen=True)
class Header:
    since: str
    """The day on which its first run was made."""
    subject: Subject


@dataclass(frozen=True)
class AskedRun:
    """What a kept run was asked for, so that another one of its name is told from it."""

    sha256: str


def subject_of(machine: Machine, engine: str = "") -> Subject:
    models = {name: to_plain(model) for name, model in FAMILIES.items()}
    losses = {name: to_plain(section) for name, section in LOSSES.items()}
    return Subject(
        trainspec=__version__,
        code_sha256=_code_digest(),
        training_spec=spec_version(),
        versions=versions(),
        machine_id=machine_identity(),
        machine=machine,
        models_sha256=_sha256(canonical_json({"models": models, "losses": losses})),
        engine=engine,
    )


def _code_digest() -> str:
    files = sorted(PACKAGE.rglob("*.py"))
    return _sha256("\n".join(f"{file.relative_to(PACKAGE)} {_sha256(file.read_text())}" for file in files))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def opened(folder: Path, subject: Subject, today: str) -> Iterator[str]:
    """Hold the folder for this process, made where there is none; the value is the day on which it was begun.

    Raises RecipeError where it holds something else, another certification, or one that goes on; MachineError where it
    belongs to somebody else.
    """
    if folder.exists() and not (folder / HEADER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} holds something else than a certification"
        raise RecipeError(Problem("other_certification", message, "--dir", "choose a folder that is not there yet"))
    try:
        make_folder(folder, "choose a folder of your own: --dir FOLDER")
        lock = (folder / LOCK).open("w")
    except OSError as error:
        message = f"{folder} cannot be written: {error.strerror}"
        raise RecipeError(Problem("output_exists", message, "--dir", "choose a folder that you may write")) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another certification goes on in {folder}"
            raise RecipeError(
                Problem("in_use", message, "--dir", "wait for its end, or choose another folder")
            ) from error
        yield _begun(folder, subject, today)


def _begun(folder: Path, subject: Subject, today: str) -> str:
    if not (folder / HEADER).exists():
        write_json(folder / HEADER, to_plain(Header(today, subject)))
        return today
    header = _read_header(folder)
    theirs, ours = to_plain(header.subject), to_plain(subject)
    if others := [name for name in ours if theirs.get(name) != ours[name]]:
        raise _refused(folder, f"{folder} holds the runs of another certification: {', '.join(others)} differ")
    return header.since


def _read_header(folder: Path) -> Header:
    try:
        return read_record(Header, read_object(folder / HEADER))
    except (UnreadableFileError, FieldError) as error:
        raise _refused(folder, f"{folder / HEADER} is damaged: {error}") from error


def _refused(folder: Path, message: str) -> RecipeError:
    hint = f"choose another folder, or begin anew: rm -r {shlex.quote(str(folder))}"
    return RecipeError(Problem("other_certification", message, "--dir", hint))


# Runs in it


def is_kept(run: Path, asked: CertifyRun) -> bool:
    """Return whether the folder of a run holds the result of what is asked for."""
    if not (run / RESULT).is_file() or not (run / ASKED).is_file():
        return False
    try:
        return read_record(AskedRun, read_object(run / ASKED)) == _asked(asked)
    except (UnreadableFileError, FieldError):
        return False


def begin_run(run: Path, asked: CertifyRun) -> None:
    """Make the folder of a run; what an earlier one has left there is removed."""
    if run.exists():
        shutil.rmtree(run)
    run.mkdir(parents=True)
    write_json(run / ASKED, to_plain(_asked(asked)))


def _asked(run: CertifyRun) -> AskedRun:
    return AskedRun(_sha256(canonical_json(to_plain(run))))
