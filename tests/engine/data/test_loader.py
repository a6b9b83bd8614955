from dataclasses import replace

import numpy as np
import pytest
import torch

from trainspec_cli.corpus.prepare import prepare
from trainspec_cli.corpus.rows import Windows
from trainspec_cli.corpus.samples import Shuffled, num_samples
from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.engine.batch import IGNORED_TARGET
from trainspec_cli.engine.data.heldout import heldout_batches
from trainspec_cli.engine.data.loader import BatchPlan, batches, read_ahead, read_step
from trainspec_cli.engine.data.staging import Staging
from trainspec_cli.spec.recipe.data import DataSpec, TokenizerSpec

SEQ_LEN = 32


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(" ".join(f"word{j * (i + 1)}" for j in range(60)))
    data = DataSpec(SEQ_LEN, "text", str(text), tokenizer=TokenizerSpec(300), heldout_fraction=0.2)
    return TokenFolder.open(prepare(data))


def plan(rank: int, num_ranks: int, micro: int = 1) -> BatchPlan:
    return BatchPlan(12, micro, seed=5, rank=rank, num_ranks=num_ranks)


def order(folder) -> Shuffled:
    return Shuffled(Windows(folder, "train", SEQ_LEN), seed=5)


def step_tokens(folder, num_ranks: int, step: int, micro: int = 1) -> torch.Tensor:
    """The whole global batch of a step, put together from every rank's micro-batches."""
    parts = [read_step(order(folder), plan(rank, num_ranks, micro), step) for rank in range(num_ranks)]
    return torch.cat([tokens for rank in parts for tokens, _ in rank])


@pytest.mark.parametrize(("num_ranks", "micro"), [(2, 1), (3, 2), (4, 3), (6, 2)])
def test_the_stream_is_the_same_for_any_number_of_ranks(folder, num_ranks, micro):
    for step in (0, 7, 50):
        assert torch.equal(step_tokens(folder, num_ranks, step, micro), step_tokens(folder, 1, step))


def test_a_rank_of_context_parallelism_gets_its_positions(folder):
    positions = torch.tensor([0, 1, 30, 31])
    whole = read_step(order(folder), plan(0, 2, micro=3), step=1)
    held = read_step(order(folder), replace(plan(0, 2, micro=3), positions_S=positions), step=1)
    for (tokens, targets), (held_tokens, held_targets) in zip(whole, held, strict=True):
        assert torch.equal(held_tokens, tokens[:, positions])
        assert torch.equal(held_targets, targets[:, positions])


def test_an_epoch_sees_every_sample_once(folder):
    samples = num_samples(folder.num_tokens("train"), SEQ_LEN)
    steps = -(-2 * samples // 12)
    seen = torch.cat([step_tokens(folder, 2, step) for step in range(steps)])[: 2 * samples]
    everything = {folder.tokens("train", i * SEQ_LEN, SEQ_LEN).tobytes() for i in range(samples)}
    first, second = seen[:samples].numpy(), seen[samples:].numpy()
    for epoch in (first, second):
        assert {np.ascontiguousarray(row).tobytes() for row in epoch} == everything
    assert not np.array_equal(first, second)


def test_targets_are_the_next_tokens(folder):
    for tokens, targets in read_step(order(folder), plan(0, 1, 4), 3):
        assert tokens.shape == targets.shape == (4, SEQ_LEN)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_reading_ahead_changes_nothing(folder):
    ahead = batches(order(folder), plan(1, 2), Staging(torch.device("cpu")), 4, 11)
    for step, got in zip(range(4, 11), ahead, strict=True):
        for (tokens, targets), (expected_tokens, expected_targets) in zip(
            got, read_step(order(folder), plan(1, 2), step), strict=True
        ):
            assert torch.equal(tokens, expected_tokens)
            assert torch.equal(targets, expected_targets)


@pytest.mark.parametrize(("batch_size", "num_ranks"), [(1, 1), (4, 1), (3, 2), (16, 5)])
def test_every_heldout_token_but_the_first_is_predicted_once(folder, batch_size, num_ranks):
    rows = Windows(folder, "heldout", SEQ_LEN, keeps_rest=True)
    per_rank = [list(heldout_batches(rows, batch_size, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1, "every rank takes part in equally many forwards"
    predicted = torch.cat([targets[targets != IGNORED_TARGET] for batches in per_rank for _, targets in batches])
    text = folder.tokens("heldout", 1, folder.num_tokens("heldout") - 1)
    assert np.array_equal(np.sort(predicted.numpy()), np.sort(text))


@pytest.mark.parametrize(("start", "end"), [(0, 5), (3, 4), (2, 2)])
def test_no_step_is_read_beyond_the_end(start, end):
    asked: list[int] = []

    def read(step):
        asked.append(step)
        return [(torch.full((1,), step),)]

    got = [int(batch[0][0]) for batch in read_ahead(read, Staging(torch.device("cpu")), start, end)]
    assert got == asked == list(range(start, end))
