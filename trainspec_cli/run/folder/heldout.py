"""The held-out losses that a run has measured."""

from __future__ import annotations

import math

from trainspec_cli.run.folder.event_types.training import EvalEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.paths import RunDir


def read_heldout_losses(run: RunDir) -> dict[int, float | None]:
    """Return step -> held-out loss, in the order of steps. Of a step that was made again the newest counts."""
    evaluations = (event for event in read_sound(run.events(0)) if isinstance(event, EvalEvent))
    losses = {event.step: event.heldout_loss for event in evaluations}
    return {step: losses[step] for step in sorted(losses)}


def best_checkpoint(run: RunDir) -> int | None:
    """Return the step of the whole checkpoint with the lowest held-out loss; None where none was evaluated."""
    losses = read_heldout_losses(run)
    evaluated = {step: loss for step in run.checkpoint_steps() if (loss := losses.get(step)) is not None}
    finite = {step: loss for step, loss in evaluated.items() if math.isfinite(loss)}
    return min(finite, key=finite.__getitem__, default=None)
