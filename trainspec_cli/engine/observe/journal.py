"""A worker's journal: writes its events and, on rank 0, passes them to the recipe's trackers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainspec_cli.engine.observe.own import OptionalCodeError, watchers_of
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import Absent, digest, to_plain
from trainspec_cli.run.folder.event_types.events import (
    BucketsEvent,
    EvalEvent,
    Event,
    MemoryEvent,
    SampleEvent,
    SchedulerEvent,
    SetFigures,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir

SCALARS = {
    "step": ("loss", "grad_norm", "lr", "step_time_s"),
    "eval": ("heldout_loss", "heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}
"""The fields that are sent to trackers, by event type."""


def scalars_of(event: Event) -> dict[str, float]:
    """Return scalars under names such as `step/loss`, `eval/heldout_loss` or, for a validation set,
    `eval/NAME/loss`."""
    names = SCALARS.get(event.type, ())
    found = {f"{event.type}/{name}": value for name, value in _numbers(event).items() if name in names}
    if isinstance(event, EvalEvent) and not isinstance(event.sets, Absent):
        for set_name, figures in event.sets.items():
            found |= {f"eval/{set_name}/{name}": value for name, value in _numbers(figures).items()}
    if isinstance(event, StepEvent):
        unit = "samples" if isinstance(event.tokens, Absent) else "tokens"
        found[f"step/{unit}_per_s"] = event.units / event.step_time_s
    return found


def _numbers(record: Event | SetFigures) -> dict[str, float]:
    """Return the fields with numeric values."""
    return {name: value for name, value in to_plain(record).items() if isinstance(value, (int, float))}


NO_REPORTS = {
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
}
"""Environment variables that stop trackers from sending usage reports to their vendors."""


def _send_no_reports(tracker: str) -> None:
    """Disable usage reports before the tracker is imported. Variables that the user has set keep their values."""
    for name, value in NO_REPORTS[tracker].items():
        os.environ.setdefault(name, value)


class Tracker(Protocol):
    def record(self, event: Event) -> None: ...

    def close(self) -> None: ...


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


class WandbLog:
    """Logs to Weights & Biases: offline, into the run folder, unless WANDB_MODE is set. A resumed run keeps the ID
    stored in its folder."""

    def __init__(self, run_dir: RunDir, spec: RunSpec):
        _send_no_reports("wandb")
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


class MlflowLog:
    """Logs to MLflow, in the run folder unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, run_dir: RunDir, spec: RunSpec):
        _send_no_reports("mlflow")
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


TRACKERS: dict[str, Callable[[RunDir, RunSpec], Tracker]] = {
    "tensorboard": lambda run_dir, _spec: TensorBoardLog(run_dir.root / "tensorboard"),
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}
"""Maps keys of `tracking` to trackers."""


class Journal:
    """One rank's events; each rank has its own file. Rank 0's file is the run's log, and its events also go to the
    trackers.

    With several replica groups, each process writes to a file of its group, and rank 0 of the leading group also writes
    the run's log.
    """

    def __init__(self, run_dir: RunDir, rank: int, spec: RunSpec | None, group: int | None = None):
        """Open the journal. Without a spec, no tracker is used."""
        self._run_dir = run_dir
        self._rank = rank
        self._spec = spec
        self._group = group
        self._start: StartEvent | None = None
        self._log: EventWriter | None = None
        self._trackers: list[Tracker] = []
        self._of_group: EventWriter | None = None
        if group is None:
            self._open_log()
        else:
            self._of_group = EventWriter(self.events_of(rank), rank)

    def _open_log(self) -> None:
        self._log = EventWriter(self._run_dir.events(self._rank), self._rank)
        self._fence = Fence.of_worker(self._run_dir)
        spec = self._spec
        if spec is not None and self._rank == 0:
            wanted = (make for key, make in TRACKERS.items() if getattr(spec.tracking, key))
            self._trackers += [make(self._run_dir, spec) for make in wanted]
        self._trackers += watchers_of(spec, self._run_dir, self._rank) if spec else []

    def lead(self, leads: bool, step: int) -> None:
        """If this group leads, write the run's log from `step` on. A new leading group begins with a `start` event."""
        if leads and self._rank == 0 and self._log is None:
            self._open_log()
            if self._start:
                self._write_log(replace(self._start, step=step))
        elif not leads:
            self._close_log()

    def write(self, event: Event) -> None:
        """Raises WorkerError if a newer launch has taken over the run."""
        if isinstance(event, StartEvent):
            self._start = event
        if self._of_group is not None:
            self._of_group.write(event)
        self._write_log(event)

    def _write_log(self, event: Event) -> None:
        if self._log is None:
            return
        self._fence.check_now_and_then()
        self._log.write(event)
        for tracker in self._trackers.copy():
            try:
                tracker.record(event)
            except OptionalCodeError as error:
                self._trackers.remove(tracker)
                self._log.write(WarningEvent(step=getattr(event, "step", 0), message=str(error)))

    def events_of(self, rank: int) -> Path:
        """Return the event file of a rank; with several replica groups, of that rank in this group."""
        return self._run_dir.events(rank) if self._group is None else self._run_dir.group_events(self._group, rank)

    def _close_log(self) -> None:
        log = self._log
        self._log = None
        try:
            for tracker in self._trackers:
                with suppress(OptionalCodeError):
                    tracker.close()
        finally:
            self._trackers = []
            if log is not None:
                log.close()

    def close(self) -> None:
        self._close_log()
        if self._of_group is not None:
            self._of_group.close()


class DirectiveLog:
    """Writes the scheduler's decisions to `directives.jsonl` and then to the journal."""

    def __init__(self, run_dir: RunDir, journal: Journal):
        self._run_dir = run_dir
        self._journal = journal
        self._file: EventWriter | None = None

    def write(self, event: SchedulerEvent | BucketsEvent | MemoryEvent) -> None:
        self._file = self._file or EventWriter(self._run_dir.directives, rank=0)
        self._file.write(event)
        self._journal.write(event)

    def close(self) -> None:
        if self._file:
            self._file.close()
