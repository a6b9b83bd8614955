"""Calibrate the planner for a cluster from a table, from finished runs, or from short runs that it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path

from trainspec_cli import __version__
from trainspec_cli.core.errors import PlanError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.node import cpu_name
from trainspec_cli.planner.calibration import (
    CPU_SPREAD,
    EFFICIENCIES,
    GPU_SPREAD,
    NINE_IN_TEN,
    PARTS,
    Observation,
    choose,
    infer,
    of_parts,
    of_rows,
    of_setup,
    slopes_of,
)
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import is_known, is_predictable, predict_local, setup_of
from trainspec_cli.planner.validation.backtest import backtest
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import Calibrated, ClusterProfile
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.recipe.rules.check import check, check_engine
from trainspec_cli.reporter.collect import collect
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.tools import known_probe, probe_machine
from trainspec_cli.session.calibration.table import read_rows
from trainspec_cli.session.launching.session import launch_apart
from trainspec_cli.session.recipe.load import UNNAMED, load, plan_on, this_machine

LEAST_STEPS = 5
"""Minimum number of steps that a run must take after its warm-up (the steps in which it compiles and allocates
memory)."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_TRIALS = 64


@dataclass(frozen=True)
class ClusterSteps:
    """The observations from one cluster."""

    cluster: str
    device: str
    kind: str
    observations: tuple[Observation, ...]
    rows: int


def calibrate(measured: ClusterSteps) -> ClusterProfile:
    """Fit the parameters that the measurements determine. The other parameters keep their default values, and this is
    recorded."""
    names, spread = (EFFICIENCIES, GPU_SPREAD) if measured.kind == "gpu" else (PARTS, CPU_SPREAD)
    found = infer(measured.observations, names, spread)
    described = []
    for name, mean, deviation, informed in zip(found.names, found.means, found.deviations, found.informed, strict=True):
        reach = NINE_IN_TEN * deviation
        described.append((name, Calibrated(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), informed)))
    return ClusterProfile(
        cluster=measured.cluster or UNNAMED,
        device=measured.device,
        kind=measured.kind,
        date=datetime.now(UTC).date().isoformat(),
        rows=measured.rows,
        torch=metadata.version("torch"),
        trainspec=__version__,
        error_before=_error(measured.observations, {}),
        error_after=_error(measured.observations, found.factors),
        known_within=max(found.known_within(row, spread) for row in slopes_of(measured.observations, names)),
        parameters=dict(described),
    )


def _error(observations: Sequence[Observation], factors: dict[str, float]) -> float:
    """Return the mean relative error of the total time of each group."""
    sums: dict[str, list[float]] = {}
    for number, one in enumerate(observations):
        pair = sums.setdefault(one.group if one.group.startswith("run ") else str(number), [0.0, 0.0])
        pair[0] += one.seconds_of(factors)
        pair[1] += one.measured_s
    return sum(abs(predicted / took - 1) for predicted, took in sums.values()) / len(sums)


# Tables


def measure_table(file: Path, cluster: str) -> ClusterSteps:
    """Return the observations in a table. Raises RecipeError if the rows are from several accelerators or none is
    usable."""
    result = backtest(read_rows(file), Efficiency())
    problems: list[Problem] = []
    devices: dict[str, int] = {}
    for line, found in enumerate(result.predictions, 2):
        if found.refused:
            problems.append(
                Problem("wrong_table", f"this row cannot be used: {found.refused}", file=str(file), line=line)
            )
        elif found.setup and not found.measured_step_time_s:
            message = "this row has no measured step: step_time_s, tokens_s_gpu or samples_s_gpu"
            problems.append(Problem("wrong_table", message, file=str(file), line=line))
        elif found.setup:
            devices.setdefault(found.setup.fabric.chip.name, line)
    if len(devices) > 1:
        (first, _), (other, line) = list(devices.items())[:2]
        message = f"a profile covers one accelerator: this row has {other}, the rows above have {first}"
        hint = "split the table"
        problems.append(Problem("wrong_table", message, hint=hint, file=str(file), line=line))
    if problems:
        raise RecipeError(problems)
    observations = of_rows(result.predictions, Efficiency())
    if not observations:
        message = "no row is complete: all have fit_ok 0 or config_complete 0"
        raise RecipeError(Problem("wrong_table", message, file=str(file)))
    return ClusterSteps(cluster, next(iter(devices)), "gpu", tuple(observations), len(observations))


# Finished runs


def measure_runs(folders: Sequence[Path]) -> ClusterSteps:
    """Return the observations from finished runs. Raises RecipeError if they come from several clusters or have too few
    steps."""
    taken = [_measure_run(folder) for folder in folders]
    first = taken[0]
    for folder, other in zip(folders, taken, strict=True):
        if (other.device, other.kind, other.cluster) != (first.device, first.kind, first.cluster):
            own, others = (f"{one.cluster or UNNAMED} ({one.device})" for one in (other, first))
            message = f"{folder} ran on {own}, the other runs on {others}"
            raise RecipeError(Problem("wrong_run", message, hint="calibrate each cluster separately"))
    every = tuple(observation for other in taken for observation in other.observations)
    return replace(first, observations=every, rows=len(taken))


