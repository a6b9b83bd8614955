"""The Trainer's arguments, and what transformers' own parser reads in them."""

from __future__ import annotations

import json

import pytest
import yaml
from wings.interop.emitting import Case, config_for, each_mistyped, files_in, judge

from trainspec_cli.wings.interop import nest

RUNS = (
    (),
    ("optim.schedule.kind=wsd", "optim=adamw8bit", "recompute=full", "train.eval_interval_steps=50"),
    ("optim.schedule.kind=constant", "optim.grad_clip_norm=null", "checkpoint.interval_steps=null", "precision=fp32"),
)
ON_CPU = {"use_cpu": True, "bf16": False, "output_dir": "output"}
"""Overrides for a machine without GPUs."""


@pytest.mark.slow
def test_transformers_reads_every_key() -> None:
    configs = [config_for("transformers", *run) for run in RUNS]
    cases = [
        Case(files_in("transformers", *run), list(keys), about=ON_CPU) for run, keys in zip(RUNS, configs, strict=True)
    ]
    for keys, judgement in zip(configs, judge("transformers", cases), strict=True):
        assert judgement.error is None
        assert judgement.keys == {**keys, **{key: value for key, value in ON_CPU.items() if key in keys}}


@pytest.mark.slow
def test_transformers_refuses_a_mistyped_key() -> None:
    keys = config_for("transformers")
    top = [key for key in keys if "." not in key]
    wrong = each_mistyped(keys, top)
    cases = [Case({"training_args.json": json.dumps(nest(one))}, [], about=ON_CPU) for one in wrong]
    assert [key for key, one in zip(top, judge("transformers", cases), strict=True) if not one.error] == []


def test_accelerate_starts_the_trainer() -> None:
    files = files_in("transformers", "layout.zero_stage=2", "recompute=full")
    launcher = yaml.safe_load(files["accelerate.yaml"])
    assert launcher["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert "fsdp_activation_checkpointing" not in launcher["fsdp_config"]
    assert json.loads(files["training_args.json"])["gradient_checkpointing"] is True


def test_the_steps_of_a_decay_are_counted() -> None:
    keys = config_for("transformers", *RUNS[1])
    assert keys["lr_scheduler_kwargs.num_decay_steps"] == round(0.2 * int(str(keys["max_steps"])))
