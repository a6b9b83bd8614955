"""Megatron-LM's arguments, and what its own parser reads in them."""

from __future__ import annotations

import shlex

import pytest
from wings.interop.emitting import Case, config_for, files_in, judge, mistyped, translated_for

from trainspec_cli.wings.interop import options

DATA = ("data=megatron", "data.path=corpus/text.bin", "data.seq_len=8192", "checkpoint.mode=sync")
RUNS = (
    (*DATA, "recompute=selective"),
    (*DATA, "layout.zero_stage=2", "recompute=full", "optim.schedule.kind=wsd"),
    (*DATA, "layout.zero_stage=1", "layout.tp=4", "layout.pp=2", "layout.pipeline_schedule=1f1b"),
    (*DATA, "layout.zero_stage=1", "layout.cp=2", "layout.context_method=ulysses", "model=qwen3_1_7b"),
    (
        *DATA,
        "layout.zero_stage=1",
        "layout.dp_replicate=2",
        "layout.dp_shard=8",
        "optim.schedule.kind=constant",
        "model=qwen3_1_7b",
    ),
    (
        *DATA,
        "model=qwen3_1_7b",
        "layout.dp_shard=1",
        "layout.dp_replicate=16",
        "precision.reduce=bf16",
        "recompute=full",
    ),
)
OTHER_FORM = {
    "--disable-bias-linear": False,
    "--group-query-attention": True,
    "--data-path": ["corpus/text"],
    "--cp-comm-type": ["a2a"],
}
"""Keys whose value has another form after Megatron has read it."""


def case_of(run: tuple[str, ...], change: tuple[str, str] | None = None) -> Case:
    translation = translated_for("megatron", *run)
    keys = translation.keys_of("config")
    words = shlex.split(
        " ".join(options({change[1] if change and key == change[0] else key: value for key, value in keys.items()}))
    )
    environment = {name: str(value) for name, value in translation.keys_of("environment").items()}
    return Case({}, list(keys), about={"words": words, "environment": environment})


@pytest.mark.slow
def test_megatron_reads_every_key() -> None:
    judged = judge("megatron", [case_of(run) for run in RUNS], package="megatron.training")
    for run, judgement in zip(RUNS, judged, strict=True):
        assert judgement.error is None, run
        keys = {**config_for("megatron", *run)}
        wanted = {key: OTHER_FORM.get(key, value) for key, value in keys.items()}
        assert {key: one for key, one in judgement.keys.items() if not matches(one, wanted[key])} == {}, run


@pytest.mark.slow
def test_megatron_refuses_a_mistyped_key() -> None:
    keys = [key for key, value in config_for("megatron", *RUNS[2]).items() if value not in (False, None)]
    cases = [case_of(RUNS[2], (key, mistyped(key))) for key in keys]
    judged = judge("megatron", cases, package="megatron.training")
    assert [key for key, judgement in zip(keys, judged, strict=True) if not judgement.error] == []


@pytest.mark.slow
def test_megatron_needs_the_emitted_environment() -> None:
    case = case_of(RUNS[2])
    wrong = Case({}, [], about={**case.about, "environment": {}})
    (judgement,) = judge("megatron", [wrong], package="megatron.training")
    assert judgement.error is not None and "CUDA_DEVICE_MAX_CONNECTIONS" in judgement.error


def test_only_tp_and_cp_without_fsdp_need_ordered_launches() -> None:
    serial = [translated_for("megatron", *run).keys_of("environment") for run in RUNS]
    assert [bool(one) for one in serial] == [False, False, True, True, False, False]
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in files_in("megatron", *RUNS[0])["pretrain.sh"]


def test_the_layers_of_each_stage_are_emitted() -> None:
    layout = str(config_for("megatron", *RUNS[2])["--pipeline-model-parallel-layout"])
    stages = [int(stage.strip("EtL*")) for stage in layout.split("|")]
    assert len(stages) == 2 and sum(stages) == 32


def test_values_that_megatron_counts_differently() -> None:
    keys = config_for("megatron", *RUNS[1])
    assert keys["--min-lr"] == pytest.approx(3e-5)
    assert keys["--split"] == "98,2,0"
    assert keys["--seed"] == 1


def matches(one: object, wanted: object) -> bool:
    return one == wanted or (wanted is False and one is None) or str(one) == str(wanted)
