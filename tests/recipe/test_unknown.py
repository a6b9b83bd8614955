from __future__ import annotations

import math
import operator

import pytest

from trainspec_cli.recipe.structure import UNKNOWN, UnknownTouched


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value == 1, lambda value: value != "auto", lambda value: value < 1, lambda value: 2 * value,
        lambda value: 7 % value, lambda value: value.name, lambda value: f"{value}", lambda value: [*value],
        lambda value: {value}, lambda value: f"{value:g}", lambda value: f"{value:,}", lambda value: value[0],
        lambda value: 1 in value, lambda value: -value, lambda value: value**2, lambda value: value(), abs, bool,
        int, math.ceil, operator.index, reversed, round,
    ],
)  # fmt: skip
def test_nothing_can_be_concluded_from_it(use) -> None:
    with pytest.raises(UnknownTouched):
        use(UNKNOWN)
