"""`trainspec certify`: measure every clause of the open training spec on the chips at hand."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Interrupted, MachineError, Problem, RecipeError, WorkerError, closest
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import REFUSALS, Certificate
from trainspec_cli.run.job.gpus import CPU_HINT
from trainspec_cli.run.job.job import machine_identity
from trainspec_cli.run.job.machine import detect
from trainspec_cli.session.console import PrintableConsole, make_console
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.certify.cases import Case, features_here, refusals
from trainspec_cli.wings.certify.certificate import read_fingerprint, read_key, sign_certificate, write_certificate
from trainspec_cli.wings.certify.certificate import verify as read_verified
from trainspec_cli.wings.certify.certificate_text import describe_trust, render_certificate
from trainspec_cli.wings.certify.clauses import LEVELS, SECURITY, read_clauses
from trainspec_cli.wings.certify.families import FAMILIES, measure_alone
from trainspec_cli.wings.certify.judge import checks, judge, judge_refusals
from trainspec_cli.wings.certify.launched import RECIPE, Bench, measure_performance, measure_security
from trainspec_cli.wings.certify.other_engine import measure_engine, wanted_of
from trainspec_cli.wings.certify.runs import measure, opened, subject_of

DEFAULT_PROCESSES = 4
ENGINE_PROCESSES = 2
"""Another engine is asked for axes one at a time."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[recipe=NAME|key=value]",
        help="Measure the model and the loss of this recipe alone, such as a user-defined block.",
        show_default=False,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="A clause (NUM-1), a family (dense) or a case; * stands for anything. May be given again."),
]
Processes = Annotated[
    int | None,
    typer.Option(
        help="The most processes of a case; as many as there are GPUs, else 4. More than there are run on the CPU.",
        min=2,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="FOLDER", help="Keep the runs here, and continue where an earlier start was stopped."
    ),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate to this file.")]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Sign with this private key; with --verify: the public key (FILE.pub, SHA256:...) that must have signed.",
    ),
]
Verify = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Compute every statement of a certificate again, check its signature, and print it."
    ),
]
OtherEngine = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND", help="Judge another engine, which this command starts (docs/spec/engine-protocol.md)."
    ),
]
Listed = Annotated[bool, typer.Option("--list", help="Name the cases, and run none.")]


def certify(
    arguments: Arguments = None,
    only: Only = None,
    processes: Processes = None,
    folder: Folder = None,
    output: Output = None,
    key: Key = None,
    verify: Verify = None,
    engine: OtherEngine = None,
    listed: Listed = False,
    as_json: AsJson = False,
) -> int:
    """Hold this engine, on these chips, against the open training spec: gradients, losses, resume, resharding.

    Every case is a real torchrun job of small models; given a recipe, of its model and its loss in every layout that
    they allow. Exits with 5 where a MUST is broken.
    """
    console = make_console(as_json=as_json)
    if verify is not None:
        given = {"--output": output, "--only": only, "--dir": folder, "--engine": engine}
        for option in (option for option, value in given.items() if value):
            message = f"{option} does not go with --verify, which reads a certificate that was made before"
            raise RecipeError(Problem("usage", message, option, "give one of the two"))
        certificate = read_verified(verify, read_fingerprint(key) if key is not None else "")
    else:
        # Whatever is wrong with these is found before minutes of runs, not after them.
        private = read_key(Path(key)) if key is not None else None
        if output is not None:
            try:
                output.open("a", encoding="utf-8").close()
            except OSError as error:
                message = f"--output {output} cannot be written: {error.strerror}"
                hint = "choose a file in a folder that is there"
                raise RecipeError(Problem("output_exists", message, hint=hint)) from error
        if engine is None:
            made = _certify_here(arguments or [], only or [], processes, folder, console, listed=listed)
        elif arguments:
            message = "another engine is asked for a model of trainspec's own choice, and a recipe was given"
            raise RecipeError(Problem("usage", message, "--engine", "leave out the recipe, or --engine"))
        else:
            made = _certify_engine(engine, only or [], processes, folder, listed=listed)
        if made is None:
            return 0
        certificate = sign_certificate(made, private) if private else made
        if output is not None:
            output.write_text(json_text(to_plain(certificate)) + "\n", encoding="utf-8")
    if as_json:
        found = {"verification": {"signed": certificate.signer is not None, "statement": describe_trust(certificate)}}
        print(json_text((found if verify is not None else {}) | to_plain(certificate)))
    else:
        console.print(render_certificate(certificate))
    return WorkerError.exit_code if certificate.verdict == "broken" else 0


