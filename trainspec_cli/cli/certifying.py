"""What `trainspec certify` measures, with its progress on the terminal, and the certificate that comes of it."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainspec_cli.certify.cases import Case, refusals
from trainspec_cli.certify.certificate import Terms, read_clauses, sign_certificate, write_certificate
from trainspec_cli.certify.engine.certification import EngineWanted, measure_engine, runs_of, wanted_of
from trainspec_cli.certify.families import FAMILIES, measure_alone
from trainspec_cli.certify.folder import opened, subject_of
from trainspec_cli.certify.judge import ClauseCheck, checks, judge, judge_refusals
from trainspec_cli.certify.kernel_cases import features_here
from trainspec_cli.certify.performance import RECIPE, Bench, measure_performance
from trainspec_cli.certify.runs import measure
from trainspec_cli.certify.security import measure_security
from trainspec_cli.certify.standing import LEVELS, SECURITY
from trainspec_cli.certify.verify import is_whole
from trainspec_cli.errors import Interrupted, MachineError, Problem, RecipeError, closest
from trainspec_cli.launcher.job.gpus import CPU_HINT
from trainspec_cli.launcher.job.machine import detect
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, Finding

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

DEFAULT_PROCESSES = 4
ENGINE_PROCESSES = 2
"""Another engine is asked for axes one at a time."""


@dataclass(frozen=True)
class WantedHere:
    """What is to be measured of this engine."""

    checks: list[ClauseCheck]
    launched: list[str]
    """Clauses that are measured on runs as they are launched."""
    recipe: tuple[str, ...]
    batch: int
    """What is launched, and the samples of a step of it."""
    only: list[str]
    processes: int
    machine: Machine
    features: tuple[str, ...]

    @property
    def cases(self) -> list[str]:
        """Return the name of each case, with its clause."""
        named = [f"{check.clause}  {check.run.name}" for check in self.checks]
        return [*named, *(f"{clause}  launched" for clause in self.launched)]


@dataclass(frozen=True)
class OtherWanted:
    """What is to be measured of another engine."""

    engine: EngineWanted
    machine: Machine
    processes: int

    @property
    def cases(self) -> list[str]:
        return [f"{check.clause}  {check.run.name}" for check in self.engine.checks]


def wanted_here(only: list[str], processes: int | None, arguments: list[str], console: Console) -> WantedHere:
    """Raises RecipeError where the recipe cannot be measured, or a pattern names nothing."""
    if arguments:
        _measure_recipe(arguments)
    recipe = tuple(arguments) or RECIPE
    machine = machine_here()
    gpus = len(machine.gpu_names)
    processes = processes or (gpus if gpus > 1 else DEFAULT_PROCESSES)
    features = features_here(on_gpu=gpus >= processes)
    found = _checks(only, processes, features)
    if 0 < gpus < processes:
        console.print(f"{processes} processes need a GPU each, this node has {gpus}: the CPU is certified")
        machine = replace(machine, gpu_names=())
    launched = [
        clause for clause in (*SECURITY, *LEVELS) if not only or any(fnmatchcase(clause, pattern) for pattern in only)
    ]
    batch = load_for_planning(recipe).spec.batching.global_batch_size if launched else 0
    return WantedHere(found, launched, recipe, batch, only, processes, machine, features)


def wanted_of_engine(command: str, only: Sequence[str], processes: int | None, seconds: float) -> OtherWanted:
    """Raises RecipeError where there is no such command, or a pattern names nothing."""
    machine = machine_here()
    processes = processes or ENGINE_PROCESSES
    if len(machine.gpu_names) < processes:
        machine = replace(machine, gpu_names=())
    return OtherWanted(wanted_of(command, only, processes, seconds), machine, processes)


def _measure_recipe(arguments: list[str]) -> None:
    """Take the model and the loss of a recipe in place of the families."""
    spec = load_for_planning(arguments).spec
    measure_alone(spec.model.family, spec)
    if refused := refusals(Case(spec.model.family)):
        raise RecipeError(refused)


def machine_here() -> Machine:
    """Raises MachineError where this node's GPUs cannot be used: the CPU is certified only where that is wanted."""
    machine = detect(look_for_gpus=True)
    if problem := machine.gpu_problem:
        hint = problem.hint.partition(f"; {CPU_HINT}")[0]
        raise MachineError(replace(problem, path="", hint=f"{hint}; CUDA_VISIBLE_DEVICES= certifies the CPU"))
    return machine


