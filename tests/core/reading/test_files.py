from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import (
    ClosedFileError,
    MissingFileError,
    UnreadableFileError,
    exists,
    expand,
    how_to_copy,
    open_regular,
    read_bytes,
    read_text,
)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "windows.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: tiny\n")
    assert read_text(file) == "name: tiny\n"


def test_a_file_may_be_as_large_as_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1024)
    assert read_bytes(file, 1024) == b"x" * 1024
    with pytest.raises(UnreadableFileError, match=r"file is larger than the 1023 B that are read from such a file"):
        read_bytes(file, 1023)


def test_what_is_no_regular_file_is_named_by_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a directory"), (Path(os.devnull), "a device")):
        with pytest.raises(UnreadableFileError, match=f"is {kind}; a regular file is needed"):
            open_regular(path)


def test_no_descriptor_is_left_open_where_a_file_is_refused(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts descriptors
    for _ in range(3):
        with pytest.raises(UnreadableFileError):
            open_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("path", ["gone", "file/below"])
def test_a_file_that_is_not_there(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError) as error:
        read_bytes(tmp_path / path)
    (problem,) = error.value.problems
    assert (problem.code, problem.message) == ("missing_file", f"there is no file {tmp_path / path}")
    assert isinstance(error.value, (FileNotFoundError, MachineError))


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(UnreadableFileError, match="is no path"):
        open_regular(Path("a\0b"))
    with pytest.raises(UnreadableFileError, match="cannot be opened: File name too long"):
        open_regular(Path("a" * 300))
    assert not exists(Path("a\0b")) and not exists(Path("a" * 300))


def test_a_closed_file_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ClosedFileError, match="file is closed to this user") as error:
        read_bytes(tmp_path / "file")
    assert error.value.filename == str(tmp_path / "file") and error.value.problems[0].code == "closed_file"


def test_the_line_of_what_is_not_utf8_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo\nth\xe9\n")
    with pytest.raises(UnreadableFileError, match="is not UTF-8: byte 10 is 0xe9") as error:
        read_text(file)
    (problem,) = error.value.problems
    assert (problem.line, problem.file, problem.environment) == (3, str(file), True)
    assert problem.hint == "convert it: iconv -f LATIN1 -t UTF-8"


def test_a_folder_is_not_a_file_that_exists(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [exists(path) for path in (tmp_path / "file", tmp_path, tmp_path / "gone")] == [True, False, False]


def test_home_is_expanded_where_there_is_such_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand("~/a") == Path("/home/me/a")
    assert expand("~nobody-of-that-name/a") == Path("~nobody-of-that-name/a")


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("data/x.jsonl", ""),
        ("C:/x", ""),
        ("a b://c", ""),
        ("s3://bucket/x.jsonl", "aws s3 cp s3://bucket/x.jsonl FOLDER"),
        ("s3://bucket/my folder", "aws s3 cp --recursive 's3://bucket/my folder' FOLDER"),
        ("gs://bucket/x", "gcloud storage cp --recursive gs://bucket/x FOLDER"),
        ("hf://datasets/org/name/a/x.parquet", "hf download org/name --repo-type dataset --local-dir FOLDER"),
        ("hf://org/name", "hf download org/name --local-dir FOLDER"),
        ("https://huggingface.co/datasets/org/name", "hf download org/name --repo-type dataset --local-dir FOLDER"),
        ("HTTPS://example.org/x.txt", "curl -LO HTTPS://example.org/x.txt"),
        ("abfs://box/x", "with the program for abfs://"),
        ("file:///data/x", "leave out file://: /data/x"),
    ],
)
def test_remote_paths_have_a_command_that_copies_them(path: str, command: str) -> None:
    hint = how_to_copy(path)
    assert (f"({command})" in hint or hint == command) if command else hint == ""
