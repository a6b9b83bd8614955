"""A step's loss and gradients in two processes are those of one, whatever the model is cut along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.ranks import outputs

WORKER = Path(__file__).with_name("layout_worker.py")
FP32 = 5e-6
"""Of the Euclidean norm: sums in other orders, and the sharded gradients' exchange in fp32."""
UNEVEN_FP32 = 1e-6
"""Of decoders and hybrids, for each parameter. In convolutions the sums of some, such as the bias of the stem's norm,
cancel: one process in fp32 is there as far from fp64, by 3e-6 and more, as two are, with even shares and uneven ones.
All parameters together keep within it in every family."""
NAMES = (
    *("ring", "ulysses", "zero 2", "zero 1", "plain tensor", "tensor of a hybrid"),
    *("tensor of latent attention", "tensor of sinks and biases", "interleaved", "gpipe", "zero bubble", "experts"),
    *("tied pipeline", "tied split", "own split"),
    *("adapters, zero 2", "adapters, interleaved", "adapters, plain tensor"),
)
UNEVEN = (
    *("uneven zero 3", "uneven zero 1", "uneven replicas", "uneven experts", "uneven replicas of experts"),
    *("uneven own zero 3", "empty zero 3", "empty experts", "even resnet", "uneven resnet", "even unet", "uneven unet"),
)
COMPRESSED = {
    "bf16 experts": 2**-8,
    "int8 zero 3": 0.02,
    "int4 zero 1": 0.25,
    "int4 replicas": 0.25,
    "int8 resnet": 0.02,
    "bf16 parameters": 0.02,
    "int8 parameters": 0.05,
}
"""The most that all gradients together may be wrong by, of their norm; what the formats state is in `comm/codec.py`."""
NOISY = (
    *("zero 2", "zero 1", "uneven zero 3", "uneven replicas", "empty zero 3"),
    *("ring", "ulysses", "plain tensor", "tensor of a hybrid", "tensor of latent attention", "interleaved"),
    *("zero bubble", "tied pipeline", "tied split", "adapters, plain tensor"),
    *("experts", "uneven experts", "empty experts", "uneven replicas of experts"),
)


OVERLAPPED = (
    *("zero 2", "zero 1", "uneven zero 3", "uneven replicas", "empty zero 3", "uneven experts"),
    *("uneven replicas of experts", "adapters, zero 2", "int8 zero 3", "int4 zero 1", "int4 replicas", "even resnet"),
)
OF_FOUR = (
    *("shares of tensors", "replicas of tensors", "shares of sequences", "shares of tied pipelines"),
    *(
        "shares of split pipelines",
        "shares of pipelines",
        "groups of experts",
        "experts of tensors",
        "replicas of experts",
    ),
    "replicas on two nodes",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return computed_by(2, tmp_path_factory.mktemp("layouts") / "meeting")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return computed_by(4, tmp_path_factory.mktemp("layouts") / "meeting")


def computed_by(ranks: int, file: Path) -> list[dict[str, Any]]:
    printed = outputs(WORKER, [(file, rank, ranks) for rank in range(ranks)])
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_every_layout_is_judged(ranks: list[dict[str, Any]]) -> None:
    assert all(set(rank) == {*NAMES, *UNEVEN, *COMPRESSED} for rank in ranks)


@pytest.mark.parametrize("name", NAMES + UNEVEN)
def test_two_ranks_compute_what_one_computes(ranks: list[dict[str, Any]], name: str) -> None:
    found = [rank[name] for rank in ranks]
    assert sum(rank["loss"] for rank in found) == pytest.approx(1.0, rel=1e-6)
    assert sum(rank["squared"] for rank in found) == pytest.approx(1.0, rel=1e-5)
    assert sorted({one for rank in found for one in rank["errors"]}) == found[0]["names"]
    errors = {one: error for rank in found for one, error in rank["errors"].items()}
    limit = UNEVEN_FP32 if name in UNEVEN and not name.endswith("net") else FP32
    assert {one: error for one, error in errors.items() if not error < limit} == {}
    assert max(rank["error"] for rank in found) < UNEVEN_FP32


@pytest.mark.parametrize("name", COMPRESSED)
def test_gradients_that_travel_in_fewer_bits_are_nearly_those_of_one(ranks: list[dict[str, Any]], name: str) -> None:
    found, bound = [rank[name] for rank in ranks], COMPRESSED[name]
    assert UNEVEN_FP32 < max(rank["error"] for rank in found) < bound
    assert sum(rank["squared"] for rank in found) == pytest.approx(1.0, abs=2 * bound)
    loss = sum(rank["loss"] for rank in found)
    assert loss == pytest.approx(1.0, abs=1e-3 if name.endswith("parameters") else 1e-6)


@pytest.mark.parametrize("name", NOISY)
def test_the_noise_of_gradients_is_that_of_their_parts(ranks: list[dict[str, Any]], name: str) -> None:
    check_noise(ranks, name)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_sums_beside_the_backward_have_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    check_bits(ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_sum_the_same_bits_too(four_ranks: list[dict[str, Any]], name: str) -> None:
    """In tiers and over shards and replicas, with pipelines, tied weights and split schedules."""
    check_bits(four_ranks, name)


def check_bits(ranks: list[dict[str, Any]], name: str) -> None:
    """Whether or not the backward waits for them, and whatever the size of buckets."""
    sizes = ("waited for", "overlapped", "pairs", "all at once")
    assert [rank[name]["same_bits"] for rank in ranks] == [dict.fromkeys(sizes, True)] * len(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_the_noise_shows_between_ranks_that_are_spread_otherwise_too(
    four_ranks: list[dict[str, Any]], name: str
) -> None:
    assert max(rank[name]["error"] for rank in four_ranks) < UNEVEN_FP32
    check_noise(four_ranks, name)


@pytest.mark.slow
def test_replicas_on_several_nodes_are_summed_inside_each_first(four_ranks: list[dict[str, Any]]) -> None:
    """All of the gradients, four blocks' and the rest, and those of no other layout."""
    blocks = 4
    for rank in four_ranks:
        sums = {name: found["tiered_sums"] for name, found in rank.items() if found["tiered_sums"]}
        assert sums == {"replicas on two nodes": blocks + 1}


def check_noise(ranks: list[dict[str, Any]], name: str) -> None:
    """Each part's gradient, before it is summed, is what one process computes of the part's samples alone; experts that
    ep spreads, and the number of parts, are told apart."""
    found = [sum(shares) for shares in zip(*(rank[name]["noise"] for rank in ranks), strict=True)]
    (alone,) = [rank[name]["noise_alone"] for rank in ranks if rank[name]["noise_alone"] is not None]
    assert found == pytest.approx(alone, rel=1e-6)
    assert (alone[1] > 0) == (alone[3] > 0) == ("experts" in name and name != "uneven replicas of experts")
