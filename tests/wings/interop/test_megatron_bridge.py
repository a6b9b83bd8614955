"""Megatron-Bridge's module, and what its own checks read in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wings.interop import test_megatron
from wings.interop.emitting import Case, config_for, files_in, judge, mistyped, run_of, translated_for

from trainspec_cli.wings.interop.targets import megatron, megatron_bridge

ENGINE = "megatron-bridge"
FILE = "trainspec_bridge.py"
RUNS = (
    *test_megatron.RUNS,
    (*test_megatron.DATA, "layout.zero_stage=1", "model=qwen3_1_7b", "precision=fp32", "optim.grad_clip_norm=null"),
)


def case_of(run: tuple[str, ...]) -> Case:
    translation = translated_for(ENGINE, *run)
    environment = {name: str(value) for name, value in translation.keys_of("environment").items()}
    return Case(files_in(ENGINE, *run), list(translation.keys_of("config")), about={"environment": environment})


def judged(cases: list[Case]) -> list:
    return judge("megatron_bridge", cases, package="megatron.bridge")


@pytest.mark.slow
def test_megatron_bridge_reads_every_key() -> None:
    for run, judgement in zip(RUNS, judged([case_of(run) for run in RUNS]), strict=True):
        assert judgement.error is None, run
        assert judgement.keys.pop("data_parallel_size") == run_of(*run)["derived.data_parallel_size"], run
        keys = config_for(ENGINE, *run)
        wrong = {key: (one, keys[key]) for key, one in judgement.keys.items() if one != keys[key]}
        assert set(wrong) <= {"model.pipeline_model_parallel_layout"}, run


@pytest.mark.slow
def test_megatron_bridge_refuses_a_mistyped_key() -> None:
    case = case_of(RUNS[2])
    text = case.files[FILE]
    cases = []
    for key in case.keys:
        section, _, name = key.partition(".")
        before, opened, inside = text.partition(f"        {section}={megatron_bridge.CALLS[section]}(\n")
        cases.append(
            replace(case, files={FILE: before + opened + inside.replace(f" {name}=", f" {mistyped(name)}=", 1)})
        )
    accepted = [key for key, one in zip(case.keys, judged(cases), strict=True) if not one.error]
    assert accepted == []


@pytest.mark.slow
def test_megatron_bridge_refuses_a_wrong_batch_and_a_wrong_environment() -> None:
    """It accepts sequence parallelism without tp, and drops it."""
    case, by_fsdp = case_of(RUNS[5]), case_of(RUNS[0])
    text = case.files[FILE]
    cases = [
        replace(case, files={FILE: text.replace("global_batch_size=512", "global_batch_size=500")}),
        replace(by_fsdp, about={"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}),
        replace(
            case,
            files={FILE: text.replace("context_parallel_size=1,", "context_parallel_size=1, sequence_parallel=True,")},
            keys=["model.sequence_parallel"],
        ),
    ]
    batch, environment, dropped = judged(cases)
    assert batch.error and "global_batch_size" in batch.error
    assert environment.error and "CUDA_DEVICE_MAX_CONNECTIONS" in environment.error
    assert (dropped.error, dropped.keys["model.sequence_parallel"]) == (None, False)


def test_every_argument_of_megatron_has_its_field() -> None:
    """Each argument is renamed, or listed as not renamed."""
    arguments = {
        one.theirs
        for one in (*megatron.LINES, *megatron.FIXED)
        if one.theirs.startswith("--") and one.destination == "config"
    }
    assert arguments == set(megatron_bridge.NAMES) | set(megatron_bridge.NOT_RENAMED)
    assert {name.partition(".")[0] for name in megatron_bridge.NAMES.values()} <= set(megatron_bridge.CALLS)


def test_fields_with_the_opposite_meaning_of_their_argument() -> None:
    keys = config_for(ENGINE, *RUNS[5])
    assert (keys["mixed_precision.grad_reduce_in_fp32"], keys["model.share_embeddings_and_output_weights"]) == (
        False,
        True,
    )
    assert config_for(ENGINE, *RUNS[0])["model.share_embeddings_and_output_weights"] is False
    assert keys["scheduler.end_weight_decay"] == keys["optimizer.weight_decay"] == 0.1


def test_the_module_trains_when_it_is_run() -> None:
    files = files_in(ENGINE, *RUNS[0])
    assert 'if __name__ == "__main__":' in files[FILE] and "pretrain(trainspec_run(), forward_step)" in files[FILE]
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in files["launch.sh"] and FILE in files["launch.sh"]
    assert "import torch" not in files_in(ENGINE, *RUNS[6])[FILE]
