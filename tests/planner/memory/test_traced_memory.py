"""The planned peak of models of transformers against a trace of the real step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
from lab.tracing import Trace
from lab.transformers_models import model_of

from trainspec_cli.planner.memory.engine.step import tensors_by_cause
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import FAMILIES

pytest.importorskip("transformers")
WITHIN = 0.05


@dataclass(frozen=True)
class Run:
    kind: str
    layout: Layout
    recompute: Recompute = "none"
    rank: int = 0
    magnitude: bool = False
    compute: Literal["fp32", "bf16"] = "fp32"
    samples: int = 2


RUNS = [
    Run("gptj", Layout(dp_shard=2, zero_stage=3), "selective", compute="bf16"),
    Run("opt", Layout()),
    Run("opt", Layout(dp_shard=4, zero_stage=1), samples=1),
    Run("opt", Layout(dp_shard=2, zero_stage=2), "full"),
    Run("gptj", Layout(dp_replicate=2), "full", compute="bf16"),
    Run("gptj", Layout(dp_shard=2, zero_stage=3), rank=4),
    Run("gptj", Layout(dp_shard=2, zero_stage=3), rank=4, magnitude=True),
]


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.slow if place else ()) for place, run in enumerate(RUNS)]
)
def test_the_planned_peak_is_that_of_a_trace(run: Run, monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    lora = LoraSpec(rank=run.rank, magnitude=run.magnitude)
    model = model_of(run.kind, lora, run.compute)
    monkeypatch.setitem(FAMILIES, "module", model)
    case = Case("module", run.layout, recompute=run.recompute, micro_batch_size=run.samples, optimizer="adamw")
    plan = build_plan(case, "cpu")
    plan = replace(plan, spec=replace(plan.spec, lora=lora), compute=run.compute)
    traced = trace(plan)
    planned = tensors_by_cause(plan)
    assert planned is not None
    found = sum(planned.values()) / traced.peak_memory_bytes - 1
    assert abs(found) < WITHIN