def _certify_here(
    arguments: list[str],
    only: list[str],
    processes: int | None,
    folder: Path | None,
    console: Console,
    *,
    listed: bool,
) -> Certificate | None:
    """Measure this engine; None: its cases were listed.

    Raises RecipeError where the recipe cannot be measured or a pattern names nothing, MachineError where a run fails,
    Interrupted where a stop was requested.
    """
    if arguments:  # its model and its loss take the place of the families
        spec = load_for_planning(arguments).spec
        measure_alone(spec.model.family, spec.model, spec.train)
        if refused := refusals(Case(spec.model.family)):
            raise RecipeError(refused)
    recipe = tuple(arguments) or RECIPE
    machine = machine_here()
    gpus = len(machine.gpu_names)
    processes = processes or (gpus if gpus > 1 else DEFAULT_PROCESSES)
    features = features_here(on_gpu=gpus >= processes)
    launched = (*SECURITY, *LEVELS)
    for pattern in only:
        elsewhere = any(fnmatchcase(clause, pattern) for clause in (REFUSALS, *launched))
        if not elsewhere and not checks(processes, [pattern], features=features):
            names = [*read_clauses(), *FAMILIES]
            near = closest(pattern, names)
            known = f"clauses and families: {', '.join(names)}; --list names every case"
            message = f"--only {pattern} names no clause, family or case on at most {processes} processes"
            raise RecipeError(Problem("unknown_value", message, hint=f"did you mean {near}?" if near else known))
    wanted = checks(processes, only, features=features)
    if 0 < gpus < processes:
        console.print(f"{processes} processes need a GPU each, this node has {gpus}: the CPU is certified")
        machine = replace(machine, gpu_names=())
    if only:
        launched = tuple(clause for clause in launched if any(fnmatchcase(clause, pattern) for pattern in only))
    batch = load_for_planning(recipe).spec.batching.global_batch_size if launched else 0
    if listed:
        lines = [f"{check.clause}  {check.run.name}" for check in wanted]
        print("\n".join([*lines, *(f"{clause}  launched" for clause in launched)]))
        return None
    runs = list(dict.fromkeys(run for check in wanted for run in check.runs))
    findings = []
    with _workplace(folder, machine, "") as (place, since):
        if runs:
            with _bar(len(runs)) as on_done:
                results = measure(runs, place, machine, on_done)
                findings += [judge(check, results) for check in wanted]
        # On a CPU, no more processes are launched than there are cores.
        most = len(machine.gpu_names) or max(2, machine.cpu_cores)
        bench = Bench(place, machine, min(processes, most), recipe, batch)
        with PrintableConsole(stderr=True).status(f"launching runs of {' '.join(recipe)}"):
            findings += measure_security(bench, [clause for clause in launched if clause in SECURITY])
            findings += measure_performance(bench, [clause for clause in launched if clause in LEVELS])
    if not only or REFUSALS in only:
        findings += judge_refusals(processes)
    return write_certificate(
        findings,
        machine,
        date=_today(),
        measured_since=since,
        machine_id=machine_identity(),
        processes=processes,
        features=features,
        recipe=() if recipe == RECIPE else recipe,
    )


def _certify_engine(
    command: str, only: list[str], processes: int | None, folder: Path | None, *, listed: bool
) -> Certificate | None:
    """Measure another engine; raises as `_certify_here`, and WorkerError where an answer is wrong."""
    machine = machine_here()
    processes = processes or ENGINE_PROCESSES
    if len(machine.gpu_names) < processes:
        machine = replace(machine, gpu_names=())
    wanted = wanted_of(command, only, processes)
    if listed:
        print("\n".join(f"{check.clause}  {check.run.name}" for check in wanted.checks))
        return None
    engine = shlex.join(wanted.command)
    with _workplace(folder, machine, engine) as (place, since), _bar(len(wanted.runs)) as on_done:
        findings, declined = measure_engine(wanted, place, machine, on_done)
    return write_certificate(
        findings,
        machine,
        date=_today(),
        measured_since=since,
        machine_id=machine_identity(),
        engine=engine,
        processes=processes,
        not_offered=tuple(declined),
    )


def machine_here() -> Machine:
    """Raises MachineError where this node's GPUs cannot be used: the CPU is certified only where that is wanted."""
    machine = detect(look_for_gpus=True)
    if problem := machine.gpu_problem:
        hint = problem.hint.partition(f"; {CPU_HINT}")[0]
        raise MachineError(replace(problem, path="", hint=f"{hint}; CUDA_VISIBLE_DEVICES= certifies the CPU"))
    return machine


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@contextmanager
def _workplace(folder: Path | None, machine: Machine, engine: str) -> Iterator[tuple[Path, str]]:
    """Give the folder of the runs, and the day on which they were begun; where it is none of the user's, it goes."""
    try:
        if folder is not None:
            with opened(folder, subject_of(machine, engine), _today()) as since:
                yield folder, since
        else:
            with tempfile.TemporaryDirectory(prefix="trainspec-certify-") as scratch:
                yield Path(scratch), _today()
    except Interrupted as error:
        again = f"type it again to continue: {shlex.join(['trainspec', *sys.argv[1:]])}"
        hint = again if folder is not None else "with --dir FOLDER, the runs that have ended are kept"
        raise Interrupted("the certification was interrupted", code="interrupted", hint=hint) from error


@contextmanager
def _bar(runs: int) -> Iterator[Callable[[int], None]]:
    """Show how many runs have ended, beside the output."""
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=PrintableConsole(stderr=True)) as bar:
        task = bar.add_task("runs", total=runs)
        yield lambda done: bar.update(task, completed=done)
