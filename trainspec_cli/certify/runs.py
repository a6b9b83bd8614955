"""Runs of the engine's witness: real torchrun jobs, one for each number of processes, many runs in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainspec_cli.certify.cases import SAVE_AT, STEPS, Case, build_plan
from trainspec_cli.errors import Interrupted, MachineError, Problem
from trainspec_cli.launch.backend.local import LocalBackend
from trainspec_cli.launch.failure import tail
from trainspec_cli.launch.job.job import build_job
from trainspec_cli.launch.supervise import supervise
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.cluster import Machine

WITNESS = ("-m", "trainspec_cli.engine.tools.certify_worker")


@dataclass(frozen=True)
class Run:
    """A case, trained from the first step or from another run's checkpoint."""

    case: Case
    gradients: bool = True
    losses: bool = True
    resume: bool = False
    """Save in the middle, and go the second half again from there."""
    continues: Run | None = None
    take: int = 0
    """Tells repetitions of one run apart."""

    @property
    def name(self) -> str:
        words = [self.case.name]
        if self.resume:
            words.append("resumed")
        if self.continues:
            words.append(f"from-{self.continues.case.name}")
        if not self.losses:
            words.append("one-step")
        if self.take:
            words.append(f"again{self.take}")
        return "-".join(words)

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": STEPS if self.losses else 0,
            "gradients": self.gradients,
            "resume": self.resume,
            "save_at": SAVE_AT if self.resume else None,
            "continues": self.continues.name if self.continues else None,
        }


@dataclass(frozen=True)
class Testimony:
    """What a run left behind."""

    folder: Path

    @cached_property
    def told(self) -> dict[str, Any]:
        return read_json(self.folder / "witness.json")

    @property
    def losses(self) -> list[float]:
        return _losses(self.told["losses"])

    @property
    def resumed_losses(self) -> list[float]:
        return _losses(self.told["resumed"]["losses"])

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        """Of all stages, by parameter."""
        found: dict[str, np.ndarray] = {}
        for path in sorted(self.folder.glob("gradients.stage*.npz")):
            with np.load(path) as stage:
                found.update(stage)
        return found


def _losses(told: Sequence[float | None]) -> list[float]:
    """JSON has null for what is not finite."""
    return [math.nan if loss is None else loss for loss in told]


def hear(
    runs: Iterable[Run],
    folder: Path,
    machine: Machine,
    on_progress: Callable[[int], None],
    worker: Sequence[str] = WITNESS,
) -> dict[Run, Testimony]:
    """Run all of them below `folder`; `on_progress` is told how many are done.

    Raises MachineError where a job fails, Interrupted where a stop was asked for.
    """
    wanted = list(dict.fromkeys(runs))
    for batch in _batches(wanted):
        _run_batch(batch, folder, machine, worker, lambda: on_progress(_count_done(wanted, folder)))
    return {run: Testimony(folder / run.name) for run in wanted}


def _count_done(runs: Sequence[Run], folder: Path) -> int:
    return sum((folder / run.name / "witness.json").is_file() for run in runs)


def _batches(runs: Sequence[Run]) -> list[list[Run]]:
    """One torchrun serves all runs of as many processes; those that continue others come after them."""
    batches: list[list[Run]] = []
    for later in (False, True):
        stage = [run for run in runs if (run.continues is not None) is later]
        sizes = sorted({run.case.layout.world_size for run in stage})
        batches += [[run for run in stage if run.case.layout.world_size == size] for size in sizes]
    return batches


def _run_batch(
    batch: Sequence[Run], folder: Path, machine: Machine, worker: Sequence[str], on_tick: Callable[[], None]
) -> None:
    device: Literal["cpu", "cuda"] = "cuda" if machine.gpu_names else "cpu"
    plans = {run: build_plan(run.case, device) for run in batch}
    for run, plan in plans.items():
        write_json(folder / run.name / "plan.json", to_plain(plan))
        write_json(folder / run.name / "run.json", run.as_json())
    world_size = batch[0].case.layout.world_size
    root = folder / f"job{world_size}{'-later' if batch[0].continues else ''}"
    write_json(root / "runs.json", [run.name for run in batch])
    job = build_job(plans[batch[0]], root, machine, worker=worker)
    job = replace(job, environment={**job.environment, "OMP_NUM_THREADS": "1"})  # threads of small work only wait
    ending = supervise(job, None, LocalBackend, lambda _: on_tick())
    if ending.stop_requested:
        raise Interrupted("the certification was interrupted", code="interrupted")
    if ending.exit_code != 0:
        raise MachineError(_failure(batch, folder, sorted(job.logs.rglob("stderr.log")) or [job.torchrun_log]))
    on_tick()


def _failure(batch: Sequence[Run], folder: Path, logs: Sequence[Path]) -> Problem:
    """Names the first run without a testimony, which is the one that failed."""
    failed = next((run.name for run in batch if not (folder / run.name / "witness.json").is_file()), batch[-1].name)
    return Problem(
        "run_failed", f"the run {failed} failed\n\n{tail(logs[0], 15)}", hint=f"run it alone: --only {failed}"
    )


# Figures


def gradient_errors(found: Testimony, reference: Testimony) -> dict[str, float]:
    """Relative Euclidean error of each parameter's gradient; infinite where it is missing or has another shape."""
    errors: dict[str, float] = {}
    for name in reference.gradients.keys() | found.gradients.keys():
        theirs, ours = reference.gradients.get(name), found.gradients.get(name)
        if theirs is None or ours is None or theirs.shape != ours.shape:
            errors[name] = math.inf
            continue
        distance, size = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
        errors[name] = float(distance / size) if size else (0.0 if distance == 0 else math.inf)
    return {name: error if math.isfinite(error) else math.inf for name, error in sorted(errors.items())}


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest, relative to the reference's loss of the step."""
    if len(losses) != len(reference):
        return math.inf
    errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
