from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from lab.problems import raises
from typer.testing import CliRunner

from trainspec_cli.cli.data import READY, Source, _as_option, _rows, app
from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.shards import ShardManifest, SplitSummary, TokenFolder
from trainspec_cli.recipe.keys.run import DataSpec


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
    assert "for the 400 tokens" in printed
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
    with raises(MachineError, "bad_token_folder", "tokenizer.json"):
        run("info", tmp_path / "out", "--verify")


def test_a_filled_output_is_refused_and_kept(texts, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").write_text("data")
    with raises(RecipeError, "output_exists", output, path="--output") as error:
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
    assert problem.path == "--path" and "--text-field NAME" in problem.hint
    assert problem.where() == f"{tmp_path / 'x.jsonl'}:1"
    assert not (tmp_path / "out").exists()


def test_an_unknown_source_is_a_usage_error(tmp_path):
    for wrong in (["--source", "tape", "--output", str(tmp_path / "out")], ["--source", "text"], []):
        assert CliRunner().invoke(app, ["prepare", *wrong]).exit_code == 2


def test_every_source_that_launch_serves_is_served_here():
    """A mixture by its recipe."""
    served = set(get_args(Source)) | {"mixture"}
    shipped, own = get_args(get_type_hints(DataSpec)["source"])
    assert own is str and served == set(get_args(shipped))


@pytest.mark.parametrize("source", list(READY))
def test_what_needs_no_preparing_is_said_in_a_line(source):
    assert run("prepare", "--source", source).startswith("nothing to prepare: ")
    assert json.loads(run("prepare", "--source", source, "--json"))["path"] is None


@pytest.fixture
def tables(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": [f"document {number} says {number * number}" for number in range(60)]})
    parquet.write_table(table, tmp_path / "texts.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "texts.arrow"), table.schema) as stream:
        stream.write_table(table)
    return tmp_path


@pytest.mark.parametrize("source", ["parquet", "arrow"])
def test_tables_become_tokens(source, tables, tmp_path):
    file, output = tables / f"texts.{source}", tmp_path / "out"
    run("prepare", "--source", source, "--path", file, "--output", output, "--text-field", "body")
    manifest = TokenFolder.open(output).manifest
    assert manifest.train.documents + manifest.heldout.documents == 60


def test_conversations_become_tokens_of_which_the_replies_are_learnt(tmp_path):
    talk = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]}
    file, output = tmp_path / "talks.jsonl", tmp_path / "out"
    file.write_text("\n".join(json.dumps(talk | {"id": number}) for number in range(20)))
    with pytest.raises(RecipeError) as error:
        run("prepare", "--source", "chat", "--path", file, "--output", output)
    assert error.value.problems[0].path == "--chat-template"
    printed = run("prepare", "--source", "chat", "--path", file, "--output", output, "--chat-template", "chatml")
    assert TokenFolder.open(output).manifest.learns_parts
    assert "for conversations" in printed


def test_the_format_of_conversations_is_shown(tmp_path):
    file, output = tmp_path / "talks.json", tmp_path / "out"
    file.write_text(json.dumps([{"instruction": f"say {number}", "output": f"{number} " * 9} for number in range(20)]))
    run("prepare", "--source", "chat", "--path", file, "--output", output, "--chat-template", "chatml")
    assert run("info", output).startswith("format           Alpaca\ntrain ")
    assert json.loads(run("info", output, "--json"))["source"]["format"] == "Alpaca"


def test_a_recipes_data_is_prepared_where_its_launch_looks(tables, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    rows = f"{{source: parquet, path: {tables / 'texts.parquet'}, text_field: body, weight: 3.0}}"
    parts = f"data.mixture={{tables: {rows}, files: {{source: text, path: {texts}}}}}"
    tokenizer = tmp_path / "tokenizer.json"
    bpe.train(["the quick brown fox"], 300).save(str(tokenizer))
    recipe = ("recipe=tiny", "data=mixture", "data.seq_len=16", f"data.tokenizer.path={tokenizer}", parts)
    told = json.loads(run("prepare", *recipe, "--json"))
    assert list(told["parts"]) == ["tables", "files"]
    assert Path(told["path"]).is_relative_to(tmp_path / "cache")
    printed = run("prepare", *recipe)
    assert [line.split()[0] for line in printed.splitlines()] == ["tables", "files"]
    assert run("prepare", "recipe=tiny_unet3d").startswith("nothing to prepare")
    with pytest.raises(RecipeError, match="leave out --output"):
        run("prepare", *recipe, "--output", tmp_path / "out")


def manifest(**changes: object) -> ShardManifest:
    train, heldout = SplitSummary(3_000_000, 9 * 2**20, 1200, ()), SplitSummary(1000, 2**11, 1, ())
    return replace(ShardManifest(1, "uint16", 400, 400, 0, "", {}, 0.1, 2.5, train, heldout), **changes)


def test_the_rows_of_a_token_folder():
    assert _rows(manifest()) == {
        "train": "1,200 documents, 3M tokens, 9.00 MiB",
        "held out": "1 document, 1k tokens, 2.00 KiB",
        "bytes per token": f"{(9 * 2**20 + 2**11) / 3_001_000:.3f}",
        "vocabulary": "400",
        "xz on held out": "2.500 bits per byte",
    }
    small = _rows(manifest(vocab_size_asked=500))["vocabulary"]
    assert small.startswith("400 (") and " 500 " in small
    assert "lzma" in _rows(manifest(xz_bits_per_byte=None))["xz on held out"]
    learnt = _rows(manifest(xz_bits_per_byte=None, learns_parts=True))
    assert "conversations" in learnt["xz on held out"]


@pytest.mark.parametrize(
    ("key", "option"),
    [("data.path", "--path"), ("data.tokenizer.path", "--tokenizer"), ("data.tokenizer.vocab_size", "--vocab-size"),
     ("data.tokenizer.end_of_document", "--end-of-document"), ("data.max_bytes", "--max-bytes"),
     ("data.heldout_fraction", "--heldout-fraction"), ("data.text_field", "--text-field"),
     ("data.chat_template", "--chat-template"), ("optim.lr", "optim.lr")],
)  # fmt: skip
def test_keys_are_called_by_their_options(key, option):
    told = _as_option(Problem("c", "m", key, f"set {key}=3, or leave {key} out"))
    typed = f"{key}=3" if option == key else f"{option} 3"
    assert (told.path, told.hint) == (option, f"set {typed}, or leave {option} out")


def test_options_do_not_stand_beside_a_recipe(tmp_path):
    with raises(RecipeError, "contradiction", path="--source"):
        run("prepare", "recipe=tiny", "--source", "text", "--path", tmp_path)


def test_options_reach_the_shards(texts, tmp_path):
    output = tmp_path / "out"
    options = ("--vocab-size", 300, "--heldout-fraction", 0.5, "--max-bytes", 3000)
    run("prepare", "--source", "text", "--path", texts, "--output", output, *options)
    made = TokenFolder.open(output).manifest
    assert (made.vocab_size_asked, made.heldout_fraction, made.source["max_bytes"]) == (300, 0.5, 3000)
    assert made.train.bytes + made.heldout.bytes == 3000


def test_an_output_that_is_a_file_is_refused(texts, tmp_path):
    (tmp_path / "out").write_text("precious")
    with raises(RecipeError, "output_exists", path="--output"):
        run("prepare", "--source", "text", "--path", texts, "--output", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
