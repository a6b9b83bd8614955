"""Moves from one layout to another, replayed on arrays: every part of the new layout holds what the tensors hold."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.engine.checkpoint.reshard import PartPlace, fill_buckets, peak_bytes, plan_moves

RANKS = 4
FULL = {"bias": (7,), "count": (), "matrix": (6, 5), "other": (4, 3)}


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the bounds of a part as torch.chunk does: the last parts may be smaller, or empty."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def place(name: str, dim: int, parts: int, index: int, inner: int = 1, inner_index: int = 0) -> PartPlace | None:
    """The part `index` of `parts` along `dim`, and of that along the first dim the part `inner_index`."""
    full = FULL[name]
    offsets, shape = [0] * len(full), list(full)
    if full:
        dim %= len(full)
        offsets[dim], shape[dim] = cut(full[dim], parts, index)
        start, size = cut(shape[0], inner, inner_index)
        offsets[0], shape[0] = offsets[0] + start, size
    if 0 in shape:
        return None
    return PartPlace(name, torch.float32, tuple(offsets), tuple(shape), full)


@st.composite
def layouts(draw: st.DrawFn) -> list[list[PartPlace]]:
    """Some ranks hold parts of each tensor: it is cut along a dim, sharded, copied, or on one stage only."""
    ranks: list[list[PartPlace]] = [[] for _ in range(RANKS)]
    for name in FULL:
        holders = draw(st.sampled_from([(0, 1, 2, 3), (0, 1), (2, 3), (3,), (1, 0)]))
        parts = draw(st.sampled_from([parts for parts in (1, 2, 4) if len(holders) % parts == 0]))
        inner = draw(st.sampled_from([inner for inner in (1, 2) if len(holders) % (parts * inner) == 0]))
        dim = draw(st.integers(0, 1))
        for at, rank in enumerate(holders):
            if held := place(name, dim, parts, at % parts, inner, at // parts % inner):
                ranks[rank].append(held)
    return ranks


def content(held: PartPlace) -> np.ndarray:
    whole = np.arange(np.prod(FULL[held.name], dtype=int)).reshape(FULL[held.name])
    return whole[tuple(slice(at, at + size) for at, size in zip(held.offsets, held.shape, strict=True))]


@settings(max_examples=60, deadline=None)
@given(layouts(), layouts())
def test_every_part_of_the_new_layout_is_filled_once_with_what_the_old_one_held(
    old: list[list[PartPlace]], new: list[list[PartPlace]]
) -> None:
    filled = {(rank, part.name): np.full(part.shape, -1) for rank, parts in enumerate(new) for part in parts}
    places = {
        (side, rank, p.name): p for side, ranks in enumerate((old, new)) for rank, ps in enumerate(ranks) for p in ps
    }
    for move in plan_moves(old, new):
        source, target = places[0, move.source, move.name], places[1, move.target, move.name]
        taken, given_to = (
            tuple(slice(a - start, b - start) for (a, b), start in zip(move.spans, part.offsets, strict=True))
            for part in (source, target)
        )
        assert np.all(filled[move.target, move.name][given_to] == -1)
        filled[move.target, move.name][given_to] = content(source)[taken]
    for (rank, name), found in filled.items():
        assert np.array_equal(found, content(places[1, rank, name]))


@settings(max_examples=20, deadline=None)
@given(layouts())
def test_nothing_is_sent_where_nothing_changes(same: list[list[PartPlace]]) -> None:
    assert all(move.stays for move in plan_moves(same, same))


def test_several_holders_share_the_sending() -> None:
    whole = place("matrix", 0, 1, 0)
    assert whole
    moves = plan_moves([[whole], [whole], [], []], [[whole], [], [whole], [whole]])
    assert Counter((move.source, move.target) for move in moves) == {(0, 0): 1, (0, 2): 1, (1, 3): 1}


def test_what_nobody_holds_is_refused() -> None:
    whole, half = place("matrix", 0, 1, 0), place("matrix", 0, 2, 1)
    assert whole and half
    with pytest.raises(ValueError, match="every element of matrix"):
        plan_moves([[half]], [[whole]])
    other = PartPlace("matrix", torch.bfloat16, whole.offsets, whole.shape, whole.full_shape)
    with pytest.raises(ValueError, match="different shape or format"):
        plan_moves([[whole]], [[other]])


@settings(max_examples=30, deadline=None)
@given(layouts(), layouts(), st.sampled_from([1, 100, 250, 10_000]))
def test_buckets_hold_every_tensor_once_and_no_rank_more_than_it_may(
    old: list[list[PartPlace]], new: list[list[PartPlace]], limit: int
) -> None:
    buckets = fill_buckets(old, new, limit)
    assert list(itertools.chain(*buckets)) == sorted(FULL)
    held = [sum((Counter({p.name: p.bytes}) for p in old[rank] + new[rank]), Counter()) for rank in range(RANKS)]
    loads = [[sum(rank[name] for name in bucket) for rank in held] for bucket in buckets]
    assert all(len(bucket) == 1 or max(load) <= limit for bucket, load in zip(buckets, loads, strict=True))
    for before, after in itertools.pairwise(range(len(buckets))):  # none is closed early
        assert max(loads[before][rank] + held[rank][buckets[after][0]] for rank in range(RANKS)) > limit


def test_the_peak_is_what_lies_twice_beside_the_rest() -> None:
    """One rank of two gives the second half of each tensor away, tensor by tensor."""
    both = [[place(name, 0, 1, 0) for name in ("matrix", "other")], []]
    halves = [[place(name, 0, 2, rank) for name in ("matrix", "other")] for rank in range(2)]
    moves = plan_moves(both, halves)  # type: ignore[arg-type]
    matrix, other = 120, 48
    apart = [["matrix"], ["other"]]
    first = peak_bytes(both[0], halves[0], moves, apart, 0)  # type: ignore[arg-type]
    assert first == matrix + other + matrix // 2 + matrix // 2
    second = peak_bytes(both[1], halves[1], moves, apart, 1)  # type: ignore[arg-type]
    assert second == max(matrix // 2 + matrix // 2, matrix // 2 + other // 2 + other // 2)
    together = peak_bytes(both[0], halves[0], moves, [["matrix", "other"]], 0)  # type: ignore[arg-type]
    assert together == 2 * (matrix + other)
