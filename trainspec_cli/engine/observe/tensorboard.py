"""Record events in TensorBoard's files (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainspec_cli.engine.observe.scalars import scalars_of


class TensorBoardLog:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        for name, value in scalars_of(kind, fields).items():
            self._writer.add_scalar(name, value, fields["step"])
        if kind == "sample":
            self._writer.add_text("sample", f"**{fields['prompt']}**{fields['text']}", fields["step"])

    def close(self) -> None:
        self._writer.close()
