"""Text as micro-batches: whatever number of ranks reads it, each sample once; and what is read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from lab.waiting import PATIENCE_S

from trainspec_cli.balance.batch.division import Division, OwnSamples
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.rows import Windows
from trainspec_cli.data.corpus.samples import Shuffled
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.engine.data.loader import (
    PREFETCHED_STEPS,
    SLOTS,
    BatchReader,
    Staging,
    cut_micro_batches,
    heldout_batches,
    positions_of,
    read_tokens,
)
from trainspec_cli.engine.digest import IGNORED_TARGET, MicroBatch
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

SEQ_LEN, BATCH = 32, 12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(" ".join(f"word{j * (i + 1)}" for j in range(60)))
    data = DataSpec(SEQ_LEN, "text", str(text), tokenizer=TokenizerSpec(300), heldout_fraction=0.2)
    return TokenFolder.open(prepare(data))


def order(folder) -> Shuffled:
    return Shuffled(Windows(folder, "train", SEQ_LEN), seed=5)


def own_samples(rank: int, num_ranks: int, step: int, micro: int = 1) -> OwnSamples:
    return Division((1.0,) * num_ranks, micro).of_rank(rank, step * BATCH, BATCH)


def step_tokens(folder, step: int, division: Division) -> torch.Tensor:
    """The whole global batch of a step, put together from every rank's micro-batches."""
    ranks = [division.of_rank(rank, step * BATCH, BATCH) for rank in range(len(division.weights))]
    read = [read_tokens(order(folder), own, None) for own in ranks]
    return torch.cat([rank[turn][0] for turn in range(len(read[0])) for rank in read])


@pytest.mark.parametrize(
    "division",
    [
        Division((1.0, 1.0), 1),
        Division((1.0,) * 3, 2),
        Division((1.0,) * 5, 2),
        Division((1.0,) * 7, 3),
        Division((3.0, 1.0), 2),
        Division((1.0, 0.001), 4),
        Division((1.0,) * 20, 1),
    ],
    ids=str,
)
def test_the_stream_is_the_same_however_it_is_divided(folder, division):
    for step in (0, 7, 50):
        assert torch.equal(step_tokens(folder, step, division), step_tokens(folder, step, Division((1.0,), BATCH)))


def test_a_rank_of_context_parallelism_gets_its_positions(folder):
    positions = torch.tensor([0, 1, 30, 31])
    own = own_samples(0, 2, step=1, micro=4)
    whole, held = (read_tokens(order(folder), own, held) for held in (None, positions))
    assert [len(tokens) for tokens, _ in held] == [3, 3]
    for (tokens, targets), (held_tokens, held_targets) in zip(whole, held, strict=True):
        assert torch.equal(held_tokens, tokens[:, positions])
        assert torch.equal(held_targets, targets[:, positions])


