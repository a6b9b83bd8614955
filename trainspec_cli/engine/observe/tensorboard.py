"""The same events, as TensorBoard scalars (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCALARS = {
    "step": ("loss", "grad_norm", "lr", "step_time_s"),
    "eval": ("heldout_loss", "heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}


class TensorBoardLog:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        for name in (name for name in SCALARS.get(kind, ()) if name in fields):
            self._writer.add_scalar(f"{kind}/{name}", fields[name], fields["step"])
        if kind == "step":
            unit = "tokens" if "tokens" in fields else "samples"
            self._writer.add_scalar(f"step/{unit}_per_s", fields[unit] / fields["step_time_s"], fields["step"])

    def close(self) -> None:
        self._writer.close()
