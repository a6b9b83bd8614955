"""Values as plain dicts: laid over one another, resolved, and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf.grammar_visitor import GrammarVisitor

from trainspec_cli.core.json_value import JsonObject, flatten
from trainspec_cli.recipe.compose import values
from trainspec_cli.recipe.compose.compose import compose
from trainspec_cli.recipe.compose.folders import Origin, shipped_data
from trainspec_cli.recipe.compose.values import (
    MISSING,
    WIDEST_ALIGNED,
    InterpolationError,
    Resolver,
    overlaid,
    render_value,
    render_yaml,
)


def test_a_reference_may_start_at_the_section_above_its_own() -> None:
    train = {"steps": 7, "seed": "${.steps}", "more": "${..name}", "above": "${...name}"}
    resolver = Resolver({"train": train, "name": "tiny"})
    assert (resolver.value(("train", "seed")), resolver.value(("train", "more"))) == (7, "tiny")
    with pytest.raises(InterpolationError, match="not found"):
        resolver.value(("train", "above"))


def test_the_values_behind_a_reference_to_a_section_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_VALUES", 8)
    sections = {"small": {"x": 1, "y": 2}, "two": ["${small}", "${small}"], "three": ["${small}"] * 3}
    resolver = Resolver(sections)
    assert resolver.value(("two",)) == [{"x": 1, "y": 2}] * 2
    with pytest.raises(InterpolationError, match="more than 8 values"):
        resolver.value(("three",))


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("${a.b}", 1), ("x${a.b}y", "x1y"), ("${a}", {"b": 1}), ("${list.1}", "two"), ("${to.b}", 1),
        ("plain", "plain"),
        ("${shipped:recipes}", str(shipped_data() / "recipes")),
    ],
)  # fmt: skip
def test_what_a_reference_leads_to(written: str, resolved: object) -> None:
    written_values = {"a": {"b": 1}, "list": ["one", "two"], "to": "${a}", "here": written}
    assert Resolver(written_values).value(("here",)) == resolved


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"here": "${gone.b}"}, "'gone.b'"),
        ({"here": "${list.2}", "list": [1, 2]}, "'list.2'"),
        ({"here": "${here}"}, "Recursive"),
        ({"here": "${there}", "there": "${here}"}, "Recursive"),
        ({"here": "${open}", "open": "???"}, "`open` has no value"),
        ({"here": "${env:HOME}"}, r"no resolver `env`, only \$\{shipped:...\}"),
        ({"here": "${shipped:a,b}"}, r"\$\{shipped:...\} .* not 2"),
    ],
)
def test_what_cannot_be_resolved_says_why(written: dict[str, object], reason: str) -> None:
    with pytest.raises(InterpolationError, match=reason):
        Resolver(written).value(("here",))


def test_a_failed_reference_leaves_the_others_readable() -> None:
    resolver = Resolver({"bad": "${bad}", "good": "${one}", "one": 1})
    with pytest.raises(InterpolationError):
        resolver.value(("bad",))
    assert resolver.value(("good",)) == 1


@pytest.mark.clause("REC-6")
def test_texts_and_chains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_CHARS", 8)
    resolver = Resolver({"four": "abcd", "eight": "${four}${four}", "nine": "${four}${four}x"})
    assert resolver.value(("eight",)) == "abcdabcd"
    with pytest.raises(InterpolationError, match="more than 8 characters"):
        resolver.value(("nine",))
    chain = {f"k{number}": f"${{k{number + 1}}}" for number in range(60)} | {"k60": 1}
    assert Resolver(chain).value(("k20",)) == 1
    with pytest.raises(InterpolationError, match="more than 40 references"):
        Resolver(chain).value(("k0",))


def test_each_value_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(values, "shipped_data", lambda: asked.append(1) or Path("x"))
    resolver = Resolver({"a": "${shipped:y}", "b": "${a}${a}", "c": "${b}${a}"})
    assert (resolver.value(("c",)), asked) == ("x/yx/yx/y", [1])


def test_items_of_lists_are_named_by_their_number() -> None:
    resolver = Resolver({"a": {"b": [{"c": 5}, 6]}, "one": "${a.b.0.c}", "two": "${a.b.1}", "no": "${a.b.c}"})
    assert (resolver.value(("one",)), resolver.value(("two",))) == (5, 6)
    with pytest.raises(InterpolationError, match="not found"):
        resolver.value(("no",))


def test_references_that_omegaconf_2_4_has_parsed_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2.3 its visitor hands over a reference's text, from 2.4 on a NodeInterpolationKey, whose `raw` it is."""

    class Visitor(GrammarVisitor):
        def __init__(self, refer: Callable[[Any, Any], Any], call: Callable[..., Any], memo: Any):
            super().__init__(lambda key, seen: refer(SimpleNamespace(raw=getattr(key, "raw", key)), seen), call, memo)

    monkeypatch.setattr(values, "GrammarVisitor", Visitor)
    written: JsonObject = {"a": {"b": 1, "near": "${.b}"}, "far": "${a.b}"}
    resolver = Resolver(written)
    assert (resolver.value(("a", "near")), resolver.value(("far",))) == (1, 1)


