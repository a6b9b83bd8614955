"""The losses of compressed gradients are exactly what the weights lack, and move with the state to another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.ranks import outputs

WORKER = Path(__file__).with_name("lost_gradients_worker.py")
BF16 = 0.004
OF_TWO = ("shards to replicas", "replicas to shards of a tied model", "shards to tensors")
OF_FOUR = ("experts to shards", "tensors to a tied pipeline", "a tied pipeline to tensors", "both to tensors")
DROPS = "shards to tensors"


def found_by(folder: Path, ranks: int, names: tuple[str, ...]) -> dict[str, Any]:
    printed = outputs(WORKER, [(folder / "meeting", rank, ranks, *names) for rank in range(ranks)])
    return json.loads(printed[0].splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(tmp_path_factory.mktemp("two"), 2, OF_TWO)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(tmp_path_factory.mktemp("four"), 4, OF_FOUR)


def check(found: dict[str, Any], name: str) -> None:
    """Every element has the bits that it had, unless the new layout compresses nothing that could send it."""
    assert found["missing"] == []
    assert found["lost"] > 0.01
    assert found["relative"] < BF16
    if name == DROPS:
        assert (found["drops_lost"], found["moved"]) == (True, 0.0)
    else:
        assert (found["drops_lost"], found["changed"]) == (False, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TWO)
def test_what_is_lost_is_what_the_weights_lack_and_moves_bit_by_bit(of_two: dict[str, Any], name: str) -> None:
    check(of_two[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_so_it_does_where_ranks_hold_parts_of_a_gradient(of_four: dict[str, Any], name: str) -> None:
    check(of_four[name], name)
