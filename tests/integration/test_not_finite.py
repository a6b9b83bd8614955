"""Weights and losses that are not finite end a run as failed, and leave nothing but valid JSON behind."""

import json

import pytest

from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir

TINY = ("recipe=tiny", "checkpoint.interval_steps=null", "data.max_bytes=100000", "run.dir=run")
DIVERGING = (*TINY, "cluster.devices_per_node=1", "optim.lr=1e30", "optim.grad_clip_norm=null")


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check_all_json(folder):
    """-> how many files were read; those of the generations are marks, and empty."""
    files = [file for file in folder.rglob("*.json") if file.parent != RunDir(folder).generation(1).parent]
    for file in files:
        strict(file.read_text())
    events = list(folder.rglob("*.jsonl"))
    for file in events:
        for line in file.read_text().splitlines():
            strict(line)
    return len(files) + len(events)


def plant(file, name, *values):
    """The first values of a tensor of a safetensors file become `values`."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(file)
    for place, value in enumerate(values):
        tensors[name].view(-1)[place] = value
    safetensors.save_file(tensors, file)


@pytest.mark.slow
def test_nan_in_a_checkpoint_to_begin_with_is_refused_by_all_ranks_alike(trainspec, hf_folder, tmp_path):
    folder = hf_folder("qwen3", max_shard_size="40KB")
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / read_json(folder / "model.safetensors.index.json")["weight_map"][name]
    plant(file, name, float("nan"), float("inf"), float("nan"))
    launched = trainspec(
        "launch", *TINY, "model=auto", f"init.from=hf:{folder}", "cluster.devices_per_node=2", "layout=fsdp", "--force"
    )
    assert launched.returncode == 4, launched.stdout + launched.stderr
    found = f": 3 of 1,536 in {name} ({file.name})"
    assert found in launched.stderr
    assert "download it again" in launched.stderr
    assert "Traceback" not in launched.stdout + launched.stderr
    run = RunDir(tmp_path / "run")
    first, second = (read_json(run.error(rank)) for rank in (0, 1))
    assert first["message"] == second["message"] and first["message"].endswith(found)
    assert (read_json(run.result_json)["status"], read_json(run.result_json)["exit_code"]) == ("failed", 4)
    assert check_all_json(tmp_path / "run") > 5


@pytest.mark.slow
def test_a_run_that_has_diverged_is_not_done(trainspec, tmp_path):
    launched = trainspec("launch", *DIVERGING, "train.max_steps=4", "--json")
    assert launched.returncode == 5, launched.stdout + launched.stderr
    (problem,) = strict(launched.stdout)["errors"]
    assert problem["code"] == "not_finite" and " 3 of 4 steps, " in problem["message"]
    assert "optim.lr" in problem["hint"]
    run = RunDir(tmp_path / "run")
    assert check_all_json(run.root) > 5
    result = strict(run.result_json.read_text())
    assert (result["status"], result["exit_code"], result["steps"]) == ("failed", 5, 4)
    steps = [event for line in run.events(0).read_text().splitlines() if (event := strict(line))["type"] == "step"]
    assert [event["skipped"] for event in steps] == [False, True, True, True]
    assert [event["grad_norm"] is None for event in steps] == [False, True, True, True]
    assert run.checkpoint_steps() == []

    report = strict(trainspec("report", "run", "--json").stdout)
    assert (report["status"], report["skipped_steps"]) == ("failed", [2, 3, 4])
    assert [value is None for _, value in report["grad_norm"]] == [False, True, True, True]


@pytest.mark.slow
def test_as_many_skipped_steps_as_the_recipe_allows_end_the_run(trainspec, tmp_path):
    launched = trainspec("launch", *DIVERGING, "train.max_steps=20", "train.max_skipped_steps=2")
    assert launched.returncode == 5
    for fact in ("for 2 steps", "up to step 3", "no checkpoint"):
        assert fact in launched.stderr
    assert read_json(tmp_path / "run/result.json")["steps"] == 3
