"""Samples of text and of conversations, cut and packed by hand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError
from trainspec_cli.data.corpus.rows import JoinedRows, Packed, Row, Windows, empty_row, first_text, open_rows
from trainspec_cli.data.corpus.shards import (
    MANIFEST_FILE,
    SCHEMA,
    Shard,
    ShardManifest,
    ShardWriter,
    SplitSummary,
    TokenFolder,
    read_documents,
    write_documents,
    write_manifest,
)
from trainspec_cli.recipe.keys.run import DataSpec

END = 9
"""The id that ends a document."""


@pytest.fixture
def folder_of(tmp_path: Path):
    """Writes a token folder: `train` and `heldout` are ids, and `masks` marks what is learnt of each document."""

    def write(train: list[int], heldout: list[int] = [1, 2], masks: list[list[int]] | None = None) -> TokenFolder:  # noqa: B006
        summaries: dict[str, SplitSummary] = {}
        for split, ids in (("train", train), ("heldout", heldout)):
            with ShardWriter(tmp_path, split, "uint16", max_shard_tokens=4) as writer:
                writer.append(ids, text_bytes=len(ids), documents=1)
            summaries[split] = writer.finish()
        if masks is not None:
            write_documents(tmp_path, "train", [np.array(mask) for mask in masks])
        manifest = ShardManifest(
            SCHEMA, "uint16", 10, 10, END, "", {}, 0.1, None, learns_parts=masks is not None, **summaries
        )
        write_manifest(tmp_path, manifest)
        return TokenFolder.open(tmp_path)

    return write


def lists(row: Row) -> tuple[list[int], list[int], list[int] | None]:
    return row.tokens.tolist(), row.targets.tolist(), None if row.documents is None else row.documents.tolist()


@pytest.mark.parametrize(("documents", "third"), [(True, [-1, -1, -1]), (False, None)])
def test_an_empty_row_teaches_nothing(documents, third) -> None:
    assert lists(empty_row(3, documents=documents)) == ([0, 0, 0], [-1, -1, -1], third)


def test_the_target_of_a_windows_last_token_is_the_next_windows_first(folder_of) -> None:
    windows = Windows(folder_of([1, 2, 3, 4, 5, 6, 7, 8]), "train", 3)
    assert (len(windows), windows.counted(0), windows.counted(1)) == (2, 3, 3)
    assert lists(windows.read(0)) == ([1, 2, 3], [2, 3, 4], None)
    assert lists(windows.read(1)) == ([4, 5, 6], [5, 6, 7], None)


def test_the_rest_is_a_padded_row_where_it_is_kept(folder_of) -> None:
    folder = folder_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    windows = Windows(folder, "train", 3, keeps_rest=True)
    assert (len(windows), windows.counted(2)) == (3, 2)
    assert lists(windows.read(2)) == ([7, 8, 0], [8, 9, -1], None)
    assert sum(windows.counted(index) for index in range(3)) == folder.num_tokens("train") - 1
    assert len(Windows(folder, "train", 8, keeps_rest=True)) == len(Windows(folder, "train", 8)) == 1


@pytest.mark.parametrize("ids", [[], [1]])
def test_without_a_target_there_is_no_window(folder_of, ids) -> None:
    assert len(Windows(folder_of(ids), "train", 3, keeps_rest=True)) == 0


def test_a_document_begins_after_the_end_of_the_one_before(folder_of) -> None:
    windows = Windows(folder_of([1, END, END, 2, 3, END, 4, 5]), "train", 5, keeps_rest=True, masks_documents=True)
    assert lists(windows.read(0)) == ([1, END, END, 2, 3], [END, END, 2, 3, END], [0, 0, 1, 2, 2])
    assert lists(windows.read(1)) == ([END, 4, 0, 0, 0], [4, 5, -1, -1, -1], [0, 1, -1, -1, -1])


TALKS = [[1, 2, 3], [4, 5, 6, 7, 8], [1, 1], [2, 2, 2, 2], [3, 3, 3]]
"""Targets: 2, 4, 1, 3, 2."""
LEARNT = [[0, 1, 1], [1, 0, 1, 1, 1], [0, 1], [1, 0, 0, 1], [1, 0, 0]]
"""Of the last nothing is learnt, as its first token is no target."""


def talks(folder_of, seq_len: int) -> Packed:
    return Packed(folder_of([token for talk in TALKS for token in talk], masks=LEARNT), "train", seq_len)


def test_the_longest_document_is_placed_first_and_the_others_where_they_fit_best(folder_of) -> None:
    """In rows of 5: 4 of document 1, 3 of document 3, 2 of document 0 beside 3, 1 of document 2 beside 4."""
    rows = talks(folder_of, 5)
    assert (len(rows), rows.cut, rows.seq_len) == (2, 0, 5)
    assert lists(rows.read(0)) == ([4, 5, 6, 7, 1], [-1, 6, 7, 8, 1], [0, 0, 0, 0, 1])
    assert lists(rows.read(1)) == ([2, 2, 2, 1, 2], [-1, -1, 2, 2, 3], [0, 0, 0, 1, 1])
    assert [rows.counted(index) for index in (0, 1)] == [4, 3]


def test_of_two_rows_with_room_the_fuller_one_is_filled(folder_of) -> None:
    """In rows of 6, 4 leaves 2 and 3 leaves 3: the 2 of document 0 go where 2 are left, and then the 1 beside 3."""
    rows = talks(folder_of, 6)
    assert [rows.read(index).documents.tolist() for index in range(len(rows))] == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, -1, -1],
    ]
    assert lists(rows.read(1))[:2] == ([2, 2, 2, 1, 0, 0], [-1, -1, 2, 1, -1, -1])


def test_a_document_longer_than_a_row_loses_its_end(folder_of) -> None:
    rows = talks(folder_of, 3)
    assert rows.cut == 1
    assert lists(rows.read(0)) == ([4, 5, 6], [-1, 6, 7], [0, 0, 0])
    assert rows.counted(0) == 2


def test_documents_of_one_length_keep_their_order(folder_of) -> None:
    rows = Packed(folder_of([1, 2, 3, 4, 5, 6], masks=[[0, 1], [0, 1], [0, 1]]), "train", 1)
    assert [rows.read(index).targets.tolist() for index in range(3)] == [[2], [4], [6]]


@pytest.mark.parametrize(
    ("targets", "documents", "tokens", "mask"),
    [
        ([2, 3, 4], None, [1, 2, 3, 4], [1, 1, 1, 1]),
        ([2, 3, 4], [0, 1, 1], [1, 2, 3, 4], [1, 1, 1, 1]),  # text in which every token counts
        ([-1, 3, 4], [0, 0, 0], [1, 2, 3, 4], [0, 0, 1, 1]),
        ([-1, 3, -1], [0, 0, 0], [1, 2, 3], [0, 0, 1]),  # the last target is not known
        ([-1, 8, 4], [0, 0, 1], [1, 2, 8], [0, 0, 1]),
    ],
)
def test_the_first_text_of_a_row_has_a_mask(targets, documents, tokens, mask) -> None:
    row = Row(np.array([1, 2, 3]), np.array(targets), None if documents is None else np.array(documents))
    found, learnt = first_text(row)
    assert (found.tolist(), learnt.astype(int).tolist()) == (tokens, mask)


def test_rows_are_joined_one_after_another(folder_of) -> None:
    folder = folder_of([1, 2, 3, 4, 5], heldout=[6, 7, 8])
    none, train, heldout = (
        Windows(folder, "heldout", 9),
        Windows(folder, "train", 2),
        Windows(folder, "heldout", 2, True),
    )
    joined = JoinedRows([train, none, heldout])
    assert (len(joined), joined.seq_len) == (3, 2)
    assert [joined.read(index).tokens.tolist() for index in range(3)] == [[1, 2], [3, 4], [6, 7]]
    assert [joined.counted(index) for index in range(3)] == [2, 2, 2]


def test_held_out_text_keeps_its_rest_and_training_text_does_not(folder_of) -> None:
    folder = folder_of([1, 2, 3, 4, 5], heldout=[6, 7, 8, 9, 1])
    data = DataSpec(3, "text")
    assert [len(open_rows(folder, split, data)) for split in ("train", "heldout")] == [1, 2]
    assert len(open_rows(folder, "train", data, keeps_rest=True)) == 2
    assert len(open_rows(folder, "heldout", data, keeps_rest=False)) == 1
    assert open_rows(folder, "train", data).read(0).documents is None
    masked = open_rows(folder, "train", DataSpec(3, "text", document_masks=True))
    assert masked.read(0).documents.tolist() == [0, 0, 0]


def test_conversations_are_packed(folder_of) -> None:
    folder = folder_of([1, 2, 3], masks=[[0, 1, 1]])
    assert isinstance(open_rows(folder, "train", DataSpec(3, "chat")), Packed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fields: fields["train"].update(tokens=-1), "count"),
        (lambda fields: fields["heldout"].update(bytes=2**53), "count .*any disk"),
        (lambda fields: fields["train"]["shards"][0].update(offset_bytes=-2), "count"),
        (lambda fields: fields["train"].update(tokens=9), "shards of train .* 9 tokens"),
        (lambda fields: fields["train"]["shards"][0].update(file="a\0b"), "invalid file name"),
        (lambda fields: fields["train"]["shards"][0].update(file="a" * 4097), "invalid file name"),
    ],
)
def test_a_manifest_that_cannot_be_is_named(folder_of, change, says) -> None:
    file = folder_of([1, 2, 3]).path / MANIFEST_FILE
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))
    with pytest.raises(MachineError, match=says) as error:
        TokenFolder.open(file.parent)
    assert error.value.problems[0].hint.endswith(f": rm -r {file.parent}")


def test_the_index_of_documents_is_written_and_read(tmp_path: Path) -> None:
    write_documents(tmp_path, "train", [np.array([0, 1, 1]), np.array([1]), np.array([0, 0])])
    index = read_documents(tmp_path, "train", 6)
    assert index.starts.tolist() == [0, 3, 4, 6]
    assert index.learnt(1, 4).tolist() == [True, True, True, False]
    assert index.learnt_before(np.array([0, 1, 2, 3, 4, 6])).tolist() == [0, 0, 1, 2, 3, 3]
    write_documents(tmp_path, "heldout", [])
    assert read_documents(tmp_path, "heldout", 0).starts.tolist() == [0]


@pytest.mark.parametrize(
    ("starts", "mask", "says"),
    [
        (np.array([0, 3]), np.zeros(2, np.uint8), "covers 2 tokens"),
        (np.array([0, 2]), np.zeros(3, np.uint8), "it covers 3 tokens"),
        (np.array([1, 3]), np.zeros(3, np.uint8), "not contiguous"),
        (np.array([0, 2, 1, 3]), np.zeros(3, np.uint8), "not contiguous"),
        (np.array([], np.int64), np.zeros(3, np.uint8), "not contiguous"),
        (np.array([0.0, 3.0]), np.zeros(3, np.uint8), "float64 and uint8, of 1 and 1 dimensions"),
        (np.array([0, 3]), np.zeros((3, 1), np.uint8), "of 1 and 2 dimensions"),
        (np.array([0, 3]), np.zeros(3, np.int8), "int64 and int8"),
    ],
)
def test_a_damaged_index_of_documents_is_named(tmp_path: Path, starts, mask, says) -> None:
    np.save(tmp_path / "train_documents.npy", starts)
    np.save(tmp_path / "train_learnt.npy", mask)
    with pytest.raises(MachineError, match=f"index of its documents .*{says}"):
        read_documents(tmp_path, "train", 3)


def test_files_of_others_are_read_from_their_offset_and_may_not_be_too_short(tmp_path: Path) -> None:
    np.arange(10, dtype="<u2").tofile(tmp_path / "ids.bin")
    end = Shard(str(tmp_path / "ids.bin"), tokens=4, sha256="", offset_bytes=12)
    begin = Shard(str(tmp_path / "ids.bin"), tokens=2, sha256="")

    def opened(shard: Shard) -> TokenFolder:
        train, heldout = SplitSummary(shard.tokens, 0, 0, (shard,)), SplitSummary(2, 0, 0, (begin,))
        return TokenFolder(tmp_path, ShardManifest(SCHEMA, "uint16", 10, 10, END, "", {}, 0.1, None, train, heldout))

    folder = opened(end)
    assert folder.tokens("train", 0, 4).tolist() == [6, 7, 8, 9]
    assert folder.tokens("heldout", 0, 2).tolist() == [0, 1]
    folder.verify()
    with refused(MachineError, "bad_token_folder", "", "ids.bin", "shorter than the 10 bytes"):
        opened(replace(end, tokens=5))


def test_a_shard_that_is_just_full_is_followed_by_none(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", "uint16", max_shard_tokens=3) as writer:
        writer.append([1, 2, 3], text_bytes=1, documents=1)
        writer.append([4, 5, 6], text_bytes=2, documents=0)
    summary = writer.finish()
    assert [(shard.file, shard.tokens) for shard in summary.shards] == [("train_00000.bin", 3), ("train_00001.bin", 3)]
    assert (summary.tokens, summary.bytes, summary.documents) == (6, 3, 1)
    digest = hashlib.sha256((tmp_path / "train_00001.bin").read_bytes()).hexdigest()
    assert summary.shards[1].sha256 == digest != summary.shards[0].sha256


def test_bytes_per_token_are_the_mean_of_both_splits(folder_of) -> None:
    manifest = folder_of([1, 2, 3]).manifest
    train, heldout, none = SplitSummary(30, 60, 1, ()), SplitSummary(10, 100, 1, ()), SplitSummary(0, 0, 0, ())
    assert replace(manifest, train=train, heldout=heldout).bytes_per_token == 4.0
    assert replace(manifest, train=none, heldout=none).bytes_per_token == 0


def test_a_document_may_be_empty_and_none_may_begin_before_the_one_before(tmp_path) -> None:
    np.save(tmp_path / "train_learnt.npy", np.ones(4, dtype=np.uint8))
    np.save(tmp_path / "train_documents.npy", np.array([0, 2, 2, 4]))
    assert read_documents(tmp_path, "train", 4).starts.tolist() == [0, 2, 2, 4]
    for starts in ([0, 3, 2, 4], [1, 2, 4], [0, 2, 3], []):
        np.save(tmp_path / "train_documents.npy", np.array(starts, dtype=np.int64))
        with pytest.raises(MachineError, match="index of its documents"):
            read_documents(tmp_path, "train", 4)
    np.save(tmp_path / "train_documents.npy", np.array([0, 4]))
    with pytest.raises(MachineError, match="4 tokens, but"):
        read_documents(tmp_path, "train", 5)