@pytest.mark.parametrize(
    ("below", "above", "whole"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"a": {"b": 2}}, {"a": None}, {"a": None}),
        ({"a": None}, {"a": MISSING, "b": MISSING}, {"a": MISSING, "b": MISSING}),
    ],
)
def test_what_lies_above_counts_section_by_section(below: dict, above: dict, whole: dict) -> None:
    assert overlaid(below, above) == whole


def test_values_behind_an_alias_of_yaml_are_copies() -> None:
    shared = {"x": [{"y": 1}]}
    whole = overlaid({}, {"one": shared, "two": shared})
    whole["one"]["x"][0]["y"] = 2
    assert (whole["two"], shared) == ({"x": [{"y": 1}]}, {"x": [{"y": 1}]})


def test_what_is_rendered_reads_back_as_the_same_values(tmp_path: Path) -> None:
    composed = compose("tiny", ["optim.lr=1e-9", "sample.prompt='# a: \"b\" ~ \\'c'", "run.dir=null"], tmp_path)
    assert yaml.safe_load(render_yaml(composed.data, composed.origins)) == composed.data


def test_origins_stand_in_one_column_unless_a_line_is_long() -> None:
    data = {"a": 1, "section": {"key": "x" * 60, "b": True}, "empty": {}}
    origins = {"a": Origin("f.yaml", 1, 1), "section.key": Origin("f.yaml", 3, 3), "section.b": Origin("g", 2)}
    assert render_yaml(data, origins).splitlines() == [
        "a: 1       # f.yaml:1",
        "section:",
        f"  key: {'x' * 60}  # f.yaml:3",
        "  b: true  # g:2",
        "empty: {}",
    ]


def test_origins_may_be_painted() -> None:
    text = render_yaml({"a": 1}, {"a": Origin("f", 1)}, lambda origin: f"<{origin}>")
    assert text == "a: 1  <# f:1>\n"


def test_flatten_keeps_empty_sections() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


@pytest.mark.parametrize(("length", "column"), [(WIDEST_ALIGNED, WIDEST_ALIGNED), (WIDEST_ALIGNED + 1, 4)])
def test_lines_up_to_a_length_move_the_column(length: int, column: int) -> None:
    long = "x" * (length - len("key: "))
    text = render_yaml({"a": 1, "key": long}, {"a": Origin("f", 1), "key": Origin("f", 2)})
    assert text.splitlines()[0].index("#") == column + 2


@pytest.mark.parametrize(("value", "shown"), [("é", "é"), ("a\u202eb", '"a\\u202Eb"'), ([1, None], "[1, null]")])
def test_what_cannot_be_seen_is_spelt_out(value: object, shown: str) -> None:
    assert render_value(value) == shown
