"""axolotl's YAML, and what its own parser reads in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from wings.interop.emitting import Case, config_for, files_in, judge, mistyped, run_of

from trainspec_cli.wings.interop import TARGETS, guess_engine, read_back, read_source
from trainspec_cli.wings.interop.targets.axolotl import config_text

MODEL = f"init.from=hf:{Path(__file__).parent / 'llama3_8b'}"
TEXT = (MODEL, "data=jsonl", "data.path=corpus/text.jsonl", "data.seq_len=4096")
CHAT = (MODEL, "data=chat", "data.path=corpus/chat.jsonl", "data.seq_len=4096")
RUNS = (
    (*TEXT, "recompute=full"),
    (*CHAT, "layout.zero_stage=2", "layout.tp=2", "layout.sequence_parallel=false", "optim.schedule.kind=wsd"),
    (*TEXT, "layout.dp_shard=4", "layout.dp_replicate=2", "layout.cp=2", "precision=fp32", "recompute=full"),
    (
        *CHAT,
        "layout=ddp",
        "lora.rank=16",
        "lora.targets=[q,v]",
        "lora.base=nf4",
        "data.chat_template=chatml",
        "data.loss_on=all",
        "train.eval_interval_steps=50",
        "optim.schedule.kind=constant",
    ),
    (
        *TEXT,
        "optim=adamw8bit",
        "optim.grad_clip_norm=null",
        "checkpoint.interval_steps=null",
        "data.source=parquet",
        "precision.compute=tf32",
        "compile=false",
    ),
)


def case_of(run: tuple[str, ...]) -> Case:
    return Case(files_in("axolotl", *run), list(config_for("axolotl", *run)))


@pytest.mark.slow
def test_axolotl_reads_every_key() -> None:
    for run, judgement in zip(RUNS, judge("axolotl", [case_of(run) for run in RUNS]), strict=True):
        assert judgement.error is None, run
        planned = run_of(*run)
        axes = [planned[f"layout.{axis}"] for axis in ("dp_replicate", "dp_shard", "tp", "cp")]
        assert judgement.keys.pop("axes") == axes or planned["derived.is_ddp"], run
        assert judgement.keys.pop("batch_size") == planned["batching.global_batch_size"], run
        assert judgement.keys == config_for("axolotl", *run), run


@pytest.mark.slow
def test_axolotl_does_not_read_a_mistyped_key_as_the_right_one() -> None:
    cases, typos = [], []
    for run in (RUNS[0], RUNS[1], RUNS[3]):
        keys = config_for("axolotl", *run)
        typos.append(keys)
        wrong = [{mistyped_within(key) if key == one else key: value for key, value in keys.items()} for one in keys]
        cases += [case_of(run), *(Case({"axolotl.yml": config_text(one)}, list(keys)) for one in wrong)]
    judged = iter(judge("axolotl", cases))
    unseen: set[str] = set()
    for keys in typos:
        right = next(judged)
        assert right.error is None
        unseen |= {key for key in keys if next(judged) == right}
    assert unseen == DEFAULTS


DEFAULTS = {
    "context_parallel_size",
    "datasets[0].chat_template",
    "gradient_checkpointing",
    "lr_scheduler",
    "micro_batch_size",
    "optimizer",
    "pad_to_sequence_len",
    "tensor_parallel_size",
    "train_on_inputs",
}
"""Keys whose value may equal axolotl's default."""


def mistyped_within(key: str) -> str:
    """Return a key with its last name mistyped; the item of a list that it belongs to stays."""
    before, dot, name = key.rpartition(".")
    return f"{before}{dot}{mistyped(name)}"


@pytest.mark.slow
def test_axolotl_does_not_check_the_name_of_an_optimizer() -> None:
    """Only the table of trainspec guards against a wrong name."""
    text = files_in("axolotl", *RUNS[0])["axolotl.yml"]
    wrong = text.replace("optimizer: adamw_torch_fused", "optimizer: adamw_torch_fusedd")
    (judgement,) = judge("axolotl", [Case({"axolotl.yml": wrong}, ["optimizer"])])
    assert (judgement.error, judgement.keys["optimizer"]) == (None, "adamw_torch_fusedd")


def test_a_users_file_is_read_and_unknown_keys_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "lora.yml"
    file.write_text(
        "base_model: org/model\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nmicro_batch_size: 2\nsequence_len: 2048\n"
        "datasets:\n- path: chat.jsonl\n  type: chat_template\n  roles_to_train: [assistant]\n- path: more.jsonl\n"
    )
    found = read_back(TARGETS["axolotl"], read_source(file, guess_engine(file)))
    assert (found.values["init.from"], found.values["lora.rank"], found.values["data.source"]) == (
        "hf:org/model",
        8,
        "chat",
    )
    assert set(found.unread) == {"datasets[0].roles_to_train[0]", "datasets[1].path"}


def test_the_script_starts_the_planned_processes() -> None:
    script = files_in("axolotl", *RUNS[0])["launch.sh"]
    assert "--nnodes 2 --nproc-per-node 8" in script and "-m axolotl.cli.train" in script


def test_values_that_axolotl_names_differently() -> None:
    by_stage = [config_for("axolotl", *run)["fsdp_config.reshard_after_forward"] for run in RUNS[:2]]
    assert by_stage == [True, False]
    keys = config_for("axolotl", *RUNS[1])
    assert keys["lr_scheduler_kwargs.num_decay_steps"] == round(0.2 * int(str(keys["max_steps"])))
    adapted = config_for("axolotl", *RUNS[3])
    assert adapted["lora_target_modules"] == ["q_proj", "v_proj"] and adapted["adapter"] == "qlora"
    assert (adapted["train_on_inputs"], adapted["bf16"], "fsdp_version" in adapted) == (True, True, False)


def test_the_mesh_has_as_many_devices_as_the_run() -> None:
    keys = config_for("axolotl", *RUNS[2])
    axes = ("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "context_parallel_size")
    assert math.prod(int(str(keys[axis])) for axis in axes) == 16
    assert yaml.safe_load(files_in("axolotl", *RUNS[2])["axolotl.yml"])["datasets"] == [
        {"path": "corpus/text.jsonl", "ds_type": "json", "field": "text", "type": "completion"}
    ]
