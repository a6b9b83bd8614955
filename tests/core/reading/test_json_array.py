"""An array gives its items one by one, each with the line that it begins in."""

from __future__ import annotations

import json

import pytest

from trainspec_cli.core.reading.json_array import JsonArrayError, parse_items


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
        ("[1,\n2\n3\n4]", 2, 3, "`,` or `]` is needed in the place of `3`"),
        ("[1,\n2\n", 2, 3, "`,` or `]` is needed in the place of the end of the file"),
        ("[1,]", 1, 1, "Expecting value"),
        ("[1]\n[2]", 1, 2, "`[2]` stands behind the end of the array"),
        ("[]\n,", 0, 2, "`,` stands behind the end of the array"),
        ('{"a": 1}', 0, 1, '`[` is needed in the place of `{"a": 1}`'),
        (f"[1,\n{'[' * 65}{']' * 65}]", 1, 2, "it is nested more than 64 levels deep"),
        (f"[\n{'[' * 10**5}", 0, 2, "it is nested more than 64 levels deep"),
    ],
)
def test_what_is_no_array_is_refused_at_its_line(text: str, read: int, line: int, why: str) -> None:
    items = parse_items(text)
    found = [next(items) for _ in range(read)]
    with pytest.raises(JsonArrayError) as error:
        next(items)
    assert (str(error.value), error.value.line, len(found)) == (why, line, read)
