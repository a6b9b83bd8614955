from __future__ import annotations

import pytest

from trainspec_cli.compose import interpolation
from trainspec_cli.compose.interpolation import InterpolationError, Resolver


def test_a_reference_may_start_at_the_section_above_its_own() -> None:
    resolver = Resolver({"train": {"steps": 7, "seed": "${.steps}", "more": "${..name}"}, "name": "tiny"}, {})
    assert resolver.value(("train", "seed")) == 7
    assert resolver.value(("train", "more")) == "tiny"


def test_a_reference_above_the_recipe_leads_nowhere() -> None:
    resolver = Resolver({"train": {"seed": "${...name}"}, "name": "tiny"}, {})
    with pytest.raises(InterpolationError, match="not found"):
        resolver.value(("train", "seed"))


def test_the_values_behind_a_reference_to_a_section_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpolation, "MAX_VALUES", 8)
    sections = {"small": {"x": 1, "y": 2}, "two": ["${small}", "${small}"], "three": ["${small}"] * 3}
    resolver = Resolver(sections, {})
    assert resolver.value(("two",)) == [{"x": 1, "y": 2}] * 2
    with pytest.raises(InterpolationError, match="more than 8 values"):
        resolver.value(("three",))
