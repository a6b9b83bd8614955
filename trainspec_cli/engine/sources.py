"""What a run reads and is judged on: the trainer's only view of its data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from trainspec_cli.corpus.decode import decode, encode
from trainspec_cli.corpus.labelled import LabelledSamples, open_samples
from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.build import Machinery
from trainspec_cli.engine.data.loader import BatchPlan, batches, read_ahead, read_positions
from trainspec_cli.engine.data.sample_loader import SampleLoader
from trainspec_cli.engine.evaluate import heldout_loss, heldout_metrics, write_text
from trainspec_cli.spec.model import ConvModel
from trainspec_cli.spec.plan import Plan

Figures = dict[str, float | None]


class Source(Protocol):
    """Called by every rank together, but for `summarise`."""

    def batches(self, start: int, end: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of steps `start` to `end` - 1."""

    def read(self, positions: np.ndarray) -> list[MicroBatch]:
        """The samples at `positions` of the run as micro-batches, on the host."""

    def evaluate(self) -> Figures | None:
        """How the model does on what was held out: the fields of an `eval` event; None where nothing was."""

    def summarise(self, evaluated: Figures | None) -> Figures:
        """What result.json says of the last `evaluate`."""

    def write_sample(self) -> dict[str, str] | None:
        """What the model makes of the recipe's prompt: the fields of a `sample` event; None where none is wanted."""


def open_source(plan: Plan, folder: str | None, built: Machinery) -> Source:
    """Of the plan's data in `folder` (phantoms have none)."""
    if isinstance(plan.spec.model, ConvModel):
        return SampleSource(
            plan, open_samples(plan.spec.data, plan.spec.model, Path(folder) if folder else None), built
        )
    assert folder is not None, "tokens lie in a folder"
    return TokenSource(plan, TokenFolder.open(folder), built)


def batch_plan(plan: Plan, built: Machinery) -> BatchPlan:
    return BatchPlan(
        seq_len=plan.spec.data.seq_len,
        global_batch_size=plan.spec.batching.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        seed=plan.spec.train.seed,
        rank=built.mesh.data_rank,
        num_ranks=plan.layout.data_parallel_size,
        positions_S=None if built.positions_S is None else built.positions_S.cpu(),
    )


class TokenSource:
    """Text as token shards, judged in bits per byte beside what xz comes to."""

    def __init__(self, plan: Plan, folder: TokenFolder, built: Machinery):
        self.plan, self.spec, self.folder, self.built = plan, plan.spec, folder, built

    def batches(self, start: int, end: int) -> Iterator[list[MicroBatch]]:
        return batches(self.folder, batch_plan(self.plan, self.built), self.built.device, start, end)

    def read(self, positions: np.ndarray) -> list[MicroBatch]:
        return read_positions(self.folder, batch_plan(self.plan, self.built), positions)

    def evaluate(self) -> Figures | None:
        heldout = heldout_loss(
            self.built, self.folder, seq_len=self.spec.data.seq_len, batch_size=self.plan.micro_batch_size
        )
        if heldout is None:
            return None
        return {
            "heldout_loss": heldout.nats_per_token,
            "heldout_bits_per_byte": heldout.bits_per_byte,
            "xz_bits_per_byte": self.folder.manifest.xz_bits_per_byte,
        }

    def summarise(self, evaluated: Figures | None) -> Figures:
        return {
            "heldout_bits_per_byte": evaluated["heldout_bits_per_byte"] if evaluated else None,
            "xz_bits_per_byte": self.folder.manifest.xz_bits_per_byte,
        }

    def write_sample(self) -> dict[str, str] | None:
        sample = self.spec.sample
        if not sample.max_new_tokens:
            return None
        prompt_ids = encode(self.folder.path, sample.prompt) or [self.folder.manifest.end_of_document_id]
        ids = write_text(
            self.built,
            prompt_ids,
            count=sample.max_new_tokens,
            temperature=sample.temperature,
            max_context=self.spec.data.seq_len,
            seed=self.spec.train.seed,
        )
        return {"prompt": sample.prompt, "text": decode(self.folder.path, ids)}


class SampleSource:
    """Images or volumes with labels, judged by accuracy or Dice."""

    def __init__(self, plan: Plan, samples: LabelledSamples, built: Machinery):
        self.plan, self.built = plan, built
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.loader = SampleLoader(samples, batch_plan(plan, built), (os.cpu_count() or 1) // processes)

    def batches(self, start: int, end: int) -> Iterator[list[MicroBatch]]:
        return read_ahead(self.loader.read_step, self.built.device, start, end)

    def read(self, positions: np.ndarray) -> list[MicroBatch]:
        return self.loader.read_positions(positions)

    def evaluate(self) -> Figures | None:
        return heldout_metrics(self.built, self.loader)

    def summarise(self, evaluated: Figures | None) -> Figures:
        return evaluated or {}

    def write_sample(self) -> dict[str, str] | None:
        return None
