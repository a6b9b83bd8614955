"""Record events in Weights & Biases (extra `wandb`): offline in the run folder unless WANDB_MODE is set."""

from __future__ import annotations

import os

from trainspec_cli.engine.observe.scalars import scalars_of
from trainspec_cli.rundir.event_types import EvalEvent, Event, SampleEvent, StepEvent
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.run import RunSpec


class WandbLog:
    """A tracker; a resumed run continues under the id of its folder."""

    def __init__(self, run_dir: RunDir, spec: RunSpec):
        import wandb

        self._run = wandb.init(
            project=spec.tracking.project,
            dir=str(run_dir.root),
            id=run_dir.root.resolve().name,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            config=to_plain(spec),
        )

    def record(self, event: Event) -> None:
        if isinstance(event, SampleEvent):
            self._run.log({"sample": event.prompt + event.text}, step=event.step)
        elif isinstance(event, StepEvent | EvalEvent):
            self._run.log(scalars_of(event), step=event.step)

    def close(self) -> None:
        self._run.finish()
