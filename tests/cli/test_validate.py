from __future__ import annotations

import json

import pytest
from lab.gpus.machines import play

from trainspec_cli.__main__ import run

EVERYTHING_WRONG = """\
defaults:
  - override /data: text
  - override /cluster: cpu

train:
  max_steps: four
  sed: 3
batching:
  global_batch_size: 7.5
optim:
  schedule:
    kind: cosin
layout:
  dp_shard: 3
data:
  path: nothere.txt
"""


def errors(capsys, *arguments: str) -> tuple[int, list[dict]]:
    code = run(["validate", "--here", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["errors"]


def test_a_sound_recipe(capsys) -> None:
    assert run(["validate", "recipe=tiny", "precision=fp32", "train.max_steps=1e3"]) == 0
    told = capsys.readouterr().out
    for fact in ("llama_tiny, 152k", "1000 steps of 8 x 64", "(512k", "2 x cpu in fp32\n"):
        assert fact in told
    assert errors(capsys, "recipe=quickstart") == (0, [])


@pytest.mark.parametrize("command", ["validate", "plan", "launch"])
def test_every_command_counts_the_parameters_of_a_fine_tune_alike(capsys, command: str) -> None:
    """The model's and the adapters', and how many of them are trained."""
    cluster = "cluster=h100" if command == "plan" else "cluster=cpu"
    more = ["--dry-run"] if command == "launch" else []
    assert run([command, "recipe=tiny", "lora.rank=64", cluster, *more]) == 0
    assert "llama_tiny, 295k parameters, 143k" in capsys.readouterr().out


@pytest.mark.clause("LAUNCH-1")
def test_every_fault_at_once_with_its_place(capsys, write) -> None:
    write("recipes/mine.yaml", EVERYTHING_WRONG)
    code, found = errors(capsys, "recipe=mine", "+foo=1", "optim.lr=1", "optim.lr=2", "compile=yes")
    assert code == 2
    assert [(e["code"], e["path"], f"{e['file']}:{e['line']}:{e['column']}") for e in found] == [
        ("unknown_key", "foo", "command line:2:None"),
        ("duplicate_override", "optim.lr", "command line:4:None"),
        ("wrong_type", "compile", "command line:5:None"),
        ("wrong_type", "train.max_steps", "recipes/mine.yaml:6:3"),
        ("unknown_key", "train.sed", "recipes/mine.yaml:7:3"),
        ("wrong_type", "batching.global_batch_size", "recipes/mine.yaml:9:3"),
        ("wrong_choice", "optim.schedule.kind", "recipes/mine.yaml:12:5"),
        ("not_divisible", "layout.dp_shard", "recipes/mine.yaml:14:3"),
        ("missing_file", "data.path", "recipes/mine.yaml:16:3"),
    ]
    assert set(found[0]) == {"code", "path", "message", "hint", "file", "line", "column"}


def test_for_people_with_the_line_it_stands_in(capsys, write) -> None:
    write("recipes/mine.yaml", "batching: {global_batch_size: 8}\ntrain:\n  max_steps: four\n")
    assert run(["validate", "recipe=mine", "optim.lrr=3", "cluster=cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: unknown key `optim.lrr`\n"
        "  --> command line:2\n"
        "    2 | optim.lrr=3\n"
        "      | ^^^^^^^^^^^\n"
        "  hint: did you mean `optim.lr`?\n"
        "\n"
        "error: `train.max_steps` is 'four'; expected a whole number\n"
        "  --> recipes/mine.yaml:3:3\n"
        "    3 |   max_steps: four\n"
        "      |   ^^^^^^^^^^^^^^^\n"
        "  hint: set train.max_steps=<a whole number>\n"
        "\n"
        "2 problems\n"
    )


def test_what_is_open_is_named_with_the_file_that_leaves_it_open(capsys, write) -> None:
    write("recipes/mine.yaml", "train: {seed: 1}\n")
    code, found = errors(capsys, "recipe=mine", "data=text")
    assert (code, [(e["code"], e["path"]) for e in found]) == (
        2,
        [("missing_value", path) for path in ("batching.global_batch_size", "data.path", "train.max_steps")],
    )
    assert [e["file"].rpartition("/conf/")[2] for e in found] == [
        "batching/default.yaml", "data/text.yaml", "trainspec.yaml",
    ]  # fmt: skip


@pytest.mark.clause("LAUNCH-1")
def test_what_follows_from_another_fault_is_not_told(capsys, write) -> None:
    """Neither values that an unknown recipe would have given, nor rules on an option that stands in for another."""
    assert [e["code"] for e in errors(capsys, "recipe=tinny")[1]] == ["unknown_recipe"]
    assert [e["code"] for e in errors(capsys, "recipe=tiny", "data=jsnl", "data.path=x")[1]] == ["unknown_option"]
    write("conf/model/bare.yaml", "name: bare\n")
    paths = [e["path"] for e in errors(capsys, "recipe=tiny", "model=bare")[1]]
    assert "model.vocab_size" in paths
    assert "data.tokenizer.vocab_size" not in paths


def test_a_broken_file_does_not_hide_the_command_lines_faults(capsys, write) -> None:
    write("recipes/mine.yaml", "train:\n\tmax_steps: 3\n")
    code, found = errors(capsys, "recipe=mine", "optim.lrr=3", "layout.tp=two")
    assert (code, [(e["code"], e["line"], e["column"]) for e in found]) == (
        2, [("unknown_key", 2, None), ("wrong_type", 3, None), ("bad_yaml", 2, 1)],
    )  # fmt: skip


def test_a_gpu_that_lacks_is_the_machines_fault(capsys, monkeypatch) -> None:
    play("no_library", monkeypatch)
    code, (error,) = errors(capsys, "recipe=tiny", "cluster.device=cuda")
    assert (code, error["code"], error["path"], error["line"]) == (4, "no_gpu", "cluster.device", 2)
    code, found = errors(capsys, "recipe=tiny", "cluster.device=cuda", "optim.lr=x")
    assert (code, [e["code"] for e in found]) == (2, ["wrong_type", "no_gpu"])


def test_what_only_the_plan_can_see_has_its_place_too(capsys) -> None:
    code, (error,) = errors(capsys, "recipe=tiny", "layout=fsdp", "layout.dp_shard=1", "layout.cp=auto")
    assert (code, error["code"], error["path"].split(".")[0]) == (2, "not_divisible", "layout")
    assert error["file"] is not None


NOISY = """\
batching:
  global_batch_size: 8
  schedule:
    kind: noise
    max_global_batch_size: 64
train: {max_steps: 4}
layout: {dp_shard: 1, tp: 2}
cluster: {device: cpu, devices_per_node: 2}
"""


def test_a_noise_that_the_layout_hides_is_named_with_its_line(capsys, write) -> None:
    write(
        "recipes/mine.yaml", f"defaults:\n  - override /model: llama_tiny\n  - override /data: python_stdlib\n{NOISY}"
    )
    code, (found,) = errors(capsys, "recipe=mine")
    assert (code, found["code"], found["path"]) == (2, "unsupported", "batching.schedule.kind")
    assert f"{found['file']}:{found['line']}" == "recipes/mine.yaml:7"
    assert "data-parallel ranks" in found["message"]
    assert "cluster.devices_per_node=2" in found["hint"]
    assert errors(capsys, "recipe=mine", "layout.tp=1", "layout.dp_shard=2") == (0, [])


def test_data_that_cannot_be_read_is_no_valid_recipe(capsys, write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"text": "a"}\n{"messages": 7}\n')
    data = ("data=chat", "data.path=chat.jsonl", "data.chat_template=chatml")
    code, found = errors(capsys, "recipe=tiny", *data)
    assert (code, [(error["file"], error["line"]) for error in found]) == (2, [("chat.jsonl", 1), ("chat.jsonl", 2)])
    (tmp_path / "tokens").mkdir()
    code, found = errors(capsys, "recipe=tiny", "data=tokens", "data.path=tokens")
    assert (code, [error["path"] for error in found]) == (2, ["data.path"])
    (tmp_path / "some.txt").write_text("some text " * 1000)
    assert errors(capsys, "recipe=tiny", "data=text", "data.path=some.txt") == (0, [])


def test_the_format_of_conversations_is_told(capsys, write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "more.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert run(["validate", "recipe=tiny", "data=chat", "data.path='*.jsonl'", "data.chat_template=chatml"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(": completions and Alpaca")


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("data.path", ["data=jsonl"]),
        ("data.tokenizer.path", []),
        ("init.from", ["model=auto"]),
        ("run.dir", []),
    ],
)
def test_remote_paths_are_named_as_remote(capsys, key: str, more: list[str]) -> None:
    code, found = errors(capsys, "recipe=tiny", *more, f"{key}=s3://bucket/x.jsonl")
    (error,) = [one for one in found if one["path"] == key]
    assert code == 2
    assert "copy it" in error["hint"] and "set data.path=<" not in error["hint"]


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (["cluster=h100"], "8 x cuda in bf16"),
        (["cluster=h100", "precision=fp8", "compile=true"], "8 x cuda in bf16"),
        (["cluster.device=cuda", "cluster.devices_per_node=4"], "4 x cuda in bf16"),
        (["cluster=auto", "cluster.device=cuda"], "its layout will be"),
    ],
)
def test_a_recipe_for_another_machine_is_checked_without_this_one(capsys, monkeypatch, cluster, says) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "")  # no compiler
    recipe = ["recipe=tiny", "batching.global_batch_size=16", *cluster]
    assert run(["validate", *recipe]) == 0
    assert says in capsys.readouterr().out
    assert run(["validate", "--json", *recipe]) == 0 and json.loads(capsys.readouterr().out) == {"errors": []}
    assert run(["validate", *recipe, "layout.dp_shard=3"]) == (0 if "layout" in says else 2)
    capsys.readouterr()
    code, found = errors(capsys, *recipe)
    assert code == 4 and found[0]["code"] == "no_gpu"
