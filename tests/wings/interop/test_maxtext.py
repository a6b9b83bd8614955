"""MaxText's YAML: what is said and refused, and what its own parser makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from wings.interop.speaking import Case, files_in, judge, mistyped, run_of, spoken_in

from trainspec_cli.wings.interop import TARGETS, listen, read_source

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
"""Says where the others come from."""


def case_of(run: tuple[str, ...], text: str = "") -> Case:
    keys = [key for key in spoken_in("maxtext", *run).keys_of("config") if key not in UNSEEN]
    return Case({"maxtext.yml": text or files_in("maxtext", *run)["maxtext.yml"]}, keys)


@pytest.mark.slow
def test_maxtext_reads_every_key() -> None:
    for run, judgement in zip(RUNS, judge("maxtext", [case_of(run) for run in RUNS]), strict=True):
        assert judgement.error is None, run
        keys = spoken_in("maxtext", *run).keys_of("config")
        assert judgement.keys == {key: keys[key] for key in judgement.keys}, run


@pytest.mark.slow
def test_maxtext_refuses_a_mistyped_key() -> None:
    text = files_in("maxtext", *RUNS[1])["maxtext.yml"]
    keys = case_of(RUNS[1]).keys
    cases = [case_of(RUNS[1], text.replace(f"{key}:", f"{mistyped(key)}:")) for key in keys]
    judged = judge("maxtext", cases)
    assert [key for key, judgement in zip(keys, judged, strict=True) if not judgement.error] == []


@pytest.mark.slow
def test_what_maxtext_takes_without_a_word() -> None:
    """A policy that it does not have, and axes that are not the devices: the table and the plan must be right."""
    text = files_in("maxtext", *RUNS[0])["maxtext.yml"]
    wrong = (
        text.replace("remat_policy: full", "remat_policy: fulll"),
        text.replace("ici_fsdp_parallelism: 8", "ici_fsdp_parallelism: 7"),
    )
    assert [one.error for one in judge("maxtext", [case_of(RUNS[0], one) for one in wrong])] == [None, None]


def test_the_axes_of_a_file_count_its_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.yml"
    file.write_text("ici_fsdp_parallelism: 4\nici_tensor_parallelism: 2\ndcn_data_parallelism: 2\nremat_policy: full\n")
    heard = listen(TARGETS["maxtext"], read_source(file, "maxtext")).values
    assert (heard["layout.dp_shard"], heard["layout.tp"], heard["layout.dp_replicate"]) == (4, 2, 2)
    assert (heard["cluster.num_nodes"], heard["cluster.devices_per_node"]) == (2, 8)


def test_steps_come_back_from_their_fractions() -> None:
    keys = spoken_in("maxtext", *RUNS[1]).keys_of("config")
    run = run_of(*RUNS[1])
    assert (
        int(run.whole("train.max_steps") * float(str(keys["warmup_steps_fraction"])))
        == run["optim.schedule.warmup_steps"]
    )


def test_the_script_tells_each_node_its_rank() -> None:
    script = files_in("maxtext", *RUNS[0])["launch.sh"]
    assert "NODE_RANK" in script and "JAX_COORDINATOR_IP" in script and "NNODES=2" in script
    assert yaml.safe_load(files_in("maxtext", *RUNS[0])["maxtext.yml"])["base_config"] == "base.yml"


def test_every_axis_is_named_since_those_left_out_take_the_devices() -> None:
    for run in RUNS:
        keys = spoken_in("maxtext", *run).keys_of("config")
        sizes = [int(str(size)) for key, size in keys.items() if key.endswith("_parallelism")]
        assert math.prod(sizes) == 16, run
        assert {"ici_fsdp_parallelism", "dcn_data_parallelism"} <= set(keys), run
