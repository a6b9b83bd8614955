"""A step's loss and gradients in two processes are those of one, whatever the model is cut along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    *("adapters, zero 2", "adapters, interleaved", "adapters, plain tensor"),
)
UNEVEN = (
    *("uneven zero 3", "uneven zero 1", "uneven replicas", "uneven experts", "uneven replicas of experts"),
    *("empty zero 3", "empty experts", "even resnet", "uneven resnet", "even unet", "uneven unet"),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("layouts") / "meeting"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(file), str(rank)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=240)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    assert [rank.returncode for rank in started] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_every_layout_is_judged(ranks: list[dict[str, Any]]) -> None:
    assert all(set(rank) == {*NAMES, *UNEVEN} for rank in ranks)


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


@pytest.mark.parametrize("name", ["zero 2", "zero 1", "uneven zero 3", "uneven replicas", "empty zero 3"])
def test_the_noise_of_gradients_is_that_of_their_parts(ranks: list[dict[str, Any]], name: str) -> None:
    """Each part's gradient, before it is summed, is what one process computes of the part's samples."""
    assert sum(rank[name]["noise"] for rank in ranks) == pytest.approx(1.0, rel=1e-6)
