"""Performance levels: short runs as a user launches them, and measurements of links and disks, each with a grade."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.certify.runs import device_of
from trainspec_cli.certify.standing import stand
from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.launcher.program import Program, run_program
from trainspec_cli.launcher.tools import CHECKPOINT_RATES, LINKS, run_tool, torchrun
from trainspec_cli.rundir.accounting import WARMUP_STEPS
from trainspec_cli.rundir.event_types.training import StepEvent
from trainspec_cli.rundir.events import read_sound
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_plan, read_result
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Finding
from trainspec_cli.spec.results.tools import CheckpointRatesRequest, LinksRequest

RECIPE = ("recipe=quickstart",)
"""What is launched where no recipe is given."""
STEPS, SAVE_EVERY, KILLED_AT = 36, 12, 30
"""Steps of a run, of its checkpoints, and the step after which a rank is killed."""
SHORT = (
    *("sample.prompt=", "train.eval_interval_steps=null", "checkpoint.keep_last=1"),
    "optim.schedule.kind=constant",
)
"""What would take time and is not measured is left out, and a schedule that so few steps have no room for."""
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Bench:
    """Where and on what performance is measured."""

    folder: Path
    machine: Machine
    processes: int
    recipe: tuple[str, ...]
    batch: int
    """Samples of a step of the recipe."""
    on_tick: Callable[[], None] = lambda: None


def measure_performance(bench: Bench, clauses: Sequence[str]) -> list[Finding]:
    """Measure the clauses that are wanted. Raises MachineError where a run fails, Interrupted where a stop is asked."""
    wanted, findings = set(clauses), []
    if not wanted:
        return []
    together = _launched(bench, "together", bench.processes, bench.batch, _disturbed(bench))
    if "PERF-1" in wanted and (found := _against_plan(together)) is not None:
        findings.append(_graded("PERF-1", bench, found))
    if "PERF-2" in wanted:
        findings.append(_graded("PERF-2", bench, _scaling(bench, together)))
    if "PERF-3" in wanted:
        findings.append(_graded("PERF-3", bench, _links(bench, together)))
    if "PERF-4" in wanted:
        findings.append(_graded("PERF-4", bench, _recovery(together)))
    if "PERF-5" in wanted:
        findings.append(_graded("PERF-5", bench, _checkpoints(bench, together)))
    return findings


def _graded(clause: str, bench: Bench, figures: Mapping[str, float | str]) -> Finding:
    return stand(clause, f"{bench.processes}-processes", figures)


# Runs as a user launches them


def _disturbed(bench: Bench) -> tuple[str, ...]:
    return (f"fault=kill(rank={bench.processes - 1},step={KILLED_AT})", f"checkpoint.interval_steps={SAVE_EVERY}")


def _launched(bench: Bench, name: str, processes: int, batch: int, more: Sequence[str] = ()) -> RunDir:
    """Launch the recipe for a few steps; a run that an earlier start has finished is taken as it is."""
    run = RunDir(bench.folder.absolute() / "performance" / name)
    if run.result_json.is_file():
        return run
    if run.root.exists():
        shutil.rmtree(run.root)
    size = (f"cluster.devices_per_node={processes}", "cluster.num_nodes=1", f"batching.global_batch_size={batch}")
    length = (f"train.max_steps={STEPS}", f"run.dir={run.root}", *SHORT)
    launch(bench, name, (*bench.recipe, *size, *length, *more))
    return run


def launch(bench: Bench, name: str, arguments: Sequence[str]) -> None:
    """Run `trainspec launch` to its end. Raises MachineError with its last lines where it fails."""
    command = (sys.executable, "-m", "trainspec_cli", "launch", *arguments)
    program = Program(command, bench.folder / "launches" / name, f"the run {name}", TIMEOUT_S)
    end = run_program(program, {}, bench.on_tick)
    if end.exit_code != 0:
        how = "did not end in time" if end.exit_code is None else f"ended with {end.exit_code}"
        typed = shlex.join(["trainspec", "launch", *arguments])
        problem = Problem("run_failed", f"the run {name} {how}\n\n{end.output}", hint=f"try it alone: {typed}")
        raise MachineError(problem)


def _steps(run: RunDir) -> list[StepEvent]:
    """Return the steps without those that compile and allocate."""
    return [event for event in read_sound(run.events(0)) if isinstance(event, StepEvent)][WARMUP_STEPS:]


def _step_s(run: RunDir) -> float:
    return statistics.median(step.step_time_s for step in _steps(run))


def _against_plan(run: RunDir) -> dict[str, float | str] | None:
    """None: nothing was predicted for this machine."""
    predicted = read_plan(run).prediction
    if predicted is None:
        return None
    measured = _step_s(run)
    return {"step_s": measured, "planned_s": predicted.step_time_s}


def _scaling(bench: Bench, together: RunDir) -> dict[str, float | str]:
    """Weak scaling: each process has as many samples as in the run of all, and as many cores."""
    share = max(1, bench.batch // bench.processes)
    with _on_cores(bench):
        alone = _launched(bench, "alone", 1, share)
    return {"alone_per_s": _rate(alone), "together_per_s": _rate(together)}


def _rate(run: RunDir) -> float:
    """Return the tokens (or samples) of a second."""
    return statistics.median(step.units / step.step_time_s for step in _steps(run))


@contextmanager
def _on_cores(bench: Bench) -> Iterator[None]:
    """Let what is started in the block have one process's part of the cores, where processes share them."""
    if bench.machine.gpu_names or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[: max(1, len(before) // bench.processes)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _recovery(run: RunDir) -> dict[str, float | str]:
    result = read_result(run)
    recoveries = result.recoveries if result else ()
    if not recoveries or not isinstance(recoveries, tuple) or recoveries[0].stall_s is None:
        raise MachineError(Problem("run_failed", f"{run.root} met no failure that it recovered from"))
    (first, *_) = recoveries
    assert first.stall_s is not None
    return {"recovery_s": first.stall_s, "lost_steps": float(first.lost_steps or 0), "kind": first.kind}


# Measurements by tools


def _links(bench: Bench, run: RunDir) -> dict[str, float | str]:
    where = torchrun(read_plan(run), bench.machine)
    found = run_tool(LINKS, LinksRequest(device_of(bench.machine)), where, on_tick=bench.on_tick)
    largest = found.all_reduce[-1]
    smallest = found.all_reduce[0]
    return {
        "all_reduce_gb_per_s": largest.bus_bytes_per_s / 1e9,
        "at_bytes": float(largest.bytes),
        "small_message_us": smallest.seconds * 1e6,
    }


def _checkpoints(bench: Bench, run: RunDir) -> dict[str, float | str]:
    """What is measured is the disk of the folder in which the certification keeps its runs."""
    plan, folder = read_plan(run), bench.folder.absolute() / "performance" / "checkpoints"
    request = CheckpointRatesRequest(plan.as_one_group, str(folder))
    found = run_tool(CHECKPOINT_RATES, request, torchrun(plan.as_one_group, bench.machine), on_tick=bench.on_tick)
    write, read = (found.bytes / seconds / 1e9 for seconds in (found.write_s, found.read_s))
    return {"write_gb_per_s": write, "read_gb_per_s": read}
