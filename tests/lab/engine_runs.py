"""Runs of the engine in one process: their state, a journal that keeps what is written, and data made on the spot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.data.loader import Staging, cut_micro_batches, positions_of
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.coordinator import Coordinator
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.run.folder.event_types.events import EvalEvent, Event
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult

CPU = torch.device("cpu")
MACHINE = Machine("host", cpu_cores=1, memory_bytes=2**34, bf16=False)
EventOf = TypeVar("EventOf", bound=Event)


class KeptEvents:
    """A journal that keeps what is written."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[EventOf]) -> list[EventOf]:
        return [event for event in self.events if isinstance(event, kind)]


def run_of(plan: Any, state: Any, run_dir: RunDir, journal: Any = None, group: int | None = None) -> TrainingRun:
    """Return the state of a run. Without a `journal` it writes none, unless it is trained (`trainer_of`)."""
    return TrainingRun(plan, state, run_dir, "digest", StopRequest(), journal, group)


def with_spec(run: TrainingRun, **changes: Any) -> TrainingRun:
    """Return the run with another recipe, in the same folder."""
    return replace(run, plan=replace(run.plan, spec=replace(run.plan.spec, **changes)))


def fill(state: Any, std: float = 0.1) -> None:
    """Draw all parameters."""
    for share in state.shares:
        torch.nn.init.normal_(share.local, std=std)


def begin_folder(run_dir: RunDir) -> RunDir:
    write_json(run_dir.run_json, {"recipe": "made", "created_at": 0.0})
    return run_dir


def trainer_of(run: TrainingRun, source: DataSource, coordinator: Coordinator | None = None) -> Trainer:
    """Return a trainer that starts or resumes the run. Each start opens the journal again."""
    run.journal = Journal(run.run_dir, 0, run.plan.spec)
    return Trainer(run, source, coordinator or Coordinator(run, source))


def events_of(run: TrainingRun, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the run's log."""
    return [event for event in read_events(run.run_dir.events(0)) if event["type"] == kind]


class DrawnTokens:
    """Sequences of tokens that are drawn by their position; without `losses`, no sequence is held out."""

    def __init__(self, seq_len: int, vocabulary: int = 50, losses: tuple[float, ...] = ()):
        self.staging = Staging(CPU)
        self.seq_len = seq_len
        self.vocabulary = vocabulary
        self.evaluations = 0
        self.losses = list(losses)
        """What the evaluations measure, one after another; then the last one again."""

    def sample(self, position: int) -> MicroBatch:
        generator = torch.Generator().manual_seed(position)
        return tuple(torch.randint(self.vocabulary, (1, self.seq_len), generator=generator) for _ in range(2))

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        samples = [self.sample(int(position)) for position in positions_of(own)]
        return cut_micro_batches(tuple(torch.cat(field) for field in zip(*samples, strict=True)), own)

    def counted(self, positions: np.ndarray) -> int:
        return self.seq_len * len(positions)

    def evaluate(self, step: int) -> EvalEvent | None:
        if not self.losses:
            return None
        loss = self.losses[min(self.evaluations, len(self.losses) - 1)]
        self.evaluations += 1
        return EvalEvent(step=step, heldout_loss=loss, heldout_bits_per_byte=None)

    def summarise(self, result: RunResult, evaluated: EvalEvent | None) -> RunResult:
        if evaluated is None:
            return result
        return replace(result, heldout_loss=evaluated.heldout_loss, heldout_bits_per_byte=None)

    def write_sample(self) -> None:
        return None

    def first_text(self, position: int) -> None:
        """Tokens without a tokenizer have no text."""


class Numbered(DrawnTokens):
    """A sample is its position, and counts as many targets as `seq_len`."""

    def __init__(self, seq_len: int = 1) -> None:
        super().__init__(seq_len)
        self.asked: list[OwnSamples] = []

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        self.asked.append(own)
        return cut_micro_batches((torch.from_numpy(positions_of(own)),), own)
