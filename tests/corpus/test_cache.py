from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.corpus.cache import cache_dir, cached_folder, make_cache
from trainspec_cli.corpus.source_files import find_files
from trainspec_cli.errors import MachineError
from trainspec_cli.spec.recipe.data import TokenizerSpec


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRAINSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "trainspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/trainspec")
    monkeypatch.setenv("TRAINSPEC_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"


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


def test_a_cache_is_made_for_its_user_alone_and_one_that_is_shared_stays_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "new" / "cache"))
    make_cache()
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o770)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "team"))
    make_cache()
    assert cache_dir().stat().st_mode & 0o777 == 0o770


def test_a_cache_that_strangers_could_fill_is_refused(shared, stranger, monkeypatch):
    stranger("mkdir -m 755 $1", shared / "theirs")
    (shared / "everybodys").mkdir()
    (shared / "everybodys").chmod(0o777)
    for name, why in (("theirs", "belongs to another user"), ("everybodys", "may be written by every user")):
        monkeypatch.setenv("TRAINSPEC_CACHE", str(shared / name))
        for use in (cache_dir, make_cache):
            with pytest.raises(MachineError, match=why) as caught:
                use()
            assert "TRAINSPEC_CACHE=FOLDER" in caught.value.problems[0].hint


def test_a_place_where_no_cache_can_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MachineError, match=r"cannot write .*file/cache"):
        make_cache()
