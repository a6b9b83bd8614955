"""The samples that the runs of `trainspec certify` train on, drawn from their seed, and what the ranks took of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.data.loader import cut_micro_batches, positions_of
from trainspec_cli.engine.digest import MicroBatch, held_part
from trainspec_cli.recipe.keys.run import RunSpec

Taken = tuple[int, tuple[int, ...]]
"""The data rank of a process in a step, and the positions of the samples that it took."""


def drawn_batch(spec: RunSpec, state: TrainState, own: OwnSamples) -> list[MicroBatch]:
    """Return the micro-batches of `own` on the device of `state`, as `read_drawn` draws them."""
    drawn = read_drawn(spec, own, None)
    whole = [tuple(tensor.to(state.device) for tensor in part) for part in drawn]
    return [held_part(part, state.positions_S) for part in whole]


def read_drawn(spec: RunSpec, own: OwnSamples, positions_S: Tensor | None) -> list[MicroBatch]:
    """Return the micro-batches of `own` on the host; the sample at a position is the same for every layout and
    division. `positions_S`: where a rank holds part of a sequence.

    Samples are drawn in blocks of the first step's batch, each from a generator of its own.
    """
    positions = positions_of(own)
    block_size = spec.batching.global_batch_size
    blocks = range(int(positions.min()) // block_size, int(positions.max()) // block_size + 1)
    seeds = (spec.train.seed * 1_000_003 + block for block in blocks)
    drawn = zip(*(drawn_samples(spec, torch.Generator().manual_seed(seed)) for seed in seeds), strict=True)
    mine = tuple(torch.cat(tensors)[positions - blocks[0] * block_size] for tensors in drawn)
    return [held_part(part, positions_S) for part in cut_micro_batches(mine, own)]


def drawn_samples(spec: RunSpec, generator: torch.Generator) -> MicroBatch:
    """A global batch of tokens and those that follow, or of images and labels."""
    model = spec.model
    samples = spec.batching.global_batch_size
    if model.unit == "samples":
        images = torch.randn((samples, model.in_channels, *model.input_size), generator=generator)
        labelled = model.input_size if model.segments else ()
        return images, torch.randint(model.num_classes, (samples, *labelled), generator=generator)
    drawn = torch.randint(model.vocab_size, (samples, spec.data.seq_len + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def drawn_tokens(spec: RunSpec, steps: int, clip_from: int | None) -> np.ndarray:
    """Return the tokens of each step's whole batch, (steps, samples, length + 1) in int64; from `clip_from` on every
    step sees one batch."""
    blocks = [step if clip_from is None or step < clip_from else clip_from for step in range(steps)]
    drawn = []
    for block in blocks:
        generator = torch.Generator().manual_seed(spec.train.seed * 1_000_003 + block)
        inputs, targets, *_ = drawn_samples(spec, generator)
        drawn.append(torch.cat((inputs, targets[:, -1:]), dim=1))
    return torch.stack(drawn).numpy()


def taken_positions(own: OwnSamples) -> tuple[int, ...]:
    runs = (range(start, start + size) for start, size in zip(own.starts, own.sizes, strict=True))
    return tuple(position for run in runs for position in run)


def taken_by_all(taken: Sequence[Taken]) -> tuple[tuple[int, ...], ...]:
    """Return what all ranks together took in each step, of which this one took `taken`; ranks that work on the same
    samples are to take the same."""
    of_ranks = gather_json(taken, _read_taken)
    steps = (dict.fromkeys(step) for step in zip(*of_ranks, strict=True))
    return tuple(tuple(sorted(position for _, own in step for position in own)) for step in steps)


def _read_taken(received: list[Any]) -> list[Taken]:
    return [(int(data_rank), tuple(map(int, positions))) for data_rank, positions in received]
