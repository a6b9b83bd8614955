"""MaxText's YAML, and what its own parser reads in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from wings.interop.emitting import Case, config_for, files_in, judge, mistyped, run_of

from trainspec_cli.wings.interop import TARGETS, read_back, read_source

DATA = (
    *("data=megatron", "data.path=corpus/text.bin", "data.seq_len=8192"),
    "train.eval_interval_steps=null",
)
RUNS = (
    (*DATA, "recompute=full"),
    (*DATA, "layout.zero_stage=1", "layout.tp=4", "recompute=selective", "optim.schedule.kind=wsd"),
    (
        *DATA,
        "layout.dp_shard=4",
        "layout.dp_replicate=2",
        "recompute=full",
        "layout.tp=2",
        "layout.sequence_parallel=false",
    ),
    (
        *DATA,
        "recompute=full",
        "model=qwen3_1_7b",
        "layout.dp_shard=1",
        "layout.dp_replicate=16",
        "optim.schedule.kind=constant",
    ),
    (*DATA, "recompute=full", "layout.cp=2", "precision=fp32", "optim.grad_clip_norm=null", "checkpoint.mode=sync"),
)
UNSEEN = ("base_config",)
"""The file with defaults for all other keys."""


def case_of(run: tuple[str, ...], text: str = "") -> Case:
    keys = [key for key in config_for("maxtext", *run) if key not in UNSEEN]
    return Case({"maxtext.yml": text or files_in("maxtext", *run)["maxtext.yml"]}, keys)


@pytest.mark.slow
def test_maxtext_reads_every_key() -> None:
    for run, judgement in zip(RUNS, judge("maxtext", [case_of(run) for run in RUNS]), strict=True):
        assert judgement.error is None, run
        keys = config_for("maxtext", *run)
        assert judgement.keys == {key: keys[key] for key in judgement.keys}, run


@pytest.mark.slow
def test_maxtext_refuses_a_mistyped_key() -> None:
    text = files_in("maxtext", *RUNS[1])["maxtext.yml"]
    keys = case_of(RUNS[1]).keys
    cases = [case_of(RUNS[1], text.replace(f"{key}:", f"{mistyped(key)}:")) for key in keys]
    judged = judge("maxtext", cases)
    assert [key for key, judgement in zip(keys, judged, strict=True) if not judgement.error] == []


@pytest.mark.slow
def test_maxtext_does_not_check_policies_and_axes() -> None:
    """It accepts an unknown policy, and axes that do not match the devices: the table and the plan must be right."""
    text = files_in("maxtext", *RUNS[0])["maxtext.yml"]
    wrong = (
        text.replace("remat_policy: full", "remat_policy: fulll"),
        text.replace("ici_fsdp_parallelism: 8", "ici_fsdp_parallelism: 7"),
    )
    assert [one.error for one in judge("maxtext", [case_of(RUNS[0], one) for one in wrong])] == [None, None]


def test_the_axes_of_a_file_determine_its_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.yml"
    file.write_text("ici_fsdp_parallelism: 4\nici_tensor_parallelism: 2\ndcn_data_parallelism: 2\nremat_policy: full\n")
    found = read_back(TARGETS["maxtext"], read_source(file, "maxtext")).values
    assert (found["layout.dp_shard"], found["layout.tp"], found["layout.dp_replicate"]) == (4, 2, 2)
    assert (found["cluster.num_nodes"], found["cluster.devices_per_node"]) == (2, 8)


def test_fractions_give_the_planned_steps() -> None:
    keys = config_for("maxtext", *RUNS[1])
    run = run_of(*RUNS[1])
    assert (
        int(run.whole("train.max_steps") * float(str(keys["warmup_steps_fraction"])))
        == run["optim.schedule.warmup_steps"]
    )


def test_the_script_gives_each_node_its_rank() -> None:
    script = files_in("maxtext", *RUNS[0])["launch.sh"]
    assert "NODE_RANK" in script and "JAX_COORDINATOR_IP" in script and "NNODES=2" in script
    assert yaml.safe_load(files_in("maxtext", *RUNS[0])["maxtext.yml"])["base_config"] == "base.yml"


def test_every_axis_is_written_because_missing_ones_take_all_devices() -> None:
    for run in RUNS:
        keys = config_for("maxtext", *run)
        sizes = [int(str(size)) for key, size in keys.items() if key.endswith("_parallelism")]
        assert math.prod(sizes) == 16, run
        assert {"ici_fsdp_parallelism", "dcn_data_parallelism"} <= set(keys), run
