"""Real text and a real tokenizer, small enough to be made in a second."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.data.corpus.source_files import find_files
from trainspec_cli.data.corpus.sources import documents
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

STDLIB = DataSpec(
    seq_len=64, source="python_stdlib", max_bytes=300_000, tokenizer=TokenizerSpec(vocab_size=600), heldout_fraction=0.1
)


@pytest.fixture(scope="session")
def stdlib_texts() -> list[str]:
    return [document.text for document in documents(STDLIB, find_files(STDLIB))]


@pytest.fixture(scope="session")
def tokenizer(stdlib_texts):
    return bpe.train(stdlib_texts, vocab_size=600)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the tokens of STDLIB."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSPEC_CACHE", str(folder))
        prepare(STDLIB)
    return folder


@pytest.fixture
def stdlib_folder(cache: Path, prepared: Path) -> TokenFolder:
    """A copy that the test may damage, in this test's cache."""
    shutil.copytree(prepared, cache.parent)
    return TokenFolder.open(prepare(STDLIB))


@pytest.fixture
def text_data(tmp_path: Path) -> Callable[..., DataSpec]:
    """Writes files of text, and gives the DataSpec that reads them."""

    def write(*texts: str, **changes: object) -> DataSpec:
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8", newline="")
        data = DataSpec(seq_len=8, source="text", path=str(folder), tokenizer=TokenizerSpec(vocab_size=300))
        return replace(data, **changes)

    return write
