"""`trainspec certify`: measure every clause of the open training spec on the chips at hand."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainspec_cli.certify.cases import Case, refusals
from trainspec_cli.certify.certificate import read_clauses, write_certificate
from trainspec_cli.certify.certificate import verify as read_verified
from trainspec_cli.certify.families import FAMILIES, measure_alone
from trainspec_cli.certify.judge import ClauseCheck, checks, judge, judge_refusals
from trainspec_cli.certify.runs import measure
from trainspec_cli.cli.options import AsJson
from trainspec_cli.errors import Problem, RecipeError, WorkerError, closest
from trainspec_cli.launcher.job.machine import detect
from trainspec_cli.reporter.findings import render_certificate
from trainspec_cli.session.console import PrintableConsole, make_console
from trainspec_cli.session.load import load_for_planning
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, Finding

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
Verify = Annotated[Path | None, typer.Option(help="Check the digest of this certificate, and print it.")]
Output = Annotated[Path | None, typer.Option(help="Write the certificate to this file.")]
Listed = Annotated[bool, typer.Option("--list", help="Name the cases, and run none.")]


def certify(
    arguments: Arguments = None,
    only: Only = None,
    processes: Processes = None,
    output: Output = None,
    verify: Verify = None,
    listed: Listed = False,
    as_json: AsJson = False,
) -> int:
    """Hold this engine, on these chips, against the open training spec: gradients, losses, resume, resharding.

    Every case is a real torchrun job of small models; given a recipe, of its model and its loss in every layout that
    they allow. Exits with 5 where a MUST is broken.
    """
    console = make_console(as_json=as_json)
    if verify is not None:
        return _tell(read_verified(verify), console, as_json=as_json)
    if output is not None:
        _check_writable(output)
    if arguments:
        _measure_recipe(arguments)
    machine = _machine()
    gpus = len(machine.gpu_names)
    processes = processes or (gpus if gpus > 1 else DEFAULT_PROCESSES)
    wanted = _checks(only or [], processes)
    if listed:
        print("\n".join(f"{check.clause}  {check.run.name}" for check in wanted))
        return 0
    if 0 < gpus < processes:
        console.print(f"{processes} processes need a GPU each, this node has {gpus}: the CPU is certified")
        machine = replace(machine, gpu_names=())
    certificate = _certify(wanted, only or [], processes, machine, whole=not arguments)
    if output is not None:
        output.write_text(json_text(to_plain(certificate)) + "\n", encoding="utf-8")
    return _tell(certificate, console, as_json=as_json)


DEFAULT_PROCESSES = 4


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


def _checks(only: list[str], processes: int) -> list[ClauseCheck]:
    """Raises RecipeError where a pattern names nothing."""
    for pattern in only:
        if not checks(processes, [pattern]) and pattern != "LEGAL-1":
            raise RecipeError(_names_nothing(pattern, processes))
    return checks(processes, only)


def _names_nothing(pattern: str, processes: int) -> Problem:
    names = [*read_clauses(), *FAMILIES]
    near = closest(pattern, names)
    hint = f"did you mean {near}?" if near else f"clauses and families: {', '.join(names)}; --list names every case"
    message = f"--only {pattern} names no clause, family or case on at most {processes} processes"
    return Problem("unknown_value", message, hint=hint)


def _certify(
    wanted: list[ClauseCheck], only: list[str], processes: int, machine: Machine, *, whole: bool
) -> Certificate:
    findings = _measure(wanted, machine)
    if not only or "LEGAL-1" in only:
        findings += judge_refusals(processes)
    return write_certificate(findings, machine, date=datetime.now(UTC).date().isoformat(), whole=whole and not only)


def _measure(wanted: list[ClauseCheck], machine: Machine) -> list[Finding]:
    runs = list(dict.fromkeys(run for check in wanted for run in check.runs))
    console = PrintableConsole(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="trainspec-certify-") as folder, Progress(*columns, console=console) as bar:
        task = bar.add_task("runs", total=len(runs))
        results = measure(runs, Path(folder), machine, lambda done: bar.update(task, completed=done))
        return [judge(check, results) for check in wanted]


def _tell(certificate: Certificate, console: Console, *, as_json: bool) -> int:
    if as_json:
        print(json_text(to_plain(certificate)))
    else:
        console.print(render_certificate(certificate))
    return WorkerError.exit_code if certificate.verdict == "broken" else 0
