"""When a run has diverged: too many skipped updates in a row, or an end with nothing to show for it.

Steps whose loss or gradients are not finite update nothing; some of them do no harm. A run is done when its last loss,
its held-out loss and its weights are finite, and fewer than half of its steps were skipped in a row at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

from trainspec_cli.engine.checkpoint.parts import Held
from trainspec_cli.engine.comm.joint_errors import raise_together
from trainspec_cli.engine.finite import REMEDY, is_finite
from trainspec_cli.engine.run.result import RunTally
from trainspec_cli.errors import WorkerError
from trainspec_cli.rundir.event_types import StepEvent
from trainspec_cli.rundir.events import read_sound
from trainspec_cli.rundir.paths import RunDir

Steps = Sequence[StepEvent]
"""`step` events, in order."""


class Divergence:
    """Asked by every rank at the same steps; where one raises WorkerError, all do, with the same words."""

    def __init__(self, run_dir: RunDir, max_skipped_steps: int):
        self._run_dir, self._max_skipped_steps = run_dir, max_skipped_steps
        self._skipped_in_a_row = 0

    def note_step(self, step: int, *, skipped: bool) -> None:
        """Raise where as many updates in a row were skipped as are allowed."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == self._max_skipped_steps:
            what = "the loss or the gradients were not finite"
            self._raise([f"{what} for {self._max_skipped_steps} steps in a row, up to step {step}"], step)

    def check_end(self, step: int, tally: RunTally, held: Held) -> None:
        """Raise where the run has made all its steps, up to `step`, and is not done for all that."""
        faults = [*self._faults_of_steps(step, tally.steps), *_faults_of_model(tally, held)]
        self._raise(faults[:1], step)

    def _faults_of_steps(self, step: int, own: Steps) -> Iterator[str]:
        """`own` are those of this start; where they updated nothing, those before them count too."""
        if any(not event.skipped for event in own):
            events = own
        else:
            events = [*(event for event in read_sound(self._run_dir.events(0)) if isinstance(event, StepEvent)), *own]
        if events and not _is_finite(events[-1].loss):
            yield f"the loss of the last step, {step}, is not finite"
        skipped = sum(1 for _ in takewhile(lambda event: event.skipped, reversed(events)))
        if skipped and 2 * skipped >= step:
            yield f"the loss or the gradients were not finite in the last {skipped} of {step} steps, at least half"

    def _raise(self, faults: Sequence[str], step: int) -> None:
        """With the checkpoint to go on from: what it holds has still made a step whose figures were finite."""
        if not faults:
            raise_together(None)
            return
        last_finite = step - self._skipped_in_a_row
        steps = self._run_dir.checkpoint_steps()
        good = max((kept for kept in steps if kept < last_finite), default=None)
        if good is None:
            told, hint = "there is no checkpoint from before that", f"start again: {REMEDY}"
        else:
            told = f"the newest checkpoint from before that is {self._run_dir.checkpoint(good)}"
            newer = ", ".join(self._run_dir.checkpoint(kept).name for kept in steps if kept > good)
            hint = f"{f'remove {newer} beside it, and ' if newer else ''}go on from step {good}: {REMEDY}"
        raise_together(WorkerError(f"{faults[0]}; {told}", code="not_finite", hint=hint))


def _faults_of_model(tally: RunTally, held: Held) -> Iterator[str]:
    if tally.heldout and not _is_finite(tally.heldout["heldout_loss"]):
        yield "the held-out loss after the last step is not finite"
    for part in held.parts():
        if part.name.startswith("model.") and not is_finite(part.tensor):
            yield f"{part.name.removeprefix('model.')} is not finite after the last step"


def _is_finite(value: float | None) -> bool:
    """An event has null for what is not finite."""
    return value is not None and math.isfinite(value)
