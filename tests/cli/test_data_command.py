from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainspec_cli.cli.data import app
from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.errors import MachineError, RecipeError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"the quick brown fox {number} jumps over the lazy dog\n" * 5)
    return folder


def run(*arguments: object) -> str:
    """What is printed; errors for people are raised as they are."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_prepare_writes_a_token_folder_and_says_what_to_type_next(texts, tmp_path):
    output = tmp_path / "my tokens"
    printed = run("prepare", "--source", "text", "--path", texts, "--output", output, "--vocab-size", 400)
    manifest = TokenFolder.open(output).manifest
    assert manifest.train.documents + manifest.heldout.documents == 40
    assert f"{manifest.train.documents} documents" in printed
    assert f"{manifest.bytes_per_token:.3f}" in printed
    assert f"{manifest.xz_bits_per_byte:.3f} bits per byte" in printed
    assert "too small to fill the 400 asked for" in printed
    assert f"trainspec launch recipe=quickstart data=tokens data.path='{output}'" in printed


def test_json_is_the_manifest_and_nothing_else(texts, tmp_path):
    printed = run("prepare", "--source", "text", "--path", texts, "--output", tmp_path / "out", "--json")
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert json.loads(printed) == {"path": str(tmp_path / "out"), **stored}
    assert json.loads(run("info", tmp_path / "out", "--json")) == json.loads(printed)


def test_info_shows_what_prepare_showed_and_verifies(texts, tmp_path):
    printed = run("prepare", "--source", "text", "--path", texts, "--output", tmp_path / "out")
    assert run("info", tmp_path / "out", "--verify") == printed
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(MachineError, match=r"tokenizer\.json was altered"):
        run("info", tmp_path / "out", "--verify")


def test_a_filled_output_is_refused_and_kept(texts, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").write_text("data")
    with pytest.raises(RecipeError, match="exists and is not empty") as error:
        run("prepare", "--source", "text", "--path", texts, "--output", output)
    assert error.value.problems[0].hint.endswith(f"rm -r {output}")
    assert list(output.iterdir()) == [output / "precious"]


def test_an_empty_output_is_filled(texts, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    run("prepare", "--source", "text", "--path", "texts/*.txt", "--output", "out")
    assert TokenFolder.open(tmp_path / "out").num_tokens("train") > 0


def test_errors_speak_of_options_rather_than_recipe_keys(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(RecipeError) as error:
        run("prepare", "--source", "jsonl", "--path", tmp_path, "--output", tmp_path / "out")
    (problem,) = error.value.problems
    assert (problem.path, problem.hint) == ("--path", "--text-field NAME says which to read")
    assert problem.where() == f"{tmp_path / 'x.jsonl'}:1"
    assert not (tmp_path / "out").exists()


def test_an_unknown_source_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(app, ["prepare", "--source", "tokens", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
