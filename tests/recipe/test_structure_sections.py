"""Sections that may be one of several kinds, and sections of values by name."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.structure import build


@dataclass(frozen=True)
class Round:
    radius: float
    family: Literal["round"] = "round"


@dataclass(frozen=True)
class Square:
    side: float
    family: Literal["square"] = "square"


@dataclass(frozen=True)
class Drawing:
    shape: Round | Square
    frame: Square | None = None
    prices: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] | None = None


def built(**data: Any) -> tuple[Drawing, list[str]]:
    drawing, problems = build(Drawing, data)
    return drawing, [problem.path for problem in problems]


def test_the_family_says_which_kind_a_section_is() -> None:
    drawing, problems = built(shape={"family": "square", "side": 2})
    assert drawing.shape == Square(2.0)
    assert problems == []


def test_a_section_without_a_family_is_of_the_first_kind() -> None:
    assert built(shape={"radius": 1})[0].shape == Round(1.0)


def test_keys_of_another_kind_are_refused() -> None:
    assert built(shape={"family": "square", "side": 1, "radius": 2})[1] == ["shape.radius"]


def test_an_optional_section_may_be_null_and_is_checked_when_it_is_not() -> None:
    assert built(shape={"radius": 1}, frame=None)[0].frame is None
    assert built(shape={"radius": 1}, frame={"side": "wide"})[1] == ["frame.side"]


def test_values_by_name_keep_their_names_and_have_one_type() -> None:
    drawing, problems = built(shape={"radius": 1}, prices={"ink": 2, "paper": 0.5})
    assert drawing.prices == {"ink": 2.0, "paper": 0.5}
    assert problems == []
    assert built(shape={"radius": 1}, prices={"ink": "dear", "paper": 1})[1] == ["prices.ink"]


def test_a_misspelt_key_of_any_family_is_recognised() -> None:
    _, problems = build(RunSpec, {"model": {"family": "hybrid", "mamba_layer": 3}})
    hints = {problem.path: problem.hint for problem in problems}
    assert "model.mamba_layers" in hints["model.mamba_layer"]


def test_values_by_name_may_be_optional() -> None:
    assert built(shape={"radius": 1}, sources={"ink": "a shop"})[0].sources == {"ink": "a shop"}
    assert built(shape={"radius": 1}, sources=None)[0].sources is None
