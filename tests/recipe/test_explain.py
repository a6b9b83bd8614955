"""The explanation of a key is its field's docstring in the sections of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.recipe.field_types import NonNegativeFloat, PositiveInt
from trainspec_cli.recipe.json_schema import KeyMeaning, explain
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import describe, known_paths


@dataclass(frozen=True)
class Part:
    must_s: NonNegativeFloat
    """How long
    it takes."""
    from_: int | None = None
    kind: Literal["near", "far"] = "near"
    speed_gb_per_s: PositiveInt = 3
    """A speed."""


@dataclass(frozen=True)
class Other:
    must_s: str = ""
    """Something else."""


@dataclass(frozen=True)
class Whole:
    part: Part | Other
    """One of two."""
    flag: bool = False
    names: tuple[str, ...] = field(default_factory=lambda: ("a",))


def test_a_field_with_its_doc_range_unit_and_default() -> None:
    found = {one.of: one for one in explain(Whole, "part.must_s")}
    doc, value = "How long\nit takes.", "a number, at least 0"
    assert found["Part"] == KeyMeaning("part.must_s", "Part", doc, value, "seconds", None, (), ())
    assert (found["Other"].doc, found["Other"].value, found["Other"].default) == ("Something else.", "text", "empty")
    (speed,) = explain(Whole, "part.speed_gb_per_s")
    assert (speed.unit, speed.default, speed.doc) == ("GB/s (decimal)", "3", "A speed.")


def test_choices_keywords_and_sections() -> None:
    (kind,) = explain(Whole, "part.kind")
    assert (kind.choices, kind.doc) == (("near", "far"), "")
    (begin,) = explain(Whole, "part.from")
    assert (begin.key, begin.value, begin.default) == ("part.from", describe(int | None), "null")
    (flag,) = explain(Whole, "flag")
    assert flag.choices == ("true", "false")
    (part,) = explain(Whole, "part")
    assert (part.value, part.below) == ("a section", ("must_s", "from", "kind", "speed_gb_per_s"))
    assert list(explain(Whole, "part.nothing")) == list(explain(Whole, "flag.below")) == []


def test_every_key_of_a_recipe_can_be_explained() -> None:
    found = {path: list(explain(RunSpec, path)) for path in known_paths(RunSpec)}
    assert all(found.values())
    assert [f"{one.of}.{one.key}" for many in found.values() for one in many if not one.doc] == []
    units = {"cluster.storage_gb_per_s": "GB/s (decimal)", "cluster.reliability.detect_s": "seconds", "optim.lr": ""}
    assert {path: found[path][0].unit for path in units} == units
    assert [
        path for path, (one, *_) in found.items() if path.endswith(("per_s", "bit_s")) and "/" not in one.unit
    ] == []
