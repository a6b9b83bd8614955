"""Whole runs of a model of transformers: killed and resumed to the bit, and exported to a folder that transformers
reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from integration.conftest import Trainspec
from lab.transformers_models import written

from trainspec_cli import read_weights

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

VOCABULARY = 512
RECIPE = (
    *("recipe=tiny", "model=hf:folder", "model.backend=transformers", "precision=fp32", "train.max_steps=8"),
    *("cluster.devices_per_node=2", "layout.dp_shard=2", "recompute=full", "checkpoint.interval_steps=3"),
)


def test_a_killed_run_ends_as_a_whole_one_and_its_export_is_read_to_the_byte(
    trainspec: Trainspec, tmp_path: Path
) -> None:
    written("gptj", tmp_path / "folder", VOCABULARY)
    for run, *more in (("whole",), ("killed", "fault=kill(rank=1,step=5)")):
        ended = trainspec("launch", *RECIPE, f"run.dir={run}", *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    digests = {
        json.loads((tmp_path / run / "result.json").read_text())["weights_sha256"] for run in ("whole", "killed")
    }
    assert len(digests) == 1
    ended = trainspec("export", "whole", "--output", "exported")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    weights = read_weights(tmp_path / "whole")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", local_files_only=True).state_dict()
    assert {name.removeprefix("module.") for name in weights} == set(read)
    assert all((read[name.removeprefix("module.")] == tensor).all() for name, tensor in weights.items())
    transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)


def test_adapters_are_merged_and_written_for_peft(trainspec: Trainspec, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    written("gptj", tmp_path / "folder", VOCABULARY)
    ended = trainspec("launch", *RECIPE, "lora.rank=4", "lora.targets=[q_proj,fc_in]", "run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for form in ("hf", "peft"):
        ended = trainspec("export", "run", "--output", form, "--format", form)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft", local_files_only=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True)
    tokens = torch.arange(32)[None]
    logits = [model.eval()(tokens).logits for model in (merged, adapted, base)]
    assert torch.allclose(logits[0], logits[1], rtol=0.0, atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], rtol=0.0, atol=1e-5)
