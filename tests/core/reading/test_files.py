from __future__ import annotations

import json
import os
from math import inf
from pathlib import Path

import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import (
    ClosedFileError,
    JsonArrayError,
    Kind,
    MissingFileError,
    UnreadableFileError,
    describe_kind,
    exists,
    expand,
    how_to_copy,
    is_kind,
    open_regular,
    parse_items,
    parse_json,
    read_bytes,
    read_field,
    read_object,
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
    with refused(UnreadableFileError, "unreadable_file", "", f"{file} is larger than 1023 B"):
        read_bytes(file, 1023)


def test_what_is_no_regular_file_is_named_by_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a directory"), (Path(os.devnull), "a device")):
        with pytest.raises(UnreadableFileError, match=f"is {kind}; expected a regular file"):
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
    assert (problem.code, problem.message) == ("missing_file", f"no such file: {tmp_path / path}")
    assert isinstance(error.value, (FileNotFoundError, MachineError))


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(UnreadableFileError, match="is not a path"):
        open_regular(Path("a\0b"))
    with pytest.raises(UnreadableFileError, match="File name too long"):
        open_regular(Path("a" * 300))
    assert not exists(Path("a\0b")) and not exists(Path("a" * 300))


def test_a_closed_file_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ClosedFileError, match=r"permission .*file") as error:
        read_bytes(tmp_path / "file")
    assert error.value.filename == str(tmp_path / "file") and error.value.problems[0].code == "closed_file"


def test_the_line_of_what_is_not_utf8_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo\nth\xe9\n")
    with pytest.raises(UnreadableFileError, match="byte 10 is 0xe9") as error:
        read_text(file)
    (problem,) = error.value.problems
    assert (problem.line, problem.file, problem.environment) == (3, str(file), True)
    assert "iconv -f LATIN1 -t UTF-8" in problem.hint


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
        ("abfs://box/x", "with a program that supports abfs://"),
        ("file:///data/x", "leave out file://: /data/x"),
    ],
)
def test_remote_paths_have_a_command_that_copies_them(path: str, command: str) -> None:
    hint = how_to_copy(path)
    assert (f"({command})" in hint or hint == command) if command else hint == ""


# JSON: an object's fields, and the items of an array.


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (1, float, True),
        (1, float | None, True),
        (1.0, int, False),
        (True, int, False),
        (True, float, False),
        (None, int | None, True),
        (None, int, False),
    ],
)
def test_kinds_are_those_of_json(value: object, kind: Kind, fits: bool) -> None:
    assert is_kind(value, kind) is fits


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_nesting_is_bounded() -> None:
    assert parse_json(nested(64))
    for depth in (65, 100_000):
        with pytest.raises(ValueError, match="more than 64 levels"):
            parse_json(nested(depth))
    with pytest.raises(ValueError, match="more than 64 levels"):
        parse_json('{"a": ' * 65 + "1" + "}" * 65)


def test_long_whole_numbers_are_read_as_floats() -> None:
    assert parse_json("9" * 30) == int("9" * 30)
    for long, value in ((str(int(1e30)), 1e30), ("-" + "9" * 31, -1e31), ("9" * 5000, inf)):
        found = parse_json(f'{{"a": {long}}}')
        assert found == {"a": value} and type(found["a"]) is float


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"a": 1,\n "b" 2}', r"not JSON: .*\(line 2, column 6\)"),
        ("[1]", "a list; .*a JSON object"),
        ("null", "null; .*a JSON object"),
        ('"' + "x" * 50 + '"', r"'x{36}\.\.\.; .*a JSON object"),
        ("{}", "no `steps`; .*a whole number"),
        ('{"steps": "7"}', "'7' as `steps`"),
        ('{"steps": {}}', "an object as `steps`"),
        ('{"steps": ' + "9" * 31 + "}", r"1e\+31 as `steps`"),
    ],
)
def test_an_object_that_is_not_as_it_should_be(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(UnreadableFileError, match=says) as error:
        read_field(file, read_object(file), "steps", int)
    (problem,) = error.value.problems
    assert (problem.line, problem.column) == ((2, 6) if "not JSON" in says else (None, None))


def test_a_field_is_returned_whatever_else_the_object_has(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"about": {"steps": 7}, "more": 1}')
    about = read_field(file, read_object(file), "about", dict)
    assert about == {"steps": 7} and read_field(file, about, "steps", int) == 7


def test_kinds_in_words() -> None:
    kinds = (int, float, str, bool, dict, list)
    whole, *others = (describe_kind(kind) for kind in kinds)
    assert (whole, others) == ("a whole number", ["a number", "text", "true or false", "an object", "a list"])
    assert describe_kind(int | None) == f"{whole} or null"


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("items", [[], [1], [{"a": [1, "]"]}, None, "x\ny,", [[]], -2.5e3]])
def test_the_items_are_those_of_the_array(items: list, indent: int | None) -> None:
    assert [item for _, item in parse_items(f" \n{json.dumps(items, indent=indent)}\n ")] == items


def test_items_know_their_lines() -> None:
    assert [line for line, _ in parse_items('\n[\n{"a":\n 1}, 2\n,\n\n3 ]')] == [3, 4, 7]


@pytest.mark.parametrize(
    ("text", "read", "line", "why"),
    [
        ('[1,\n{"a": }]', 1, 2, "Expecting value"),
        ("[1,\n2\n3\n4]", 2, 3, "`]`, found `3`"),
        ("[1,\n2\n", 2, 3, "`]`, found the end"),
        ("[1,]", 1, 1, "Expecting value"),
        ("[1]\n[2]", 1, 2, "`[2]` follows the end"),
        ("[]\n,", 0, 2, "`,` follows the end"),
        ('{"a": 1}', 0, 1, 'expected `[`, found `{"a": 1}`'),
        (f"[1,\n{'[' * 65}{']' * 65}]", 1, 2, "more than 64 levels"),
        (f"[\n{'[' * 10**5}", 0, 2, "more than 64 levels"),
    ],
)
def test_what_is_no_array_is_refused_at_its_line(text: str, read: int, line: int, why: str) -> None:
    items = parse_items(text)
    found = [next(items) for _ in range(read)]
    with pytest.raises(JsonArrayError) as error:
        next(items)
    assert (why in str(error.value), error.value.line, len(found)) == (True, line, read)
