"""Two ranks change their layout between steps: no bit of the state changes, and the steps after it are those of a run
that kept its layout. A change that fails on one of them leaves both as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.ranks import outputs

WORKER = Path(__file__).with_name("relayout_worker.py")
FP32 = 1e-6
QUICK = ("moved layers of a tied model", "pipeline to data")
SLOW = (
    *("moved layers", "moved layers of experts", "moved layers of a hybrid", "data to tensor", "ZeRO-1 to ZeRO-3"),
    *("replicas to a pipeline of a tied model", "a pipeline of a tied model to tensor", "data to experts"),
    *("experts to a pipeline", "tensor to data in a hybrid", "replicas to shards of a network"),
)
SENDS_NOTHING = ("ZeRO-1 to ZeRO-3", "data to experts", "replicas to a pipeline of a tied model", *SLOW[-1:])
"""Each rank holds what it needs, or the whole, already."""


def found_by_ranks(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    printed = outputs(WORKER, [(folder / "meeting", rank, *names) for rank in range(2)])
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_ranks(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_ranks(tmp_path_factory.mktemp("slow"), SLOW)


def check(found: dict[str, Any], name: str) -> None:
    assert found["error"] == ""
    assert found["tensors"] > 40
    assert found["changed"] == []
    assert found["losses"] == pytest.approx(found["wanted"], rel=FP32)
    assert found["weights"] < FP32
    assert found["moments"] < FP32
    assert (found["moved_bytes"] == 0) == (name in SENDS_NOTHING)


@pytest.mark.parametrize("name", QUICK)
def test_the_state_moves_bit_by_bit_and_the_run_goes_on_as_it_was(quick: list[dict[str, Any]], name: str) -> None:
    for rank in quick:
        check(rank[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_so_it_does_from_any_layout_to_any_other(slow: list[dict[str, Any]], name: str) -> None:
    for rank in slow:
        check(rank[name], name)


def test_moved_layers_alone_compute_the_same_bits(quick: list[dict[str, Any]]) -> None:
    found = quick[0][QUICK[0]]
    assert found["losses"] == found["wanted"]
    assert (found["weights"], found["moments"]) == (0.0, 0.0)


def test_the_peak_that_is_stated_is_what_a_rank_held(quick: list[dict[str, Any]]) -> None:
    measured = [rank["buckets"]["measured_bytes"] for rank in quick]
    assert {rank["buckets"]["peak_bytes"] for rank in quick} == {max(measured)}
    assert quick[0]["buckets"]["peak_bytes"] < 0.5 * quick[0][QUICK[1]]["peak_bytes"]
    assert all(rank["buckets"]["changed"] == [] for rank in quick)


@pytest.mark.parametrize(("at", "layout"), [("0.0", "pp=2"), ("1.0", "dp_replicate=2")])
def test_a_change_that_fails_on_one_rank_leaves_every_bit_as_it_was(
    quick: list[dict[str, Any]], at: str, layout: str
) -> None:
    for rank in quick:
        found = rank[f"failed at {at}"]
        assert found["error"].startswith("rank 1: MemoryError: ")
        assert (found["layout"], found["changed"], found["after"]) == (layout, [], [])
        assert found["losses"] == found["wanted"]


def test_a_change_that_one_rank_has_no_room_for_is_refused_before_anything_moves(quick: list[dict[str, Any]]) -> None:
    for rank in quick:
        found = rank["without room"]
        assert found["error"].startswith("rank 0: ") and " 1000 B " in found["error"]
        assert (found["layout"], found["changed"], found["after"]) == ("pp=2", [], [])
