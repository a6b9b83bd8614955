from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from trainspec_cli.core.reading.files import (
    Kind,
    UnreadableFileError,
    describe_kind,
    is_kind,
    parse_json,
    read_field,
    read_object,
)


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
        with pytest.raises(ValueError, match="it is nested more than 64 levels deep"):
            parse_json(nested(depth))
    with pytest.raises(ValueError, match="nested more than 64"):
        parse_json('{"a": ' * 65 + "1" + "}" * 65)


def test_long_whole_numbers_are_read_as_floats() -> None:
    assert parse_json("9" * 30) == int("9" * 30)
    for long, value in ((str(int(1e30)), 1e30), ("-" + "9" * 31, -1e31), ("9" * 5000, inf)):
        found = parse_json(f'{{"a": {long}}}')
        assert found == {"a": value} and type(found["a"]) is float


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"a": 1,\n "b" 2}', r"is not JSON: Expecting ':' delimiter \(line 2, column 6\)"),
        ("[1]", "holds a list; a JSON object is needed"),
        ("null", "holds null; a JSON object is needed"),
        ('"' + "x" * 50 + '"', r"holds 'x{36}\.\.\.; a JSON object is needed"),
        ("{}", "has no `steps`; a whole number is needed"),
        ('{"steps": "7"}', "has '7' as `steps`; a whole number is needed"),
        ('{"steps": {}}', "has an object as `steps`; a whole number is needed"),
        ('{"steps": ' + "9" * 31 + "}", r"has 1e\+31 as `steps`; a whole number is needed"),
    ],
)
def test_an_object_that_is_not_as_it_should_be(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(UnreadableFileError, match=says) as error:
        read_field(file, read_object(file), "steps", int)
    assert error.value.problems[0].line == (2 if "not JSON" in says else None)


def test_what_is_no_json_is_shown_by_its_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"steps": 1,\n  "more" 2}')
    with pytest.raises(UnreadableFileError) as error:
        read_object(file)
    (problem,) = error.value.problems
    assert (problem.line, problem.column) == (2, 10)


def test_a_field_is_returned_whatever_else_the_object_has(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"about": {"steps": 7}, "more": 1}')
    about = read_field(file, read_object(file), "about", dict)
    assert about == {"steps": 7} and read_field(file, about, "steps", int) == 7


def test_kinds_in_words() -> None:
    kinds = (int, float, str, bool, dict, list, int | None)
    assert [describe_kind(kind) for kind in kinds] == [
        "a whole number", "a number", "text", "true or false", "an object", "a list", "a whole number or null",
    ]  # fmt: skip
