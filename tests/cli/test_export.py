"""`trainspec export`: what it reports; what it writes is tested by tests/launch and tests/integration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli import __main__
from trainspec_cli.cli import export
from trainspec_cli.data.huggingface.safetensors import ADAPTER_CONFIG, ADAPTERS
from trainspec_cli.run.exporting import Export
from trainspec_cli.run.folder.paths import RunDir

WEIGHTS = {"model-00001-of-00002.safetensors": 3 * 2**20, "model-00002-of-00002.safetensors": 2**20}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Export]:
    """Exports of a run with a checkpoint of step 7; each writes two files of weights and two others."""
    asked: list[Export] = []

    def write(wanted: Export, output: Path, *_: str) -> str:
        asked.append(wanted)
        output.mkdir()
        for name, size in {**WEIGHTS, "config.json": 11, "tokenizer.json": 2**20}.items():
            (output / name).write_bytes(b"x" * size)
        return "weights"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "find_own_run", lambda run: RunDir(tmp_path / run))
    monkeypatch.setattr(export, "find_checkpoint", lambda run_dir, step, best: step or 7)
    monkeypatch.setattr(export, "write_folder", write)
    return asked


def test_the_report_counts_the_files_of_weights(
    exported: list[Export], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert __main__.run(["export", "one", "--output", "out"]) == 0
    (wanted,) = exported
    assert (wanted.run.root, wanted.step, wanted.dtype) == (tmp_path / "one", 7, "fp32")
    assert wanted.max_file_bytes == 5_000_000_000
    assert capsys.readouterr().out.startswith("out: weights of step 7, 4.00 MiB in 2 ")


def test_the_report_counts_adapters_too(
    exported: list[Export], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(wanted: Export, output: Path) -> str:
        output.mkdir()
        (output / ADAPTERS).write_bytes(b"x" * 2**20)
        (output / ADAPTER_CONFIG).write_bytes(b"x" * 11)
        return "adapters"

    monkeypatch.setattr(export, "write_adapters", write)
    assert __main__.run(["export", "one", "--output", "out", "--format", "peft"]) == 0
    assert exported == []
    counted, loaded = capsys.readouterr().out.splitlines()
    assert counted.startswith("out: adapters of step 7, 1.00 MiB in 1 ")
    assert loaded.endswith("AutoPeftModelForCausalLM.from_pretrained('out')")


def test_the_report_as_json(exported: list[Export], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--step", "3", "--dtype", "bf16", "--max-file-gb", "0.5", "--json")
    assert __main__.run(["export", "one", "--output", "out", *options]) == 0
    (wanted,) = exported
    assert (wanted.step, wanted.dtype, wanted.max_file_bytes) == (3, "bf16", 500_000_000)
    assert json.loads(capsys.readouterr().out) == {
        "path": "out",
        "step": 3,
        "what": "weights",
        "files": 2,
        "bytes": sum(WEIGHTS.values()),
    }


def test_how_the_folder_is_loaded_is_said(exported: list[Export], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["export", "one", "--output", "it's"]) == 0
    assert 'from_pretrained("it\'s")' in capsys.readouterr().out.splitlines()[1]
