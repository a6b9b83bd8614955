"""The same events, as TensorBoard scalars (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCALARS = {
    "step": ("loss", "grad_norm", "lr", "step_time_s"),
    "eval": ("heldout_loss", "heldout_bits_per_byte"),
}


class TensorBoardLog:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        for name in SCALARS.get(kind, ()):
            self._writer.add_scalar(f"{kind}/{name}", fields[name], fields["step"])
        if kind == "step":
            self._writer.add_scalar("step/tokens_per_s", fields["tokens"] / fields["step_time_s"], fields["step"])

    def close(self) -> None:
        self._writer.close()
