"""Record events in TensorBoard's files (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.engine.observe.scalars import scalars_of
from trainspec_cli.rundir.event_types import EvalEvent, Event, SampleEvent, StepEvent


class TensorBoardLog:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, event: Event) -> None:
        if isinstance(event, SampleEvent):
            self._writer.add_text("sample", f"**{event.prompt}**{event.text}", event.step)
        elif isinstance(event, StepEvent | EvalEvent):
            for name, value in scalars_of(event).items():
                self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        self._writer.close()
