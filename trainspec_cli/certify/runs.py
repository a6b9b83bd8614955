"""Runs of the certify worker: real torchrun jobs, one for each number of processes, many runs in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from trainspec_cli.certify.cases import CLIP_FROM, CLIP_NORM, SAVE_AT, STEPS, Case, build_plan
from trainspec_cli.certify.folder import RESULT, begin_run, is_kept
from trainspec_cli.certify.live import KILLED_AT
from trainspec_cli.errors import MachineError
from trainspec_cli.launcher.tools import CERTIFY, Tool, run_tool, torchrun
from trainspec_cli.rundir.files import read_json
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.tools import DRAWN_BATCHES as BATCHES
from trainspec_cli.spec.results.tools import DRAWN_TOKENS as TOKENS
from trainspec_cli.spec.results.tools import CertifyRequest, CertifyResult, CertifyRun, CertifyRunResult, Device


@dataclass(frozen=True)
class Run:
    """A case, trained from the first step or from another run's checkpoint."""

    case: Case
    gradients: bool = True
    losses: bool = True
    resume: bool = False
    """Save in the middle, and go the second half again from there."""
    continues: Run | None = None
    exchanges: int = 1
    """How often the first batch's gradients are exchanged; their mean is what the run leaves."""
    inputs: bool = False
    """Leave the first weights and the batches too."""
    take: int = 0
    """The number of a repetition."""

    @property
    def name(self) -> str:
        words = [self.case.name]
        if self.resume:
            words.append("resumed")
        if self.continues:
            words.append(f"from-{self.continues.case.name}")
        if not self.losses:
            words.append("one-step")
        if self.exchanges > 1:
            words.append(f"{self.exchanges}-exchanges")
        if self.inputs:
            words.append("with-inputs")
        if self.take:
            words.append(f"again{self.take}")
        return "-".join(words)

    @property
    def clips(self) -> bool:
        """Return whether later steps clip: adaptive optimizers hide a gradient that is wrong by a factor."""
        return self.losses and self.case.optimizer == "sgd" and not self.case.ramp

    def request(self, device: Device) -> CertifyRun:
        live = self.case.live
        return CertifyRun(
            build_plan(self.case, device),
            steps=STEPS if self.losses else 0,
            gradients=self.gradients,
            exchanges=self.exchanges,
            clip_from=CLIP_FROM if self.clips else None,
            clip_norm=CLIP_NORM,
            save_at=SAVE_AT if self.resume else None,
            resume=self.resume,
            continues=self.continues.name if self.continues else None,
            weights=self.case.weights,
            inputs=self.inputs,
            live=live is not None,
            killed_at=KILLED_AT if live and live.disturbance == "killed" else None,
        )


@dataclass(frozen=True)
class Measured:
    """The folder of a run that has ended, and what it holds."""

    folder: Path

    @cached_property
    def result(self) -> CertifyRunResult:
        return from_plain(CertifyRunResult, read_json(self.folder / RESULT))

    @property
    def losses(self) -> list[float]:
        return _finite_or_nan(self.result.trained.losses)

    @property
    def resumed_losses(self) -> list[float]:
        return _finite_or_nan(self.result.resumed.losses) if self.result.resumed else []

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        return self._parameters("gradients")

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights after the last step."""
        return self._parameters("weights")

    @cached_property
    def first_weights(self) -> dict[str, np.ndarray]:
        return self._parameters("first")

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the tokens of all steps, (steps, samples, length + 1)."""
        with np.load(self.folder / BATCHES) as found:
            tokens: np.ndarray = found[TOKENS]
            return tokens

    def _parameters(self, what: str) -> dict[str, np.ndarray]:
        """Read what the pipeline ranks left, by parameter."""
        found: dict[str, np.ndarray] = {}
        for path in sorted(self.folder.glob(f"{what}.stage*.npz")):
            with np.load(path) as stage:
                found.update(stage)
        return found


def _finite_or_nan(losses: Sequence[float | None]) -> list[float]:
    return [math.nan if loss is None else loss for loss in losses]


def measure(
    runs: Iterable[Run],
    folder: Path,
    machine: Machine,
    on_progress: Callable[[int], None],
    tool: Tool[CertifyRequest, CertifyResult] = CERTIFY,
) -> dict[Run, Measured]:
    """Run all of them below `folder` but those that it holds already; `on_progress` gets the number of those that are
    done.

    Raises MachineError where a job fails, Interrupted where a stop was requested.
    """
    wanted, device = list(dict.fromkeys(runs)), device_of(machine)
    left = [run for run in wanted if not is_kept(folder / run.name, run.request(device))]
    for run in left:
        begin_run(folder / run.name, run.request(device))

    def report_done() -> None:
        on_progress(sum((folder / run.name / RESULT).is_file() for run in wanted))

    report_done()
    for batch in _batches(left):
        _run_batch(batch, folder, machine, tool, report_done)
    return {run: Measured(folder / run.name) for run in wanted}


def device_of(machine: Machine) -> Device:
    return "cuda" if machine.gpu_names else "cpu"


def _batches(runs: Sequence[Run]) -> list[list[Run]]:
    """One torchrun serves all runs of as many processes, the most first; those that continue others come after them."""
    batches: list[list[Run]] = []
    for later in (False, True):
        stage = [run for run in runs if _grows(run) is later]
        sizes = sorted({run.case.layout.world_size for run in stage}, reverse=True)
        of_size = ([run for run in stage if run.case.layout.world_size == size] for size in sizes)
        batches += [sorted(batch, key=lambda run: run.continues is not None) for batch in of_size]
    return batches


def _grows(run: Run) -> bool:
    """Return whether a run continues one of fewer processes."""
    return run.continues is not None and run.continues.case.layout.world_size < run.case.layout.world_size


def _run_batch(
    batch: Sequence[Run],
    folder: Path,
    machine: Machine,
    tool: Tool[CertifyRequest, CertifyResult],
    on_tick: Callable[[], None],
) -> None:
    request = CertifyRequest(str(folder.absolute()), {run.name: run.request(device_of(machine)) for run in batch})
    # Threads of small work only wait.
    where = torchrun(request.runs[batch[0].name].plan, machine, {"OMP_NUM_THREADS": "1"})
    try:
        run_tool(tool, request, where, on_tick=on_tick)
    except MachineError as error:
        # The first run without a result is the one that failed.
        failed = next((run.name for run in batch if not (folder / run.name / RESULT).is_file()), batch[-1].name)
        problem = error.problems[0]
        message = f"the run {failed} failed: {problem.message}"
        raise MachineError(replace(problem, message=message, hint=f"run it alone: --only {failed}")) from error
    on_tick()


# Figures


class HasGradients(Protocol):
    """What leaves the gradients of a batch, by parameter."""

    @property
    def gradients(self) -> Mapping[str, np.ndarray]: ...


def gradient_errors(found: HasGradients, reference: HasGradients) -> dict[str, float]:
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


def whole_error(found: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Relative Euclidean error of all parameters together; infinite where one is missing or has another shape."""
    if {name: array.shape for name, array in found.items()} != {name: array.shape for name, array in reference.items()}:
        return math.inf
    distance = math.hypot(*(float(np.linalg.norm(found[name] - reference[name])) for name in reference))
    error = distance / math.hypot(*(float(np.linalg.norm(array)) for array in reference.values()))
    return error if math.isfinite(error) else math.inf


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest, relative to the reference's loss of the step."""
    if len(losses) != len(reference):
        return math.inf
    errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