def _checks(only: list[str], processes: int, features: Sequence[str]) -> list[ClauseCheck]:
    """Raises RecipeError where a pattern names nothing."""
    for pattern in only:
        elsewhere = any(fnmatchcase(clause, pattern) for clause in ("LEGAL-1", *SECURITY, *LEVELS))
        if not elsewhere and not checks(processes, [pattern], features=features):
            raise RecipeError(_names_nothing(pattern, processes))
    return checks(processes, only, features=features)


def _names_nothing(pattern: str, processes: int) -> Problem:
    names = [*read_clauses(), *FAMILIES]
    near = closest(pattern, names)
    hint = f"did you mean {near}?" if near else f"clauses and families: {', '.join(names)}; --list names every case"
    message = f"--only {pattern} names no clause, family or case on at most {processes} processes"
    return Problem("unknown_value", message, hint=hint)


def certify_here(wanted: WantedHere, folder: Path | None, terms: Terms, key: Ed25519PrivateKey | None) -> Certificate:
    """Measure this engine. Raises MachineError where a run fails, Interrupted where a stop was requested."""
    with _workplace(folder, wanted.machine, "") as (place, since):
        findings = [*_measure(wanted.checks, place, wanted.machine), *_launch(wanted, place)]
    if not wanted.only or "LEGAL-1" in wanted.only:
        findings += judge_refusals(wanted.processes)
    recipe = () if wanted.recipe == RECIPE else wanted.recipe
    said = replace(terms, measured_since=since, processes=wanted.processes, features=wanted.features, recipe=recipe)
    return _write(findings, wanted.machine, said, key)


def certify_other(wanted: OtherWanted, folder: Path | None, terms: Terms, key: Ed25519PrivateKey | None) -> Certificate:
    """Measure another engine. Raises as `certify_here`, and WorkerError where an answer is wrong."""
    command = shlex.join(wanted.engine.command)
    with _workplace(folder, wanted.machine, command) as (place, since), _bar(len(runs_of(wanted.engine))) as on_done:
        findings, declined = measure_engine(wanted.engine, place, wanted.machine, on_done)
    said = replace(terms, measured_since=since, engine=command, processes=wanted.processes)
    return _write(findings, wanted.machine, replace(said, not_offered=tuple(declined)), key)


def _write(findings: Sequence[Finding], machine: Machine, terms: Terms, key: Ed25519PrivateKey | None) -> Certificate:
    date = today().isoformat()
    certificate = write_certificate(findings, machine, date=date, whole=False, terms=terms)
    if is_whole(certificate):
        certificate = write_certificate(findings, machine, date=date, whole=True, terms=terms)
    return sign_certificate(certificate, key) if key else certificate


def today() -> date:
    return datetime.now(UTC).date()


@contextmanager
def _workplace(folder: Path | None, machine: Machine, engine: str) -> Iterator[tuple[Path, str]]:
    """Give the folder of the runs, and the day on which they were begun; where it is none of the user's, it goes."""
    try:
        if folder is not None:
            with opened(folder, subject_of(machine, engine), today().isoformat()) as since:
                yield folder, since
        else:
            with tempfile.TemporaryDirectory(prefix="trainspec-certify-") as scratch:
                yield Path(scratch), today().isoformat()
    except Interrupted as error:
        again = f"type it again to go on: {shlex.join(['trainspec', *sys.argv[1:]])}"
        hint = again if folder is not None else "with --dir FOLDER, the runs that have ended are kept"
        raise Interrupted("the certification was interrupted", code="interrupted", hint=hint) from error


def _launch(wanted: WantedHere, folder: Path) -> list[Finding]:
    """Measure what is measured on runs as they are launched; on a CPU by no more processes than there are cores."""
    machine = wanted.machine
    most = len(machine.gpu_names) or max(2, machine.cpu_cores)
    bench = Bench(folder, machine, min(wanted.processes, most), wanted.recipe, wanted.batch)
    with PrintableConsole(stderr=True).status(f"launching runs of {' '.join(wanted.recipe)}"):
        secure = measure_security(bench, [clause for clause in wanted.launched if clause in SECURITY])
        return secure + measure_performance(bench, [clause for clause in wanted.launched if clause in LEVELS])


def _measure(wanted: list[ClauseCheck], folder: Path, machine: Machine) -> list[Finding]:
    runs = list(dict.fromkeys(run for check in wanted for run in check.runs))
    if not runs:
        return []
    with _bar(len(runs)) as on_done:
        results = measure(runs, folder, machine, on_done)
        return [judge(check, results) for check in wanted]


@contextmanager
def _bar(runs: int) -> Iterator[Callable[[int], None]]:
    """Show how many runs have ended, beside the output."""
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=PrintableConsole(stderr=True)) as bar:
        task = bar.add_task("runs", total=runs)
        yield lambda done: bar.update(task, completed=done)
