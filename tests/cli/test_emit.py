"""`trainspec emit` and `trainspec import`: files, exit codes and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run

PINNED = ("recipe=llama3_8b", "layout=fsdp", "cluster.num_nodes=2", "batching.micro_batch_size=1")


def emit(folder: Path, *others: str, engine: str = "deepspeed") -> int:
    return run(["emit", *PINNED, "--for", engine, "--output", str(folder), *others])


def test_files_are_written_and_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emit(tmp_path / "out") == 0
    assert capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["ds_config.json", "emitted.json", "launch.sh"]
    assert (tmp_path / "out" / "launch.sh").stat().st_mode & 0o111
    assert emit(tmp_path / "out", "--json") == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "output_exists"
    assert emit(tmp_path / "out", "--force", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert {one["theirs"] for one in record["exact"]} >= {"train_batch_size", "zero_optimization.stage"}
    assert all(one["reason"] for one in record["approximate"])
    assert run(["import", str(tmp_path / "out" / "ds_config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["batching.global_batch_size"] == 512


@pytest.mark.parametrize(
    ("others", "engine", "code", "path"),
    [
        (("layout.pp=2",), "deepspeed", "not_said", "layout.pp"),
        ((), "deepsped", "usage", "--for"),
        (("--image", "a", "--volume", "b"), "kuberai", "usage", "--for"),
        (("--image", "a"), "kuberay", "missing_value", "--volume"),
        (("disturb=slow_node",), "deepspeed", "usage", ""),
    ],
)
def test_an_unsupported_request_is_refused_and_writes_nothing(
    others: tuple[str, ...], engine: str, code: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emit(tmp_path / "out", *others, "--json", engine=engine) == 2
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    assert (problem["code"], problem["path"]) == (code, path)
    assert not (tmp_path / "out").exists()


def test_importing_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(tmp_path / "none.json"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "missing_file"
