"""Documents of one's own code: prepared as those of other sources, called once, cached by code and options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.problems import assert_problems

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus.prepare import prepare, prepared_folder
from trainspec_cli.data.corpus.shards import SPLITS, TOKENIZER_FILE, TokenFolder
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.keys.run import DataSpec, PartSpec, TokenizerSpec

TEXTS = [f"number {n} is {'odd' if n % 2 else 'even'}, and its square is {n * n}\n" * 3 for n in range(200)]
CODE = """
import json
import numpy as np
from pathlib import Path

CALLS = Path(__file__).with_suffix(".calls")

def texts(path, as_dict=False):
    CALLS.write_text(CALLS.read_text() + "x" if CALLS.exists() else "x")
    for line in Path(path).read_text().splitlines():
        text = json.loads(line)["text"]
        yield {"text": text, "more": 1} if as_dict else text

def ids(count=50, length=40):
    return [np.arange(n, n + length) for n in range(count)]

def forever():
    while True:
        yield "round and round it goes " * 8
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """source(name, more code, **settings): the settings of data that the code's function gives."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def make(name: str, code: str = "", **settings: Any) -> DataSpec:
        file = tmp_path / "own.py"
        file.write_text(CODE + code)
        return DataSpec(seq_len=8, source=f"{file}:{name}", tokenizer=TokenizerSpec(300), **settings)

    return make


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("as_dict", [False, True])
def test_text_comes_to_the_same_tokens_as_from_a_file(tmp_path: Path, source: Any, as_dict: bool) -> None:
    own = prepare(source("texts", options={"path": str(tmp_path / "texts.jsonl"), "as_dict": as_dict}))
    jsonl = DataSpec(seq_len=8, source="jsonl", path=str(tmp_path / "texts.jsonl"), tokenizer=TokenizerSpec(300))
    assert shards(own) == shards(prepare(jsonl))
    assert TokenFolder.open(own).manifest.source["source"].endswith(":texts")  # type: ignore[union-attr]


def test_the_code_is_called_once_for_each_content_and_its_options(tmp_path: Path, source: Any) -> None:
    options = {"path": str(tmp_path / "texts.jsonl")}
    first = prepare(source("texts", options=options))
    assert prepare(source("texts", options={**options, "as_dict": True})) != first
    assert prepare(source("texts", "# changed", options=options)) != first
    assert prepare(source("texts", options=options)) == first
    assert (tmp_path / "own.calls").read_text() == "xxx"


def test_token_ids_are_taken_as_they_are_and_some_documents_held_out(source: Any) -> None:
    folder = TokenFolder.open(prepare(source("ids", heldout_fraction=0.2)))
    train, heldout = folder.num_tokens("train"), folder.num_tokens("heldout")
    assert train + heldout == 50 * 40 and 0 < heldout < 1000 and heldout % 40 == 0
    starts = {int(folder.tokens(split, at, 1)[0]) for split in SPLITS for at in range(0, folder.num_tokens(split), 40)}
    assert starts == set(range(50)) and folder.manifest.vocab_size == 50 - 1 + 40
    alone = TokenFolder.open(prepare(source("ids", options={"count": 1, "length": 100}, heldout_fraction=0.2)))
    assert (alone.num_tokens("train"), alone.num_tokens("heldout")) == (80, 20)


def test_a_source_without_an_end_is_read_up_to_max_bytes(source: Any) -> None:
    folder = TokenFolder.open(prepare(source("forever", max_bytes=5000)))
    assert folder.num_bytes("train") + folder.num_bytes("heldout") == 5000


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(): return 3", "returned int; expected documents"),
        ("def f(): return 'text'", "returned str; expected documents"),
        ("def f(): return []", "yielded no document"),
        ("def f(): return ['', '']", "are empty"),
        ("def f():\n    yield 'a'\n    raise OSError('gone')", "OSError: gone at document 2 "),
        ("def f(): return [{'txt': 'a'}]", "document 1 of "),
        ("def f(): return ['a', [1, 2]]", "is token ids,"),
        ("def f(): return [[1, 2], 'a']", "is text,"),
        ("def f(): return [[1.5]]", "is [1.5]; "),
        ("def f(): return [[-1, 5]]", "has ids from -1 to 5"),
        ("def f(): return ['\\ud800']", "surrogate pair"),
    ],
)
def test_what_is_no_document_is_refused(source: Any, code: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        prepare(source("f", code))
    assert words in str(caught.value)


def tokenizer_file(tmp_path: Path) -> str:
    lines = DataSpec(8, "jsonl", str(tmp_path / "texts.jsonl"), tokenizer=TokenizerSpec(300))
    return str(prepare(lines) / TOKENIZER_FILE)


def test_own_text_is_a_part_of_a_mixture_and_a_validation_set(tmp_path: Path, source: Any) -> None:
    own = source("texts")
    part = PartSpec(own.source, weight=2.0, options={"path": str(tmp_path / "texts.jsonl")})
    lines = PartSpec("jsonl", str(tmp_path / "texts.jsonl"))
    data = replace(own, source="mixture", tokenizer=TokenizerSpec(path=tokenizer_file(tmp_path)))
    data = replace(data, mixture={"own": part, "lines": lines}, validation={"more": part})
    collection = Collection.open(prepare(data))
    own_folder, lines_folder = (part.folder.path for part in collection.parts.values())
    assert shards(own_folder) == shards(lines_folder) == shards(collection.validation["more"].path)
    assert (tmp_path / "own.calls").read_text() == "x", "the same documents are made once"


def test_what_the_code_of_a_part_does_wrong_is_said_of_its_key(tmp_path: Path, source: Any) -> None:
    data = source("broken", "\ndef broken():\n    yield 5\n")
    parts = {"bad": PartSpec(data.source)}
    data = replace(data, source="mixture", tokenizer=TokenizerSpec(path=tokenizer_file(tmp_path)), mixture=parts)
    key = "data.mixture.bad.source"
    with pytest.raises(RecipeError) as refused:
        prepare(data)
    assert_problems(refused.value.problems, ("bad_document", key, f"`{key}`: document 1 "))


def test_what_is_prepared_already_is_found_without_running_the_code(tmp_path: Path, source: Any) -> None:
    data = source("texts", options={"path": str(tmp_path / "texts.jsonl")})
    assert prepared_folder(data) is None and not (tmp_path / "own.calls").exists()
    assert prepare(data) == prepared_folder(data)
