from __future__ import annotations

import pytest

from trainspec_cli.reading.json_file import Kind, is_kind


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
