from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.corpus.shards import MANIFEST_FILE, ShardWriter, TokenFolder, choose_dtype, write_manifest


def folder_of(path, tokens: list[int], template, dtype="uint16", max_shard_tokens=10) -> TokenFolder:
    """A token folder with small shards; all but the tokens is the template's."""
    path.mkdir()
    with ShardWriter(path, "train", dtype, max_shard_tokens) as train:
        for start in range(0, len(tokens), 7):
            train.append(tokens[start : start + 7], text_bytes=20, documents=1)
    with ShardWriter(path, "heldout", dtype) as heldout:
        heldout.append([1, 2], text_bytes=5, documents=1)
    (path / "tokenizer.json").write_bytes((template.path / "tokenizer.json").read_bytes())
    write_manifest(path, replace(template.manifest, dtype=dtype, train=train.finish(), heldout=heldout.finish()))
    return TokenFolder.open(path)


def test_every_range_reads_back_across_shards(tmp_path, stdlib_folder):
    tokens = list(range(1000, 1035))
    folder = folder_of(tmp_path / "t", tokens, stdlib_folder)
    assert [shard.tokens for shard in folder.manifest.train.shards] == [10, 10, 10, 5]
    for start in range(len(tokens) + 1):
        for count in range(len(tokens) - start + 1):
            assert folder.tokens("train", start, count).tolist() == tokens[start : start + count]


def test_tokens_are_int64_and_the_callers_own(stdlib_folder):
    first = stdlib_folder.tokens("train", 0, 5)
    first += 1
    assert first.dtype == np.int64
    assert (stdlib_folder.tokens("train", 0, 5) == first - 1).all()


def test_files_are_little_endian_and_as_narrow_as_the_vocabulary_allows(tmp_path, stdlib_folder):
    assert (choose_dtype(65_536), choose_dtype(65_537)) == ("uint16", "uint32")
    folder_of(tmp_path / "narrow", [258], stdlib_folder)
    folder_of(tmp_path / "wide", [70_000], stdlib_folder, dtype="uint32")
    assert (tmp_path / "narrow" / "train_00000.bin").read_bytes() == b"\x02\x01"
    assert (tmp_path / "wide" / "train_00000.bin").read_bytes() == b"\x70\x11\x01\x00"
    assert TokenFolder.open(tmp_path / "wide").tokens("train", 0, 1).tolist() == [70_000]


def test_counts_are_the_manifests(tmp_path, stdlib_folder):
    folder = folder_of(tmp_path / "t", list(range(35)), stdlib_folder)
    assert (folder.num_tokens("train"), folder.num_bytes("train")) == (35, 100)
    assert folder.manifest.train.documents == 5
    assert (folder.num_tokens("heldout"), folder.num_bytes("heldout")) == (2, 5)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (30, 6), (0, -1), (36, 0)])
def test_a_range_outside_is_an_error(tmp_path, stdlib_folder, start, count):
    folder = folder_of(tmp_path / "t", list(range(35)), stdlib_folder)
    with pytest.raises(IndexError, match="of 35 in train"):
        folder.tokens("train", start, count)


def test_a_missing_shard_is_named(stdlib_folder):
    (stdlib_folder.path / "train_00000.bin").unlink()
    with refused(MachineError, "bad_token_folder", "", "train_00000.bin", "missing", f"rm -r {stdlib_folder.path}"):
        TokenFolder.open(stdlib_folder.path)


def test_a_truncated_shard_is_named_with_both_sizes(stdlib_folder):
    file = stdlib_folder.path / "heldout_00000.bin"
    size = file.stat().st_size
    with file.open("ab") as handle:
        handle.truncate(size - 1)
    with pytest.raises(MachineError, match=f"heldout_00000.bin has {size - 1:,} bytes, not the {size:,}"):
        TokenFolder.open(stdlib_folder.path)


def test_an_altered_shard_is_found_by_verify(stdlib_folder):
    stdlib_folder.verify()
    file = stdlib_folder.path / "train_00000.bin"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with refused(MachineError, "bad_token_folder", "", "train_00000.bin", "altered"):
        TokenFolder.open(stdlib_folder.path).verify()


def test_a_missing_tokenizer_is_named(stdlib_folder):
    (stdlib_folder.path / "tokenizer.json").unlink()
    with refused(MachineError, "bad_token_folder", "", "tokenizer.json", "missing"):
        TokenFolder.open(stdlib_folder.path)


@pytest.mark.parametrize("make", [True, False])
def test_what_is_no_token_folder_is_the_recipes_fault(tmp_path, make):
    path = tmp_path / "t"
    if make:
        path.mkdir()
    what = "manifest.json" if make else "does not exist"
    with refused(RecipeError, "missing_file", "data.path", str(path), what, "trainspec data prepare"):
        TokenFolder.open(path)


def test_a_file_is_no_token_folder(tmp_path):
    (tmp_path / "text.jsonl").touch()
    file = tmp_path / "text.jsonl"
    with refused(RecipeError, "missing_file", "data.path", f"{file} is a file", f"--source jsonl --path {file}"):
        TokenFolder.open(file)


def test_a_manifest_of_another_schema_is_refused(stdlib_folder):
    file = stdlib_folder.path / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 99}))
    with refused(MachineError, "bad_token_folder", "", "schema 99", "reads 1"):
        TokenFolder.open(stdlib_folder.path)


def test_ids_of_another_type_are_refused(stdlib_folder):
    file = stdlib_folder.path / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "int8"}))
    with refused(MachineError, "bad_token_folder", "", "damaged", "type int8"):
        TokenFolder.open(stdlib_folder.path)


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1}', '{"schema": 1, "dtype": "int8"}'])
def test_a_damaged_manifest_is_named(stdlib_folder, content):
    (stdlib_folder.path / MANIFEST_FILE).write_text(content)
    with refused(MachineError, "bad_token_folder", "", "manifest.json", "damaged"):
        TokenFolder.open(stdlib_folder.path)