def test_an_epoch_sees_every_sample_once(folder):
    samples = (folder.num_tokens("train") - 1) // SEQ_LEN
    steps = -(-2 * samples // BATCH)
    seen = torch.cat([step_tokens(folder, step, Division((1.0,) * 5, 2)) for step in range(steps)])[: 2 * samples]
    everything = {folder.tokens("train", i * SEQ_LEN, SEQ_LEN).tobytes() for i in range(samples)}
    first, second = seen[:samples].numpy(), seen[samples:].numpy()
    for epoch in (first, second):
        assert {np.ascontiguousarray(row).tobytes() for row in epoch} == everything
    assert not np.array_equal(first, second)


def test_targets_are_the_next_tokens(folder):
    for tokens, targets in read_tokens(order(folder), own_samples(0, 1, step=3, micro=4), None):
        assert tokens.shape == targets.shape == (4, SEQ_LEN)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


# Cutting what was read at once


def test_positions_are_those_of_the_micro_batches_one_after_another():
    own = OwnSamples((4, 9, 20), (2, 0, 3))
    assert positions_of(own).tolist() == [4, 5, 20, 21, 22]
    whole = tuple(torch.from_numpy(positions_of(own)) + offset for offset in (0, 100))
    parts = [[tensor.tolist() for tensor in part] for part in cut_micro_batches(whole, own)]
    assert parts == [[[4, 5], [104, 105]], [[], []], [[20, 21, 22], [120, 121, 122]]]


def test_a_rank_without_samples_has_empty_micro_batches_of_the_others_shapes(folder):
    own = OwnSamples((40, 44), (0, 0))
    assert positions_of(own).tolist() == [40], "one sample shows the shapes"
    (some, _), empty = (
        read_tokens(order(folder), OwnSamples((40,), (1,)), None)[0],
        read_tokens(order(folder), own, None),
    )
    assert [[tuple(tensor.shape) for tensor in part] for part in empty] == [[(0, SEQ_LEN)] * 2] * 2
    assert {tensor.dtype for part in empty for tensor in part} == {some.dtype}


@pytest.mark.parametrize(("batch_size", "num_ranks"), [(1, 1), (4, 1), (3, 2), (16, 5)])
def test_every_heldout_token_but_the_first_is_predicted_once(folder, batch_size, num_ranks):
    rows = Windows(folder, "heldout", SEQ_LEN, keeps_rest=True)
    per_rank = [list(heldout_batches(rows, batch_size, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1, "every rank takes part in equally many forwards"
    predicted = torch.cat([targets[targets != IGNORED_TARGET] for batches in per_rank for _, targets in batches])
    text = folder.tokens("heldout", 1, folder.num_tokens("heldout") - 1)
    assert np.array_equal(np.sort(predicted.numpy()), np.sort(text))


# Reading ahead


class Shelf:
    """Reads samples that are their positions, and counts the reads."""

    def __init__(self) -> None:
        self.asked: list[OwnSamples] = []
        self.staging = Staging(torch.device("cpu"))
        self.reader = BatchReader(self.read, self.staging)
        self.before: Callable[[OwnSamples], None] = lambda own: None

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        self.asked.append(own)
        self.before(own)
        return cut_micro_batches((torch.from_numpy(positions_of(own)),), own)

    def take(self, own: OwnSamples, *following: OwnSamples) -> list[int]:
        return [int(position) for (part,) in self.reader.take(own, following) for position in part]

    def free_slots(self) -> int:
        return self.staging._free.qsize()


def step(number: int, size: int = 2) -> OwnSamples:
    return OwnSamples((10 * number,), (size,))


@pytest.fixture
def shelf():
    shelf = Shelf()
    yield shelf
    shelf.reader.close()


def test_what_is_foreseen_is_read_once_and_nothing_else(shelf):
    for number in range(6):
        foreseen = range(number + 1, min(6, number + 1 + PREFETCHED_STEPS))
        assert shelf.take(step(number), *map(step, foreseen)) == [10 * number, 10 * number + 1]
    assert shelf.asked == [step(number) for number in range(6)]


def test_the_next_steps_are_read_while_the_step_before_them_is_made(shelf):
    read = [threading.Event() for _ in range(4)]
    shelf.before = lambda own: read[own.starts[0] // 10].set()
    shelf.take(step(0), step(1), step(2))
    assert read[1].wait(PATIENCE_S) and read[2].wait(PATIENCE_S)
    shelf.take(step(1), step(2), step(3))
    assert read[3].wait(PATIENCE_S)
    assert shelf.asked == [step(0), step(1), step(2), step(3)]


@pytest.mark.parametrize("unforeseen", [step(1, size=3), step(5), step(0)], ids=["other size", "later", "made again"])
def test_what_was_not_foreseen_is_read_anew(shelf, unforeseen):
    shelf.take(step(0), step(1), step(2))
    position, size = unforeseen.starts[0], unforeseen.sizes[0]
    assert shelf.take(unforeseen, step(7), step(8)) == list(range(position, position + size))
    assert shelf.take(step(7), step(8)) == [70, 71]
    assert shelf.take(step(8)) == [80, 81]
    assert shelf.asked[-3:] == [unforeseen, step(7), step(8)]


def test_a_step_beyond_the_next_that_was_not_foreseen_is_read_anew_too(shelf):
    shelf.take(step(0), step(1), step(2))
    assert shelf.take(step(1), step(2, size=4)) == [10, 11]
    assert shelf.take(step(2, size=4)) == [20, 21, 22, 23]


def test_many_changes_leave_every_slot_in_use(shelf):
    for number in range(0, 100, 5):  # none follows on the one before
        assert shelf.take(step(number), step(number + 1), step(number + 2)) == [10 * number, 10 * number + 1]
    shelf.reader.close()
    assert shelf.free_slots() == SLOTS - 1, "all but the one that is in use"


def test_a_reader_that_fails_is_reported_at_its_step_and_leaves_its_slot(shelf):
    def fail(own: OwnSamples) -> None:
        if own == step(1):
            raise OSError("the disk is gone")

    shelf.before = fail
    for _ in range(4):
        assert shelf.take(step(0), step(1), step(2)) == [0, 1]
        with pytest.raises(OSError, match="disk is gone"):
            shelf.take(step(1), step(2), step(3))
    assert shelf.take(step(3), step(1)) == [30, 31]
    assert shelf.take(step(4)) == [40, 41], "what fails and is not wanted fails nobody"
    shelf.reader.close()
    assert shelf.free_slots() == SLOTS - 1


def test_closing_ends_the_thread_and_returns_what_was_read_ahead(shelf):
    shelf.take(step(0), step(1), step(2))
    shelf.reader.close()
    assert shelf.free_slots() == SLOTS - 1
    with pytest.raises(RuntimeError, match="after shutdown"):
        shelf.take(step(3))
