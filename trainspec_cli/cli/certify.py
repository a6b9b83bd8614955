"""`trainspec certify`: measure every clause of the open training spec on the chips at hand."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainspec_cli.certify import keys
from trainspec_cli.certify.cases import Case, refusals
from trainspec_cli.certify.certificate import Terms, read_clauses, sign_certificate, write_certificate
from trainspec_cli.certify.families import FAMILIES, measure_alone
from trainspec_cli.certify.folder import opened, subject_of
from trainspec_cli.certify.judge import ClauseCheck, checks, judge, judge_refusals
from trainspec_cli.certify.runs import measure
from trainspec_cli.certify.verify import Asked
from trainspec_cli.certify.verify import verify as read_verified
from trainspec_cli.cli.options import AsJson
from trainspec_cli.errors import Interrupted, Problem, RecipeError, WorkerError, closest
from trainspec_cli.launcher.job.identity import machine_identity
from trainspec_cli.launcher.job.machine import detect
from trainspec_cli.reporter.certificate import render_certificate
from trainspec_cli.session.console import PrintableConsole, make_console
from trainspec_cli.session.load import load_for_planning
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, Finding

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[recipe=NAME|key=value]",
        help="Measure the model and the loss of this recipe alone, such as one's own block.",
        show_default=False,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="A clause (NUM-1), a family (dense) or a case; * stands for anything. May be given again."),
]
Processes = Annotated[
    int | None,
    typer.Option(help="At most so many; as many as there are GPUs, else 4. More than there are run on the CPU.", min=2),
]
Verify = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Check the digest, the signature and the dates of a certificate, and print it."),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate to this file.")]
Listed = Annotated[bool, typer.Option("--list", help="Name the cases, and run none.")]
Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", help="Keep the runs here, and go on where an earlier start was stopped."),
]
MakeKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Make a key to sign with: FILE, private to you, and FILE.pub.")
]
Sign = Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the certificate with this private key.")]
SignedBy = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="With --verify: refuse what is not signed by this public key (FILE.pub, SHA256:...)."
    ),
]
Challenge = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="CHALLENGE",
        help="Words of whoever asks for the certificate, which it holds; with --verify, refuse one without them.",
    ),
]
OnMachine = Annotated[
    str | None,
    typer.Option("--machine", metavar="ID", help="With --verify: refuse one of another machine; `here` is this one."),
]
ValidDays = Annotated[int, typer.Option(metavar="N", min=1, max=36_500, help="The certificate expires after so many.")]


def certify(
    arguments: Arguments = None,
    only: Only = None,
    processes: Processes = None,
    folder: Folder = None,
    output: Output = None,
    sign: Sign = None,
    valid_days: ValidDays = 365,
    challenge: Challenge = None,
    verify: Verify = None,
    signed_by: SignedBy = None,
    machine: OnMachine = None,
    make_key: MakeKey = None,
    listed: Listed = False,
    as_json: AsJson = False,
) -> int:
    """Hold this engine, on these chips, against the open training spec: gradients, losses, resume, resharding.

    Every case is a real torchrun job of small models; given a recipe, of its model and its loss in every layout that
    they allow. Exits with 5 where a MUST is broken.
    """
    console = make_console(as_json=as_json)
    if make_key is not None:
        return _make_key(make_key, as_json=as_json)
    if challenge is not None:
        _check_challenge(challenge)
    if verify is not None:
        _refuse_with_verify({"--sign": sign, "--output": output, "--only": only, "--dir": folder})
        return _tell(read_verified(verify, _asked(signed_by, challenge, machine)), console, as_json=as_json)
    _refuse_without_verify({"--signed-by": signed_by, "--machine": machine})
    key = keys.read_key(sign) if sign is not None else None
    if output is not None:
        _check_writable(output)
    if arguments:
        _measure_recipe(arguments)
    wanted = _wanted(only or [], processes, console, whole=not arguments and not only)
    if listed:
        print("\n".join(f"{check.clause}  {check.run.name}" for check in wanted.checks))
        return 0
    certificate = _certify(wanted, folder, _terms(valid_days, challenge), key)
    if output is not None:
        output.write_text(json_text(to_plain(certificate)) + "\n", encoding="utf-8")
    return _tell(certificate, console, as_json=as_json)


DEFAULT_PROCESSES = 4
MOST_WORDS = 200


# Keys, and certificates of others


def _make_key(file: Path, *, as_json: bool) -> int:
    signer = keys.make_key(file)
    if as_json:
        print(json_text(to_plain(signer)))
    else:
        print(f"{signer.public_key}\n{signer.fingerprint}\n\nprivate key  {file}\npublic key   {file}{keys.SUFFIX}")
    return 0


def _check_challenge(challenge: str) -> None:
    if not challenge.isprintable() or not 0 < len(challenge) <= MOST_WORDS:
        message = f"--for takes a line of 1 to {MOST_WORDS} printable characters, not {challenge[:MOST_WORDS]!r}"
        hint = "such as --for $(openssl rand -hex 16)"
        raise RecipeError(Problem("usage", message, "--for", hint))


def _asked(signed_by: str | None, challenge: str | None, machine: str | None) -> Asked:
    fingerprint = keys.read_fingerprint(signed_by) if signed_by is not None else ""
    return Asked(fingerprint, challenge or "", machine_identity() if machine == "here" else machine or "")


def _refuse_with_verify(given: Mapping[str, object]) -> None:
    if named := [option for option, value in given.items() if value]:
        message = f"{named[0]} goes with a certificate that is made, and --verify reads one"
        raise RecipeError(Problem("usage", message, named[0], "give one of the two"))


def _refuse_without_verify(given: Mapping[str, object]) -> None:
    if named := [option for option, value in given.items() if value is not None]:
        message = f"{named[0]} says what a certificate has to be, and none is given"
        raise RecipeError(Problem("usage", message, named[0], f"type --verify FILE {named[0]} ..."))


def _terms(valid_days: int, challenge: str | None) -> Terms:
    until = _today() + timedelta(days=valid_days)
    return Terms(until.isoformat(), challenge or "", machine_id=machine_identity())


def _today() -> date:
    return datetime.now(UTC).date()


# What is measured


@dataclass(frozen=True)
class Wanted:
    """What this command is to measure."""

    checks: list[ClauseCheck]
    only: list[str]
    processes: int
    machine: Machine
    whole: bool


def _wanted(only: list[str], processes: int | None, console: Console, *, whole: bool) -> Wanted:
    machine = _machine()
    gpus = len(machine.gpu_names)
    processes = processes or (gpus if gpus > 1 else DEFAULT_PROCESSES)
    found = _checks(only, processes, on_gpu=gpus >= processes)
    if 0 < gpus < processes:
        console.print(f"{processes} processes need a GPU each, this node has {gpus}: the CPU is certified")
        machine = replace(machine, gpu_names=())
    return Wanted(found, only, processes, machine, whole)


def _measure_recipe(arguments: list[str]) -> None:
    """Take the model and the loss of a recipe in place of the families."""
    spec = load_for_planning(arguments).spec
    measure_alone(spec.model.family, spec)
    if refused := refusals(Case(spec.model.family)):
        raise RecipeError(refused)


def _check_writable(output: Path) -> None:
    """Check the folder before minutes of runs, not after them."""
    try:
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        message = f"--output {output} cannot be written: {error.strerror}"
        raise RecipeError(Problem("output_exists", message, hint="choose a file in a folder that is there")) from error


def _machine() -> Machine:
    return detect(look_for_gpus=True)


def _checks(only: list[str], processes: int, *, on_gpu: bool) -> list[ClauseCheck]:
    """Raises RecipeError where a pattern names nothing."""
    for pattern in only:
        if not checks(processes, [pattern], on_gpu=on_gpu) and pattern != "LEGAL-1":
            raise RecipeError(_names_nothing(pattern, processes))
    return checks(processes, only, on_gpu=on_gpu)


def _names_nothing(pattern: str, processes: int) -> Problem:
    names = [*read_clauses(), *FAMILIES]
    near = closest(pattern, names)
    hint = f"did you mean {near}?" if near else f"clauses and families: {', '.join(names)}; --list names every case"
    message = f"--only {pattern} names no clause, family or case on at most {processes} processes"
    return Problem("unknown_value", message, hint=hint)


def _certify(wanted: Wanted, folder: Path | None, terms: Terms, key: Ed25519PrivateKey | None) -> Certificate:
    today = _today().isoformat()
    with _workplace(folder, wanted.machine, today) as (place, since):
        findings = _measure(wanted.checks, place, wanted.machine)
    if not wanted.only or "LEGAL-1" in wanted.only:
        findings += judge_refusals(wanted.processes)
    terms = replace(terms, measured_since=since)
    certificate = write_certificate(findings, wanted.machine, date=today, whole=wanted.whole, terms=terms)
    return sign_certificate(certificate, key) if key else certificate


@contextmanager
def _workplace(folder: Path | None, machine: Machine, today: str) -> Iterator[tuple[Path, str]]:
    """Give the folder of the runs, and the day on which they were begun; where it is none of the user's, it goes."""
    try:
        if folder is not None:
            with opened(folder, subject_of(machine), today) as since:
                yield folder, since
        else:
            with tempfile.TemporaryDirectory(prefix="trainspec-certify-") as scratch:
                yield Path(scratch), today
    except Interrupted as error:
        again = f"type it again to go on: {shlex.join(['trainspec', *sys.argv[1:]])}"
        hint = again if folder is not None else "with --dir FOLDER, the runs that have ended are kept"
        raise Interrupted("the certification was interrupted", code="interrupted", hint=hint) from error


def _measure(wanted: list[ClauseCheck], folder: Path, machine: Machine) -> list[Finding]:
    runs = list(dict.fromkeys(run for check in wanted for run in check.runs))
    console = PrintableConsole(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("runs", total=len(runs))
        results = measure(runs, folder, machine, lambda done: bar.update(task, completed=done))
        return [judge(check, results) for check in wanted]


def _tell(certificate: Certificate, console: Console, *, as_json: bool) -> int:
    if as_json:
        print(json_text(to_plain(certificate)))
    else:
        console.print(render_certificate(certificate))
    return WorkerError.exit_code if certificate.verdict == "broken" else 0
