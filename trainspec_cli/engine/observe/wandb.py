"""Record events in Weights & Biases (extra `wandb`): offline in the run folder unless WANDB_MODE is set."""

from __future__ import annotations

import os
from typing import Any

from trainspec_cli.engine.observe.scalars import scalars_of
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

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        values: dict[str, Any] = dict(scalars_of(kind, fields))
        if kind == "sample":
            values["sample"] = fields["prompt"] + fields["text"]
        if values:
            self._run.log(values, step=fields["step"])

    def close(self) -> None:
        self._run.finish()
