from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.data.corpus.prepare import cached_folder
from trainspec_cli.data.corpus.source_files import find_files
from trainspec_cli.recipe.keys.run import TokenizerSpec


@pytest.mark.parametrize(
    "change",
    [
        {"heldout_fraction": 0.3},
        {"max_bytes": 5},
        {"tokenizer": TokenizerSpec(vocab_size=301)},
        {"source": "jsonl"},
    ],
)
def test_the_name_changes_with_what_the_tokens_depend_on(text_data, change):
    data = text_data("some text", "more")
    files = find_files(data)
    assert cached_folder(replace(data, **change), files) != cached_folder(data, files)


def test_the_name_stays_with_what_they_do_not_depend_on(text_data):
    data = text_data("some text", "more")
    files = find_files(data)
    assert cached_folder(replace(data, seq_len=99, text_field="body"), files) == cached_folder(data, files)


def test_the_name_changes_with_the_files(text_data):
    data = text_data("some text", "more")
    before = cached_folder(data, find_files(data))
    Path(data.path, "000.txt").write_text("other text")
    changed = cached_folder(data, find_files(data))
    Path(data.path, "002.txt").write_text("another")
    assert len({before, changed, cached_folder(data, find_files(data))}) == 3


def test_the_name_changes_with_a_file_of_the_same_size(text_data):
    data = text_data("some text")
    before = cached_folder(data, find_files(data))
    file = Path(data.path, "000.txt")
    file.write_text("same size")
    os.utime(file, ns=(1, 1))
    assert cached_folder(data, find_files(data)) != before


def test_the_name_changes_with_the_content_of_the_users_tokenizer(text_data, tmp_path):
    file = tmp_path / "tokenizer.json"
    data = text_data("some text", tokenizer=TokenizerSpec(path=str(file)))
    names = set()
    for content in ("a", "b"):
        file.write_text(content)
        names.add(cached_folder(data, find_files(data)))
    assert len(names) == 2
