"""Four ranks update by Muon, and by AdamW with moments of 8 bits, as one does, whatever they hold of the matrices."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab.ranks import outputs

WORKER = Path(__file__).parent / "optimizer_worker.py"
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "zero 3": ("dense", {"dp_shard": 4}),
    "zero 2": ("dense", {"dp_shard": 4, "zero_stage": 2}),
    "replicas of zero 1": ("dense", {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 1}),
    "replicas": ("dense", {"dp_replicate": 4}),
    "sharded tensors": ("dense", {"dp_shard": 2, "tp": 2}),
    "pipeline of sequences": ("dense", {"pp": 2, "cp": 2}),
    "spread experts": ("experts", {"dp_shard": 4, "ep": 2}),
    "sharded experts": ("experts", {"dp_shard": 4}),
}
CASES = {
    f"{optimizer}, {name}": (optimizer, *layout)
    for optimizer in ("muon", "adamw8bit")
    for name, layout in LAYOUTS.items()
    if optimizer == "muon" or "tp" not in layout[1]  # tp cuts rows of 64 and 96: blocks of another length
}
USUAL = ("muon, sharded tensors", "adamw8bit, zero 3")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The worker's module, in a process group of one rank."""
    rendezvous = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    spec = importlib.util.spec_from_file_location("optimizer_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(USUAL, id="usual"),
        pytest.param(tuple(CASES.keys() - set(USUAL)), id="all others", marks=pytest.mark.slow),
    ],
)
def test_four_ranks_update_as_one(names: Sequence[str], worker: Any, tmp_path: Path) -> None:
    given = ["4", str(tmp_path / "rendezvous"), json.dumps({name: CASES[name] for name in names})]
    four = [json.loads(text) for text in outputs(WORKER, [(rank, *given) for rank in range(4)])]
    alone = {
        (optimizer, model): worker.train(worker.build(optimizer, model, {}, 1))
        for optimizer, model in {CASES[name][:2] for name in names}
    }
    for name in names:
        check(alone[CASES[name][:2]], [found[name] for found in four], name)


def check(expected: dict[str, Any], ranks: Sequence[dict[str, Any]], case: str) -> None:
    assert {name for rank in ranks for name in rank["weights"]} == set(expected["weights"])
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5), case
        for name, weights in rank["weights"].items():
            own, other = torch.tensor(weights), torch.tensor(expected["weights"][name])
            assert (own - other).norm() <= 2e-4 * other.norm(), (case, name)
