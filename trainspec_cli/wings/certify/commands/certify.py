"""`trainspec certify`: measure every clause of the open training spec on this machine."""

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
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Interrupted, MachineError, Problem, RecipeError, WorkerError, closest
from trainspec_cli.core.wings import find_wings
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import REFUSALS, Certificate, Figure
from trainspec_cli.reporter.console import PrintableConsole, Text, make_console
from trainspec_cli.run.job.gpus import CPU_HINT
from trainspec_cli.run.job.job import machine_identity
from trainspec_cli.run.job.machine import detect
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.certify.cases import EMULATED, Case, features_here, refusals
from trainspec_cli.wings.certify.certificate import read_fingerprint, read_key, sign_certificate, write_certificate
from trainspec_cli.wings.certify.certificate import verify as read_verified
from trainspec_cli.wings.certify.clauses import LEVELS, SECURITY, read_clauses
from trainspec_cli.wings.certify.families import FAMILIES, measure_alone
from trainspec_cli.wings.certify.judge import checks, judge, judge_refusals
from trainspec_cli.wings.certify.launched import RECIPE, Bench, measure_performance, measure_security
from trainspec_cli.wings.certify.other_engine import measure_engine, select_checks
from trainspec_cli.wings.certify.runs import measure, opened, subject_of

