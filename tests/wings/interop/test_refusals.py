"""Unsupported values are refused by their key, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from wings.interop.emitting import refused_by

MEGATRON = {"data__source": "megatron", "data__path": "text.bin", "checkpoint__mode": "sync"}
USUAL: dict[str, dict[str, Any]] = {
    "megatron": MEGATRON,
    "megatron-bridge": MEGATRON,
    "maxtext": {
        "data__source": "megatron",
        "data__path": "a.bin",
        "recompute": "full",
        "train__eval_interval_steps": None,
    },
    "axolotl": {"init__from": "hf:org/model", "data__source": "jsonl", "data__path": "text.jsonl"},
}
"""Values without which an engine refuses the common run."""
REFUSED: dict[str, list[tuple[str, Any, dict[str, Any]]]] = {
    "deepspeed": [
        ("optim.name", "muon", {}),
        ("layout.pp", 2, {"layout__pipeline_schedule": "1f1b", "layout__stage_layers": [16, 16]}),
        ("recompute", "selective", {}),
        ("layout.context_method", "ring", {"layout__cp": 2}),
        ("layout.sequence_parallel", True, {"layout__tp": 2}),
        ("optim.schedule.kind", "wsd", {}),
        ("comm.gradients", "int8", {}),
        ("layout.dp_replicate", 2, {}),
    ],
    "accelerate": [
        ("layout.zero_stage", 1, {}),
        ("layout.pp", 2, {}),
        ("recompute", "selective", {}),
        ("offload", "optimizer", {}),
    ],
    "torchtitan": [
        ("model.num_layers", 31, {}),
        ("optim.grad_clip_norm", None, {}),
        ("layout.context_method", "ulysses", {"layout__cp": 2}),
        ("precision.reduce", "bf16", {}),
        ("checkpoint.keep_last", 1, {}),
    ],
    "megatron": [
        ("data.source", "tokens", {}),
        ("data.path", "a*.bin", {}),
        ("optim.name", "muon", {}),
        ("layout.pipeline_schedule", "zbv", {"layout__pp": 2}),
        ("layout.dp_replicate", 2, {}),
        ("model.sliding_window", 4096, {}),
    ],
    "megatron-bridge": [
        ("data.source", "tokens", {}),
        ("layout.pipeline_schedule", "zbv", {"layout__pp": 2}),
        ("checkpoint.mode", "async", {}),
    ],
    "maxtext": [
        ("recompute", "none", {}),
        ("layout.zero_stage", 2, {}),
        ("layout.context_method", "ulysses", {"layout__cp": 2}),
        ("optim.name", "muon", {}),
        ("data.source", "tokens", {}),
        ("train.eval_interval_steps", 10, {}),
        ("offload", "optimizer", {}),
        ("model.sliding_window", 4096, {}),
    ],
    "axolotl": [
        ("init.from", None, {}),
        ("init.from", "runs/mine", {}),
        ("data.source", "tokens", {}),
        ("data.path", "text/*.jsonl", {}),
        ("layout.zero_stage", 1, {}),
        ("layout.pp", 2, {}),
        ("layout.sequence_parallel", True, {"layout__tp": 2}),
        ("layout.context_method", "ulysses", {"layout__cp": 2}),
        ("recompute", "selective", {}),
        ("optim.name", "muon", {}),
        ("lora.targets", ["z"], {"lora__rank": 8}),
        ("lora.alpha", 16.5, {"lora__rank": 8}),
        ("offload", "optimizer", {}),
    ],
}
CASES = [(engine, *case) for engine, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("engine", "key", "value", "others"), CASES)
def test_an_unsupported_value_is_refused_by_its_key(engine: str, key: str, value: Any, others: dict[str, Any]) -> None:
    changes = {**USUAL.get(engine, {}), **others, key.replace(".", "__"): value}
    refused = {problem.path: problem for problem in refused_by(engine, **changes)}
    if engine not in USUAL:
        assert [*refused] == [key]
    assert refused[key].hint


def test_all_unsupported_values_are_reported_together() -> None:
    refused = refused_by("transformers", checkpoint__keep_best=True, optim__name="muon", train__eval_interval_steps=10)
    assert [problem.path for problem in refused] == ["optim.name", "checkpoint.keep_best"]


def test_axolotl_shards_packed_samples_over_cp_one_at_a_time() -> None:
    packed = {**USUAL["axolotl"], "layout__cp": 2, "batching__micro_batch_size": 2}
    assert "batching.micro_batch_size" in [problem.path for problem in refused_by("axolotl", **packed)]
