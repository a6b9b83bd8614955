"""DeepSpeed's configuration, and what DeepSpeed's own parser reads in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from wings.interop.emitting import Case, config_for, each_mistyped, files_in, judge, run_of

from trainspec_cli.wings.interop import RunValues, nest

RUNS = (
    (),
    (
        "layout.zero_stage=2",
        "layout.tp=2",
        "layout.sequence_parallel=false",
        "optim.schedule.kind=constant",
        "optim.grad_clip_norm=0.5",
    ),
    ("optim.grad_clip_norm=null",),
    ("layout.cp=2", "layout.context_method=ulysses", "recompute=full", "precision.reduce=bf16"),
    ("layout.zero_stage=1", "offload=optimizer", "optim.schedule.kind=constant", "optim.schedule.warmup_steps=0"),
    ("model=qwen3_0_6b", "data.seq_len=1024", "layout.dp_shard=1", "layout.dp_replicate=16", "recompute=none"),
)


FOLLOW = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "communication_data_type",
}
"""Keys that DeepSpeed computes from others if they are missing."""


def ranks_of(run: RunValues) -> int:
    return run.whole("derived.data_parallel_size")


def case_of(arguments: tuple[str, ...], keys: dict[str, object]) -> Case:
    files = {"ds_config.json": json.dumps(nest(keys))}  # type: ignore[arg-type]
    return Case(files, list(keys), about={"ranks": ranks_of(run_of(*arguments))})


@pytest.mark.slow
def test_deepspeed_reads_every_key() -> None:
    configs = [config_for("deepspeed", *run) for run in RUNS]
    judged = judge("deepspeed", [case_of(run, keys) for run, keys in zip(RUNS, configs, strict=True)])
    for keys, judgement in zip(configs, judged, strict=True):
        assert judgement.error is None
        assert {key: lowered(value) for key, value in judgement.keys.items()} == {
            key: lowered(value) for key, value in keys.items() if key != "sequence_parallel_size"
        }


@pytest.mark.slow
def test_deepspeed_notices_a_mistyped_key() -> None:
    keys = config_for("deepspeed", *RUNS[1])
    named = [key for key in keys if "[" not in key]
    wrong = each_mistyped(keys, named)
    right, *judged = judge("deepspeed", [replace(case_of(RUNS[1], case), keys=list(keys)) for case in (keys, *wrong)])
    unseen = {key for key, judgement in zip(named, judged, strict=True) if judgement == right}
    assert unseen <= FOLLOW


@pytest.mark.slow
def test_deepspeed_checks_the_product_of_the_batch() -> None:
    keys = config_for("deepspeed")
    (judgement,) = judge("deepspeed", [case_of((), {**keys, "train_batch_size": 500})])
    assert judgement.error is not None and "train_batch_size" in judgement.error


def test_no_clipping_is_a_norm_of_zero() -> None:
    assert config_for("deepspeed", *RUNS[2])["gradient_clipping"] == 0.0


def test_the_command_starts_every_process() -> None:
    script = files_in("deepspeed")["launch.sh"]
    assert "--num_nodes 2" in script and "--num_gpus 8" in script


def lowered(value: object) -> object:
    """Return the value as DeepSpeed normalises the names of optimizers and data types."""
    return (
        {"fp32": "float32", "bf16": "bfloat16"}.get(value.lower(), value.lower()) if isinstance(value, str) else value
    )