DEFAULT_PROCESSES = 4
ENGINE_PROCESSES = 2
"""Number of processes for another engine, which is measured on one parallelism axis at a time."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[recipe=NAME|key=value]",
        help="Measure only this recipe's model and loss, for example with a user-defined block.",
        show_default=False,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Measure only this clause (such as NUM-1), family (such as dense) or case; * matches anything. Repeatable."
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of processes (default: the number of GPUs, or 4). With too few GPUs, the CPU is used.",
        min=2,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="FOLDER", help="Keep the runs in this folder; an interrupted certification continues there."
    ),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate to this file.")]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Sign with this private key; with --verify: public key (FILE.pub, SHA256:...) that must have signed it.",
    ),
]
Verify = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Recompute every statement of a certificate, check its signature, and print it."),
]
OtherEngine = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND", help="Measure another engine, which this command starts (docs/spec/engine-protocol.md)."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="emulated", help="Measure the engine's accelerator path on a software device, without a GPU."),
]
Listed = Annotated[bool, typer.Option("--list", help="List the cases without running them.")]


def certify(
    arguments: Arguments = None,
    only: Only = None,
    processes: Processes = None,
    folder: Folder = None,
    output: Output = None,
    key: Key = None,
    verify: Verify = None,
    engine: OtherEngine = None,
    device: Device = None,
    listed: Listed = False,
    as_json: AsJson = False,
) -> int:
    """Test this engine, on these chips, against the open training spec: gradients, losses, resume, resharding.

    Every case is a real torchrun job that trains a small model or, with a recipe, the recipe's model and loss in every
    layout that they support. Exits with 5 if a MUST is broken."""
    console = make_console(as_json=as_json)
    if verify is not None:
        given = {"--output": output, "--only": only, "--dir": folder, "--engine": engine, "--device": device}
        for option in (option for option, value in given.items() if value):
            message = f"{option} cannot be combined with --verify, which reads an existing certificate"
            raise RecipeError(Problem("usage", message, option, "use only one of these options"))
        certificate = read_verified(verify, read_fingerprint(key) if key is not None else "")
    else:
        # Check the key and the output file now instead of after minutes of runs.
        private = read_key(Path(key)) if key is not None else None
        if output is not None:
            try:
                output.open("a", encoding="utf-8").close()
            except OSError as error:
                message = f"the --output file {output} cannot be written: {error.strerror}"
                hint = "choose a file in an existing folder"
                raise RecipeError(Problem("output_exists", message, hint=hint)) from error
        if engine is None:
            made = _certify_here(arguments or [], only or [], processes, folder, console, device or "", listed=listed)
        elif device:
            message = "--device is for trainspec's own engine, but --engine names another"
            raise RecipeError(Problem("usage", message, "--device", "omit --device or --engine"))
        elif arguments:
            message = "--engine measures another engine on a fixed model, so no recipe can be specified"
            raise RecipeError(Problem("usage", message, "--engine", "omit the recipe or --engine"))
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
    device: str,
    *,
    listed: bool,
) -> Certificate | None:
    """Measure this engine and return its certificate; None if the cases were only listed. `device`: a device provided
    by a plug-in; empty for the machine's own.

    Raises RecipeError if the recipe cannot be measured or a pattern matches nothing, MachineError if a run fails, and
    Interrupted if a stop was requested."""
    if arguments:  # the recipe's model and loss replace the families
        spec = load_for_planning(arguments).spec
        measure_alone(spec.model.family, spec.model, spec.train)
        if refused := refusals(Case(spec.model.family)):
            raise RecipeError(refused)
    recipe = tuple(arguments) or RECIPE
    machine = machine_here() if not device else replace(detect(look_for_gpus=False), gpu_names=())
    gpus = len(machine.gpu_names)
    processes = processes or (gpus if gpus > 1 else DEFAULT_PROCESSES)
    features = features_here(on_gpu=gpus >= processes)
    launched: tuple[str, ...] = (*SECURITY, *LEVELS)
    if device:
        devices = [name for name, wing in find_wings().items() if "devices" in wing.parts]
        if device not in devices:
            remedy = f"pass --device {', '.join(devices)}" if devices else "leave it out"
            raise RecipeError(Problem("unknown_value", f"`{device}` is not an emulated device", "--device", remedy))
        # Launched runs measure this machine, not the device.
        features, launched = (EMULATED,), ()
    for pattern in only:
        elsewhere = any(fnmatchcase(clause, pattern) for clause in (REFUSALS, *launched))
        if not elsewhere and not checks(processes, [pattern], features=features):
            names = [*read_clauses(), *FAMILIES]
            near = closest(pattern, names)
            known = f"clauses and families: {', '.join(names)}; --list names every case"
            message = f"--only {pattern} matches no clause, family or case on at most {processes} processes"
            raise RecipeError(Problem("unknown_value", message, hint=f"did you mean {near}?" if near else known))
    wanted = checks(processes, only, features=features)
    if 0 < gpus < processes:
        console.print(f"{processes} processes need a GPU each, but this node has {gpus}: certifying the CPU instead")
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
    with _workplace(folder, machine, device) as (root, since):
        if runs:
            with _bar(len(runs)) as on_done:
                results = measure(runs, root, machine, on_done, on_device=device)
                findings += [judge(check, results) for check in wanted]
        # On a CPU, launched runs have at most one process per core.
        most = len(machine.gpu_names) or max(2, machine.cpu_cores)
        bench = Bench(root, machine, min(processes, most), recipe, batch)
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
    """Measure another engine. Raises the same errors as `_certify_here`, and WorkerError if an answer is wrong."""
    machine = machine_here()
    processes = processes or ENGINE_PROCESSES
    if len(machine.gpu_names) < processes:
        machine = replace(machine, gpu_names=())
    wanted = select_checks(command, only, processes)
    if listed:
        print("\n".join(f"{check.clause}  {check.run.name}" for check in wanted.checks))
        return None
    engine = shlex.join(wanted.command)
    with _workplace(folder, machine, engine) as (root, since), _bar(len(wanted.runs)) as on_done:
        findings, declined = measure_engine(wanted, root, machine, on_done)
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
    """Return this machine. Raises MachineError if its GPUs cannot be used, because the CPU is certified only on
    request."""
    machine = detect(look_for_gpus=True)
    if problem := machine.gpu_problem:
        hint = problem.hint.partition(f"; {CPU_HINT}")[0]
        raise MachineError(replace(problem, path="", hint=f"{hint}; set CUDA_VISIBLE_DEVICES= to certify the CPU"))
    return machine


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@contextmanager
def _workplace(folder: Path | None, machine: Machine, engine: str) -> Iterator[tuple[Path, str]]:
    """Yield the folder for the runs, and the date of the first run. Without `folder`, use a temporary folder."""
    try:
        if folder is not None:
            with opened(folder, subject_of(machine, engine), _today()) as since:
                yield folder, since
        else:
            with tempfile.TemporaryDirectory(prefix="trainspec-certify-") as scratch:
                yield Path(scratch), _today()
    except Interrupted as error:
        again = f"run the command again to continue: {shlex.join(['trainspec', *sys.argv[1:]])}"
        hint = again if folder is not None else "--dir FOLDER would keep the finished runs"
        raise Interrupted("the certification was interrupted", code="interrupted", hint=hint) from error


@contextmanager
def _bar(runs: int) -> Iterator[Callable[[int], None]]:
    """Show the number of finished runs on stderr."""
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=PrintableConsole(stderr=True)) as bar:
        task = bar.add_task("runs", total=runs)
        yield lambda done: bar.update(task, completed=done)


# The certificate as text


SHOWN_DIGITS = 16


def render_certificate(certificate: Certificate) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "what it says"):
        table.add_column(name, no_wrap=name != "what it says")
    for name in ("cases", "failed", "worst", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for clause in certificate.clauses:
        if not clause.cases:
            continue
        worst = "differs" if clause.failed else "exact"
        bound = "exact"
        if clause.bound is not None and clause.worst is not None:
            worst = show_figure(clause.worst) + (f" ({clause.grade})" if clause.grade else "")
            bound = show_figure(clause.bound)
        cells = (clause.id, clause.level, clause.title, str(clause.cases), str(clause.failed), worst, bound)
        table.add_row(*cells, style="red" if clause.failed else "")
    below = [
        Text(f"{one.clause} not offered for {one.case}: {one.reason}", style="yellow")
        for one in certificate.not_offered
    ]
    for finding in certificate.findings:
        if not finding.passed:
            figures = (
                f"{name} {f'{figure:.2e}' if isinstance(figure, float) else figure}"
                for name, figure in finding.figures.items()
            )
            below.append(Text(f"{finding.clause} is broken by {finding.case}: {', '.join(figures)}", style="red"))
    measured = [clause for clause in certificate.clauses if clause.cases]
    runs = sum(clause.cases for clause in measured if clause.id != REFUSALS)
    refusals = sum(clause.cases for clause in measured if clause.id == REFUSALS)
    counted = {"cases measured": runs, "layouts refused": refusals}
    counts = " and ".join(f"{count:,} {what}" for what, count in counted.items() if count) or "no cases"
    engine = f" by {certificate.engine}" if certificate.engine else ""
    part = f"{len(measured)} clause{'s' * (len(measured) != 1)} of the spec"
    what = f"the training spec {certificate.spec_version}" if certificate.whole else part
    gpus = certificate.machine.gpu_names
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{certificate.machine.cpu_cores} CPU cores"
    if EMULATED in certificate.features:
        where = f"an emulated accelerator ({where})"
    summary = f"{what}: {certificate.verdict}{engine}, {counts} on {where}; digest {certificate.digest[:SHOWN_DIGITS]}"
    verdict = Text(summary, style="bold red" if certificate.verdict == "broken" else "bold")
    trust = Text(describe_trust(certificate), style="" if certificate.signer else "bold yellow")
    parts: list[RenderableType] = [trust, Text(), table, *([Text(), *below] if below else []), Text(), verdict]
    if certificate.date:
        parts.append(Text(f"made on {certificate.date}"))
    if certificate.machine_id:
        parts.append(Text(f"on the machine {certificate.machine_id} ({certificate.machine.hostname})"))
    return Group(*parts)


def show_figure(value: Figure) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value < 0.1 else f"{float(value):.2f}"


def describe_trust(found: Certificate) -> str:
    """Return who signed a certificate. The caller must have checked the signature."""
    if found.signer:
        accept = "--verify FILE --key KEY accepts only the key KEY"
        return f"signed by {found.signer.fingerprint} (anyone can create a key: {accept})"
    return "unsigned: anyone could have written this certificate, including its measured values and its machine"
