"""`trainspec emit` and `trainspec import`: files, exit codes, and what is printed."""

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
    assert "not carried" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["ds_config.json", "emitted.json", "launch.sh"]
    assert (tmp_path / "out" / "launch.sh").stat().st_mode & 0o111
    assert emit(tmp_path / "out") == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert emit(tmp_path / "out", "--force", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert {one["theirs"] for one in record["exact"]} >= {"train_batch_size", "zero_optimization.stage"}
    assert all(one["reason"] for one in record["approximate"])
    assert run(["import", str(tmp_path / "out" / "ds_config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["batching.global_batch_size"] == 512


@pytest.mark.parametrize(
    ("others", "engine", "said"),
    [
        (("layout.pp=2",), "deepspeed", "`layout.pp` is 2, which DeepSpeed cannot say"),
        ((), "deepsped", "type --for deepspeed"),
        (("disturb=slow_node",), "deepspeed", "leave it out"),
    ],
)
def test_what_cannot_be_said_ends_with_2(
    others: tuple[str, ...], engine: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emit(tmp_path / "out", *others, engine=engine) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
