"""Convert events to named numbers, the same for every tracker."""

from __future__ import annotations

from typing import Any

SCALARS = {
    "step": ("loss", "grad_norm", "lr", "step_time_s"),
    "eval": ("heldout_loss", "heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}


def scalars_of(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return `step/loss`, `eval/heldout_loss`, and for a validation set `eval/NAME/loss`."""
    found = {f"{kind}/{name}": fields[name] for name in SCALARS.get(kind, ()) if fields.get(name) is not None}
    for set_name, figures in fields.get("sets", {}).items():
        found |= {f"{kind}/{set_name}/{name}": value for name, value in figures.items() if value is not None}
    if kind == "step":
        unit = "tokens" if "tokens" in fields else "samples"
        found[f"step/{unit}_per_s"] = fields[unit] / fields["step_time_s"]
    return found
