"""A step clips by the norm of the whole gradient, whatever the ranks hold of it: two ranks move as one does."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab.ranks import outputs

from trainspec_cli.recipe.keys.layout import LayoutSpec

WORKER = Path(__file__).parent / "clip_worker.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"dp_shard": 2, "dp_replicate": 1},
    "replicas": {"dp_shard": 1, "dp_replicate": 2},
    "tensor": {"tp": 2, "dp_shard": 1, "dp_replicate": 1},
    "pipeline": {"pp": 2, "dp_shard": 1, "dp_replicate": 1},
}


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("clip_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One rank: the gradient's norm, and the weights before and after a step of two samples that is clipped to half."""
    rendezvous = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    worker = load_worker()
    state = worker.build(LayoutSpec(dp_shard=1, dp_replicate=1), 1)
    before = worker.weights(state)
    norm = worker.step(state, [0, 1], None).grad_norm.item()
    state = worker.build(LayoutSpec(dp_shard=1, dp_replicate=1), 1)
    outcome = worker.step(state, [0, 1], norm / 2)
    yield {"norm": norm, "loss": outcome.loss.item(), "before": before, "weights": worker.weights(state)}
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of the same step on two ranks, by rank and layout."""
    rendezvous = tmp_path_factory.mktemp("pair") / "rendezvous"
    given = [str(rendezvous), json.dumps(LAYOUTS), str(alone["norm"] / 2)]
    return [json.loads(text) for text in outputs(WORKER, [(rank, *given) for rank in range(2)])]


def flat(weights: dict[str, list[float]], names: list[str]) -> torch.Tensor:
    return torch.cat([torch.tensor(weights[name], dtype=torch.float64) for name in names])


def test_a_clipped_step_moves_as_far_as_allowed(alone: dict[str, Any]) -> None:
    names = sorted(alone["before"])
    moved = (flat(alone["weights"], names) - flat(alone["before"], names)).norm()
    assert moved == pytest.approx(load_worker().LR * alone["norm"] / 2, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_clip_by_the_norm_of_both(alone: dict[str, Any], pair: list[dict[str, Any]], layout: str) -> None:
    ranks = [found[layout] for found in pair]
    names = sorted(alone["before"])
    found = {name: values for rank in ranks for name, values in rank["weights"].items()}
    for rank in ranks:
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    torch.testing.assert_close(flat(found, names), flat(alone["weights"], names), rtol=1e-4, atol=1e-6)
