from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainspec_cli.core.json_value import flatten
from trainspec_cli.recipe.compose.compose import Composed, compose
from trainspec_cli.recipe.compose.folders import Origin
from trainspec_cli.recipe.compose.render import WIDEST_ALIGNED, render_value, render_yaml


def make(data: dict, origins: dict[str, Origin]) -> Composed:
    return Composed("mine", data, origins, (), Path.cwd())


def test_what_is_rendered_reads_back_as_the_same_values(tmp_path: Path) -> None:
    composed = compose("tiny", ["optim.lr=1e-9", "sample.prompt='# a: \"b\" ~ \\'c'", "run.dir=null"], tmp_path)
    assert yaml.safe_load(render_yaml(composed)) == composed.data


def test_origins_stand_in_one_column_unless_a_line_is_long() -> None:
    data = {"a": 1, "section": {"key": "x" * 60, "b": True}, "empty": {}}
    origins = {"a": Origin("f.yaml", 1, 1), "section.key": Origin("f.yaml", 3, 3), "section.b": Origin("g", 2)}
    assert render_yaml(make(data, origins)).splitlines() == [
        "a: 1       # f.yaml:1",
        "section:",
        f"  key: {'x' * 60}  # f.yaml:3",
        "  b: true  # g:2",
        "empty: {}",
    ]


def test_origins_may_be_painted() -> None:
    text = render_yaml(make({"a": 1}, {"a": Origin("f", 1)}), lambda origin: f"<{origin}>")
    assert text == "a: 1  <# f:1>\n"


def test_flatten_keeps_empty_sections() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


@pytest.mark.parametrize(("length", "column"), [(WIDEST_ALIGNED, WIDEST_ALIGNED), (WIDEST_ALIGNED + 1, 4)])
def test_lines_up_to_a_length_move_the_column(length: int, column: int) -> None:
    long = "x" * (length - len("key: "))
    text = render_yaml(make({"a": 1, "key": long}, {"a": Origin("f", 1), "key": Origin("f", 2)}))
    assert text.splitlines()[0].index("#") == column + 2


@pytest.mark.parametrize(("value", "shown"), [("é", "é"), ("a\u202eb", '"a\\u202Eb"'), ([1, None], "[1, null]")])
def test_what_cannot_be_seen_is_spelt_out(value: object, shown: str) -> None:
    assert render_value(value) == shown
