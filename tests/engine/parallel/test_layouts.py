"""A step's loss and gradients in two processes are those of one, whatever the model is cut along."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine.parallel import layout_worker as worker
from lab.ranks import outputs

WORKER = Path(worker.__file__)
FP32 = 5e-6
"""Error relative to the Euclidean norm: sums in other orders, and the exchange of sharded gradients in fp32."""
UNEVEN_FP32 = 1e-6
"""For each parameter of decoders and hybrids. In convolutions the sums of some, such as the bias of the stem's norm,
cancel: one process in fp32 is there as far from fp64, by 3e-6 and more, as two are, with even shares and uneven ones.
All parameters together keep within it in every family."""
BOUNDS = {
    "bf16 experts": 2**-8,
    "int8 zero 3": 0.02,
    "int4 zero 1": 0.25,
    "int4 replicas": 0.25,
    "int8 resnet": 0.02,
    "bf16 parameters": 0.02,
    "int8 parameters": 0.05,
}
"""The most that all gradients together may be wrong by, of their norm; what the formats state is in `comm/codec.py`."""
RUNS = worker.runs()
OF_TWO = [name for name, run in RUNS.items() if run.case.layout.world_size == 2]
OF_FOUR = [name for name, run in RUNS.items() if run.case.layout.world_size == 4]
USUAL = {"ring", "zero 1", "plain tensor", "interleaved", "empty experts", "int4 zero 1"}
"""One of each kind; others show more of the same (`pytest -m slow`)."""

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """two_ranks(name): what both ranks have found in a layout; the usual ones are computed together, and all others."""

    @cache
    def computed(*, usual: bool) -> Ranks:
        names = [name for name in OF_TWO if (name in USUAL) == usual]
        return computed_by(2, tmp_path_factory.mktemp("layouts") / "meeting", names)

    return lambda name: [rank[name] for rank in computed(usual=name in USUAL)]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return computed_by(4, tmp_path_factory.mktemp("layouts") / "meeting", OF_FOUR)


def computed_by(ranks: int, file: Path, names: Sequence[str]) -> Ranks:
    """Return what each rank has found in layouts of these names."""
    printed = outputs(WORKER, [(file, rank, ranks, *names) for rank in range(ranks)])
    return [json.loads(text.splitlines()[-1]) for text in printed]


def named(names: Iterable[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@named(name for name in OF_TWO if name not in BOUNDS)
def test_two_ranks_compute_what_one_computes(two_ranks: Callable[[str], Ranks], name: str) -> None:
    found = two_ranks(name)
    assert sum(rank["loss"] for rank in found) == pytest.approx(1.0, rel=1e-6)
    assert sum(rank["squared"] for rank in found) == pytest.approx(1.0, rel=1e-5)
    assert sorted({one for rank in found for one in rank["errors"]}) == found[0]["names"]
    errors = {one: error for rank in found for one, error in rank["errors"].items()}
    limit = UNEVEN_FP32 if name in worker.UNEVEN and not name.endswith("net") else FP32
    assert {one: error for one, error in errors.items() if not error < limit} == {}
    assert max(rank["error"] for rank in found) < UNEVEN_FP32


@named(BOUNDS)
def test_gradients_that_travel_in_fewer_bits_are_nearly_those_of_one(
    two_ranks: Callable[[str], Ranks], name: str
) -> None:
    found, bound = two_ranks(name), BOUNDS[name]
    assert UNEVEN_FP32 < max(rank["error"] for rank in found) < bound
    assert sum(rank["squared"] for rank in found) == pytest.approx(1.0, abs=2 * bound)
    loss = sum(rank["loss"] for rank in found)
    assert loss == pytest.approx(1.0, abs=1e-3 if name.endswith("parameters") else 1e-6)


@named(name for name in OF_TWO if name in worker.NOISY)
def test_the_noise_of_gradients_is_that_of_their_parts(two_ranks: Callable[[str], Ranks], name: str) -> None:
    check_noise(two_ranks(name), name)


@named(name for name in OF_TWO if name in worker.OVERLAPPED)
def test_sums_beside_the_backward_have_the_same_bits(two_ranks: Callable[[str], Ranks], name: str) -> None:
    check_bits(two_ranks(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_sum_the_same_bits_and_their_noise_shows_too(four_ranks: Ranks, name: str) -> None:
    """In tiers and over shards and replicas, with pipelines, tied weights and split schedules."""
    found = [rank[name] for rank in four_ranks]
    assert max(rank["error"] for rank in found) < UNEVEN_FP32
    check_noise(found, name)
    if name in worker.OVERLAPPED:
        check_bits(found)


def check_bits(ranks: Ranks) -> None:
    """The bits do not depend on whether the backward waits for the sums, or on the size of buckets."""
    sizes = ("waited for", "overlapped", "pairs", "all at once")
    assert [rank["same_bits"] for rank in ranks] == [dict.fromkeys(sizes, True)] * len(ranks)


@pytest.mark.slow
def test_replicas_on_several_nodes_are_summed_inside_each_first(four_ranks: Ranks) -> None:
    """All of the gradients, four blocks' and the rest, and those of no other layout."""
    blocks = 4
    for rank in four_ranks:
        sums = {name: found["tiered_sums"] for name, found in rank.items() if found["tiered_sums"]}
        assert sums == {"replicas on two nodes": blocks + 1}


def check_noise(ranks: Ranks, name: str) -> None:
    """Each part's gradient, before it is summed, is what one process computes of the part's samples alone; experts that
    ep spreads, and the number of parts, are distinguished."""
    found = [sum(shares) for shares in zip(*(rank["noise"] for rank in ranks), strict=True)]
    (alone,) = [rank["noise_alone"] for rank in ranks if rank["noise_alone"] is not None]
    assert found == pytest.approx(alone, rel=1e-6)
    assert (alone[1] > 0) == (alone[3] > 0) == ("experts" in name and name != "uneven replicas of experts")
