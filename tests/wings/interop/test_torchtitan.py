"""torchtitan's module, and what torchtitan's own parser reads in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wings.interop.emitting import Case, config_for, files_in, judge, mistyped, run_of

from trainspec_cli.wings.interop.targets.torchtitan import FLAVORS

RUNS = (
    (),
    ("layout.pp=2", "layout.pipeline_schedule=1f1b", "layout.zero_stage=2", "recompute=selective"),
    ("layout.tp=4", "layout.cp=2", "recompute=full", "optim.schedule.kind=wsd", "checkpoint.mode=sync"),
    ("layout.dp_shard=8", "layout.dp_replicate=2", "optim.schedule.kind=constant", "compile=false"),
    ("model=qwen3_1_7b", "checkpoint.interval_steps=null", "precision=fp32", "recompute=full"),
)
NAMED = ("model", "activation_checkpoint")
"""Keys that are calls in the module."""
RECOMPUTES = {None: None, "full": "FullAC.Config", "selective": "SelectiveAC.Config"}


def case_of(*run: str) -> Case:
    keys = config_for("torchtitan", *run)
    return Case(files_in("torchtitan", *run), [key for key in keys if key not in NAMED])


@pytest.mark.slow
def test_torchtitan_reads_every_key() -> None:
    for run, judgement in zip(RUNS, judge("torchtitan", [case_of(*run) for run in RUNS]), strict=True):
        assert judgement.error is None
        keys = config_for("torchtitan", *run)
        sizes = [run_of(*run)[f"model.{size}"] for size in ("num_layers", "hidden_size", "vocab_size")]
        recompute = RECOMPUTES[keys.pop("activation_checkpoint")]  # type: ignore[index]
        del keys["model"]
        assert judgement.keys == {**keys, "activation_checkpoint": recompute, "sizes": sizes}


@pytest.mark.slow
def test_torchtitan_refuses_a_mistyped_key() -> None:
    case = case_of(*RUNS[1])
    text = case.files["trainspec_run.py"]
    names = {key: key.rpartition(".")[2].partition("[")[0] for key in case.keys}
    cases = [
        replace(case, files={"trainspec_run.py": text.replace(f" {name}=", f" {mistyped(name)}=")})
        for name in names.values()
    ]
    accepted = [key for key, one in zip(names, judge("torchtitan", cases), strict=True) if not one.error]
    assert [key for key in accepted if not key.startswith("optimizer.")] == []


@pytest.mark.slow
def test_the_sizes_of_the_table_are_those_of_the_registry() -> None:
    text = files_in("torchtitan")["trainspec_run.py"]
    cases = []
    for name in FLAVORS:
        family, _, size = name.partition(".")
        named = text.replace("models.llama3 ", f"models.{family} ").replace(
            "model_registry('8B')", f"model_registry('{size}')"
        )
        cases.append(Case({"trainspec_run.py": named}, []))
    for (name, sizes), judgement in zip(FLAVORS.items(), judge("torchtitan", cases), strict=True):
        assert judgement.error is None, name
        assert judgement.keys["sizes"] == [sizes[key] for key in ("num_layers", "hidden_size", "vocab_size")], name


def test_a_pipeline_gets_the_whole_batch_of_a_rank() -> None:
    keys = config_for("torchtitan", *RUNS[1])
    assert keys["training.local_batch_size"] == 512 // 8
    assert keys["parallelism.pipeline_parallel_microbatch_size"] == 1
