"""Convert events to named numbers, the same for every tracker."""

from __future__ import annotations

from trainspec_cli.rundir.event_types import EvalEvent, Event, StepEvent
from trainspec_cli.spec.canonical import Absent, to_plain

SCALARS = {
    "step": ("loss", "grad_norm", "lr", "step_time_s"),
    "eval": ("heldout_loss", "heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}


def scalars_of(event: Event) -> dict[str, float]:
    """Return `step/loss`, `eval/heldout_loss`, and for a validation set `eval/NAME/loss`."""
    plain = to_plain(event)
    names = SCALARS.get(event.type, ())
    found = {f"{event.type}/{name}": plain[name] for name in names if plain.get(name) is not None}
    if isinstance(event, EvalEvent) and not isinstance(event.sets, Absent):
        for set_name, figures in plain["sets"].items():
            found |= {f"eval/{set_name}/{name}": value for name, value in figures.items() if value is not None}
    if isinstance(event, StepEvent):
        unit = "samples" if isinstance(event.tokens, Absent) else "tokens"
        found[f"step/{unit}_per_s"] = event.units / event.step_time_s
    return found
