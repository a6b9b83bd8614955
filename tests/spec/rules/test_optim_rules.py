"""What an optimizer does not go with is refused, with what to type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import ConvModel, DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection
from trainspec_cli.spec.recipe.scheduler import LayoutChangeSpec, SchedulerSpec
from trainspec_cli.spec.rules.check import check

SPEC = RunSpec(
    model=DecoderModel(2, 64, 2, 2, 32, 160, 4096),
    data=DataSpec(seq_len=64, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3, name="muon"),
    batching=BatchingSpec(global_batch_size=8),
    train=TrainSection(max_steps=8),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
    layout=LayoutSpec(dp_replicate=1),
)
QUANTISED = {"optim": OptimSpec(lr=1e-3, name="adamw8bit")}
CHANGED = {"scheduler": SchedulerSpec(changes=(LayoutChangeSpec(step=4, dp_shard=1, tp=2),))}
ALIGNED = {"model": DecoderModel(2, 512, 8, 8, 64, 1024, 4096)}
RESNET = ConvModel("resnet", (32, 32), (8,), (1,), num_classes=10)


@pytest.mark.parametrize(
    ("changes", "path", "hint"),
    [
        ({"lora": LoraSpec(rank=4)}, "optim.name", "type optim.name=adamw, or lora.rank=0"),
        ({"model": RESNET}, "optim.name", "type optim.name=adamw or optim.name=sgd"),
        ({"offload": "optimizer"}, "offload", "type offload=none, or optim.name=adamw"),
        (QUANTISED | {"offload": "optimizer"}, "offload", "type offload=none, or optim.name=adamw"),
        (QUANTISED | CHANGED, "scheduler.changes.0.tp", "type ~scheduler.changes.0.tp, or optim.name=adamw"),
    ],
    ids=["adapters", "convolutions", "offloaded muon", "offloaded moments", "another tp"],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], path: str, hint: str) -> None:
    found = [(problem.path, problem.hint) for problem in check(replace(SPEC, **changes))]
    assert (path, hint) in found


@pytest.mark.parametrize("changes", [{}, QUANTISED, CHANGED, QUANTISED | CHANGED | ALIGNED, {"offload": "auto"}])
def test_what_goes_together_is_not(changes: dict[str, Any]) -> None:
    assert check(replace(SPEC, **changes)) == []
