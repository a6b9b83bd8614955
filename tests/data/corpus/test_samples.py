from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lab.drawing import slow_after

from trainspec_cli.data.corpus.rows import empty_row
from trainspec_cli.data.corpus.samples import BLOCK, Mixed, locate, permute


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (7, 3)])
def test_every_index_comes_exactly_once(seed, epoch):
    for size in (*range(1, 130), 255, 256, 257, 1000, 4095, 4097, 65_537, 100_003):
        assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size)), size


def test_any_index_alone_goes_where_it_goes_in_company():
    whole = permute(np.arange(1000), 1000, seed=3, epoch=5)
    assert [int(permute(np.array([index]), 1000, 3, 5)[0]) for index in range(0, 1000, 37)] == whole[::37].tolist()


def test_the_order_never_changes_between_versions():
    """A run resumes by position: another order would show it some samples twice and others never."""
    assert permute(np.arange(12), 12, seed=0, epoch=0).tolist() == [11, 10, 7, 1, 2, 5, 0, 8, 9, 6, 3, 4]
    assert permute(np.arange(3), 10**12, seed=1, epoch=2).tolist() == [620704024177, 26328099246, 835359234804]


def test_no_samples_have_no_order():
    with pytest.raises(ValueError, match="0 samples"):
        locate(np.arange(2), 0, seed=1)


def test_seed_and_epoch_choose_the_order():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("size", slow_after(1, [2, 3, 7, 10, 24]))
def test_each_index_goes_everywhere_equally_often(size):
    """Chi-squared over many keys, per index: mean size - 1, far tail at six standard deviations."""
    keys = 4000
    counts = np.zeros((size, size))
    for seed in range(keys):
        counts[np.arange(size), permute(np.arange(size), size, seed, epoch=0)] += 1
    expected = keys / size
    chi_squared = ((counts - expected) ** 2 / expected).sum(axis=1)
    assert (chi_squared < size - 1 + 6 * np.sqrt(2 * (size - 1))).all()


def test_large_orders_look_random():
    size = 200_000
    order = permute(np.arange(size), size, seed=0, epoch=0).astype(float)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.01
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert np.abs(np.diff(order)).mean() == pytest.approx(size / 3, rel=0.01)
    next_order = permute(np.arange(size), size, seed=0, epoch=1).astype(float)
    assert abs(np.corrcoef(order, next_order)[0, 1]) < 0.01


def test_an_epoch_sees_every_sample_once_and_the_next_begins_where_it_ends():
    samples = 103
    epochs, indices = locate(np.arange(240), samples, seed=1)
    assert epochs.tolist() == [position // samples for position in range(240)]
    for epoch in (0, 1):
        assert sorted(indices[epochs == epoch]) == list(range(samples))
    assert indices[epochs == 0].tolist() != indices[epochs == 1].tolist()


class Numbered:
    """A stream whose row at position p is full of p."""

    def rows(self, positions):
        rows = [empty_row(4, documents=False) for _ in positions]
        for row, position in zip(rows, positions, strict=True):
            row.tokens[:] = position
        return rows

    def counted(self, positions):
        return 4 * len(positions)


def mixed(weights, seed=3) -> Mixed:
    return Mixed([Numbered() for _ in weights], weights, seed)


@pytest.mark.parametrize(
    "weights",
    [(0.7, 0.2, 0.1), (1, 1e-9), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 1), (3, 1), (1, 1, 1)))],
)
def test_every_stream_has_its_share_of_every_block_and_goes_on_without_gaps(weights):
    mixture = mixed(weights)
    drawn = [mixture.locate(position) for position in range(3 * BLOCK)]
    counts = Counter(stream for stream, _ in drawn)
    for stream, weight in enumerate(weights):
        assert counts[stream] == pytest.approx(3 * BLOCK * weight / sum(weights), abs=6)
        places = sorted(place for of, place in drawn if of == stream)
        assert places == list(range(len(places)))


def test_the_order_is_the_seeds_alone_and_any_position_is_found_at_once():
    mixture, again, other = mixed((2, 1)), mixed((2, 1)), mixed((2, 1), seed=4)
    whole = [mixture.locate(position) for position in range(40)]
    assert [again.locate(position) for position in range(20, 40)] == whole[20:]
    assert [other.locate(position) for position in range(40)] != whole
    first = [stream for stream, _ in whole]
    assert len(set(first[:10])) == 2, "streams are spread, not one after another"


def test_rows_come_from_the_streams():
    mixture = mixed((1, 1))
    positions = np.arange(30, 50)
    values = [int(row.tokens[0]) for row in mixture.rows(positions)]
    assert values == [mixture.locate(position)[1] for position in positions]
    assert mixture.counted(positions) == 80


def test_the_order_of_a_mixture_never_changes_between_versions():
    """A run resumes by position, also beyond the first block of 1000."""
    found = [mixed((2, 1)).locate(position) for position in (0, 1, 2, 999, 1000, 1001, 2500)]
    assert found == [
        (0, 487),
        (0, 369),
        (0, 623),
        (0, 600),
        (1, 656),
        (0, 1159),
        (0, 1438),
    ]


@example([1e3, 1e3, *[1e-6] * 10])
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12))
def test_slots_are_shared_by_largest_remainders(weights):
    """Every slot is given, each stream has one at least, and none is off its share by a slot or more, but for the
    largest (the first of equals), which makes room for those too small for one."""
    mixture = mixed(weights)
    slots = np.diff(mixture._bounds)
    shares = np.array(weights) / sum(weights) * BLOCK
    assert slots.sum() == BLOCK and slots.min() >= 1
    off = np.abs(slots - np.maximum(shares, 1))
    assert (np.delete(off, int(np.argmax(np.floor(shares)))) < 1 + 1e-9).all()
    if shares.min() >= 1:
        assert (np.abs(slots - shares) < 1 + 1e-9).all()
        given = slots - np.floor(shares)
        rest = shares - np.floor(shares)
        assert rest[given == 1].min(initial=1) >= rest[given == 0].max(initial=0) - 1e-9