def _measure_run(folder: Path) -> ClusterSteps:
    run = RunDir(folder)
    if not run.plan_json.is_file():
        hint = "trainspec runs lists the runs in this folder"
        raise RecipeError(Problem("missing_file", f"{folder} is not the folder of a planned run", hint=hint))
    report = collect(folder)
    planned = read_plan(run).as_one_group
    speed = report.speed
    if report.status == "failed":
        message = f"the run in {folder} failed, so its steps do not count"
        raise RecipeError(Problem("failed_run", message, hint=f"trainspec report {folder} shows the reason"))
    steps = speed.last_step - speed.first_step + 1 if speed else 0
    if speed is None or steps < LEAST_STEPS:
        message = f"{folder} has {steps} steps after its warm-up; calibration needs at least {LEAST_STEPS}"
        hint = "continue its training: trainspec resume " + str(folder) + f" train.max_steps={2 * LEAST_STEPS}"
        raise RecipeError(Problem("too_few_steps", message, hint=hint))
    parts = {part.name: part.mean_s for part in speed.parts}
    if planned.device == "cuda":
        machine = Machine("", 1, 0, gpu_names=(report.device_name,) * planned.devices_per_node)
    else:
        machine = detect(look_for_gpus=False)
    probe = known_probe(planned, machine) if is_predictable(planned) else None
    observations = _observe(planned, machine, probe, parts, f"run {folder}")
    if not observations:
        raise RecipeError(_unpredicted(str(folder)))
    chip = find_accelerator(report.device_name) if planned.device == "cuda" else None
    kind, device = (
        ("gpu", chip.name if chip else report.device_name) if planned.device == "cuda" else ("cpu", cpu_name())
    )
    return ClusterSteps(planned.spec.cluster.name, device, kind, tuple(observations), 1)


def _observe(
    planned: Plan, machine: Machine, probe: MachineProbe | None, parts: dict[str, float] | None, group: str
) -> list[Observation]:
    """Return the observation of one step of a plan. Without `parts`, the observation is a prediction, which shows how
    informative the step would be."""
    if is_known(planned, machine):
        seconds = sum(parts.values()) if parts else 1.0
        return [of_setup(setup_of(planned, machine), seconds, group, Efficiency())]
    return of_parts(predict_local(planned, probe), parts, group) if probe is not None else []


def _unpredicted(what: str) -> Problem:
    message = f"the planner cannot predict a run like {what}, so calibration has nothing to correct"
    hint = "the accelerator must be in the catalogue; on a CPU, the model must be an eager, data-parallel Llama"
    return Problem("unsupported", message, hint=f"{hint}, and the machine probed by a launch")


# Short runs


@dataclass(frozen=True)
class TriedLayout:
    plan: Plan
    changes: tuple[str, ...]
    """Command-line arguments that select this layout."""


def measure_recipe(
    arguments: Sequence[str], number: int, steps: int, folder: Path, report: Callable[[str], None]
) -> ClusterSteps:
    """Run a recipe in its most informative layouts, for a few steps each. Raises TrainspecError if none of them can
    run."""
    loaded = load(arguments)
    machine = this_machine(loaded.spec)
    usual = plan_on(loaded, machine)
    probe = (
        probe_machine(usual, machine, lambda: report("probing this machine, once")) if is_predictable(usual) else None
    )
    trials = [trial for trial in _trials(loaded.spec, machine) if _observe(trial.plan, machine, probe, None, "")]
    if not trials:
        raise PlanError(_unpredicted("this recipe"))
    # Choose the layouts whose step times reduce the uncertainty most.
    names, spread = (EFFICIENCIES, GPU_SPREAD) if is_known(trials[0].plan, machine) else (PARTS, CPU_SPREAD)
    slopes = [slopes_of(_observe(trial.plan, machine, probe, None, ""), names) for trial in trials]
    chosen = [trials[place] for place in choose(slopes, spread, number)]
    report(f"running the {len(chosen)} most informative of {len(trials)} layouts, {steps} steps each")
    folders = []
    for place, trial in enumerate(chosen, 1):
        root = folder / f"{place:02d}"
        report(f"{place} of {len(chosen)}: {' '.join(trial.changes)}")
        fixed = [f"train.max_steps={steps}", f"run.dir={root}", "cluster.profile=off", "scheduler=off"]
        launch_apart([*arguments, *trial.changes, *fixed], force=False)
        folders.append(root)
    return measure_runs(folders)


def _trials(spec: RunSpec, machine: Machine) -> Iterator[TriedLayout]:
    """Yield layouts that the engine can run on this machine, each with several micro-batch sizes."""
    usual = plan(spec, machine)
    ranks = usual.layout.world_size * usual.replica_groups
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    seen = set()
    for tp, pp, shard, micro in product(sizes, sizes, sizes, MICRO_BATCHES):
        if ranks % (tp * pp * shard):
            continue
        copies = ranks // (tp * pp * shard)
        layout = replace(spec.layout, tp=tp, pp=pp, cp=1, ep=1, dp_shard=shard, dp_replicate=copies)
        pinned = replace(spec, layout=layout, batching=replace(spec.batching, micro_batch_size=micro))
        try:
            if check(pinned) or check_engine(pinned):
                continue
            found = plan(pinned, machine)
        except TrainspecError:
            continue
        if (key := (found.layout, found.micro_batch_size, found.grad_accum_steps)) not in seen:
            seen.add(key)
            keys = (f"layout.{axis}={getattr(layout, axis)}" for axis in (*MESH_AXES, "ep"))
            yield TriedLayout(found, (*keys, f"batching.micro_batch_size={micro}"))
        if len(seen) == MOST_TRIALS:
            return
