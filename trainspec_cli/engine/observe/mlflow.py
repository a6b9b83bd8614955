"""Record events in MLflow (extra `mlflow`): in the run folder unless MLFLOW_TRACKING_URI names a server."""

from __future__ import annotations

import os

from trainspec_cli.engine.observe.scalars import scalars_of
from trainspec_cli.rundir.event_types import EvalEvent, Event, StepEvent
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import digest
from trainspec_cli.spec.recipe.run import RunSpec


class MlflowLog:
    def __init__(self, run_dir: RunDir, spec: RunSpec):
        from mlflow import MlflowClient

        folder = (run_dir.root / "mlflow").resolve()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder}.db"))
        known = self._client.get_experiment_by_name(spec.tracking.project)
        location = None if "MLFLOW_TRACKING_URI" in os.environ else folder.as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(spec.tracking.project, location)
        name = run_dir.root.resolve().name
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        self._client.set_tag(self._id, "recipe_digest", digest(spec))

    def record(self, event: Event) -> None:
        if isinstance(event, StepEvent | EvalEvent):
            for name, value in scalars_of(event).items():
                self._client.log_metric(self._id, name, value, step=event.step)

    def close(self) -> None:
        self._client.set_terminated(self._id)
