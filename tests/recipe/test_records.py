"""A field whose annotation allows several kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from trainspec_cli.recipe.records import FieldError, number, read_record


@dataclass(frozen=True)
class Measured:
    value: Annotated[float, number(0, math.inf)] | str | None
    parts: dict[str, int | str]


@pytest.mark.parametrize("value", [0.5, 1e300, 2, "inf", None])
def test_each_kind_of_a_union_is_read_as_it_is(value: float | str | None) -> None:
    read = read_record(Measured, {"value": value, "parts": {"a": 1, "b": "x"}, "unknown": 1})
    assert read == Measured(value, {"a": 1, "b": "x"}) and type(read.value) is type(value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": -1.0}, r"`value` is -1.0; a number from 0 to inf or text or null is needed"),
        ({"value": True}, r"`value` is True; a number"),
        (
            {"parts": {"a": 1.5}},
            r"`parts` is an object; an object, each value a whole number from .* or text, is needed",
        ),
    ],
)
def test_a_value_of_no_kind_of_a_union_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(FieldError, match=says):
        read_record(Measured, {"value": 1.0, "parts": {}} | change)
