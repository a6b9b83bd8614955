"""What a group takes of a step as this rank's micro-batches, read ahead for as long as the groups stay the same."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.staging import Slot
from trainspec_cli.engine.run.sources import Source
from trainspec_cli.policy.spread import Portion
from trainspec_cli.spec.results.plan import Plan


class PortionReader:
    def __init__(self, plan: Plan, source: Source, state: TrainState):
        layout = plan.layout
        turns = layout.pp if layout.pipeline_schedule == "interleaved" else 1
        self.unit_samples = plan.micro_batch_size * layout.data_parallel_size * turns
        """The least that a group takes: interleaving takes micro-batches in turns of pp."""
        self._plan, self._source, self._state = plan, source, state
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[Portion, Future[Slot]] | None = None

    def take(self, portion: Portion) -> list[MicroBatch]:
        """This rank's micro-batches of `portion`, on the device; what most likely comes next is read meanwhile."""
        batch = self._source.staging.take(self._awaited(portion))
        following = replace(portion, start=portion.start + portion.step_samples)
        self._ahead = following, self._pool.submit(self._read, following)
        return batch

    def _awaited(self, portion: Portion) -> Slot:
        """What was read ahead, if it is this; else it is read now."""
        if self._ahead is None:
            return self._read(portion)
        foreseen, slot = self._ahead[0], self._ahead[1].result()
        if foreseen == portion:
            return slot
        self._source.staging.give_back(slot)
        return self._read(portion)

    def _read(self, portion: Portion) -> Slot:
        return self._source.staging.stage(self._source.read(self.positions(portion)))

    def positions(self, portion: Portion) -> np.ndarray:
        """Of this rank: of every micro-batch of the group, its own part."""
        size, layout = self._plan.micro_batch_size, self._plan.layout
        whole = np.arange(portion.start, portion.start + portion.samples)
        return whole.reshape(-1, layout.data_parallel_size, size)[:, self._state.mesh.data_rank].ravel()
