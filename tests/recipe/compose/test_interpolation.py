from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf.grammar_visitor import GrammarVisitor

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose import interpolation
from trainspec_cli.recipe.compose.interpolation import InterpolationError, Resolver


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


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("${a.b}", 1), ("x${a.b}y", "x1y"), ("${a}", {"b": 1}), ("${list.1}", "two"), ("${to.b}", 1),
        ("plain", "plain"),
        ("${upper:abc}", "ABC"),
    ],
)  # fmt: skip
def test_what_a_reference_leads_to(written: str, resolved: object) -> None:
    values = {"a": {"b": 1}, "list": ["one", "two"], "to": "${a}", "here": written}
    assert Resolver(values, {"upper": str.upper}).value(("here",)) == resolved


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"here": "${gone.b}"}, r"Interpolation key 'gone.b' not found"),
        ({"here": "${list.2}", "list": [1, 2]}, r"Interpolation key 'list.2' not found"),
        ({"here": "${here}"}, "Recursive interpolation detected"),
        ({"here": "${there}", "there": "${here}"}, "Recursive interpolation detected"),
        ({"here": "${open}", "open": "???"}, "`open` has no value"),
        ({"here": "${env:HOME}"}, r"there is no resolver `env` in a recipe, only \$\{upper:...\} and"),
        ({"here": "${upper:a,b}"}, r"\$\{upper:...\} takes one value, not 2"),
    ],
)
def test_what_cannot_be_resolved_says_why(values: dict[str, object], reason: str) -> None:
    with pytest.raises(InterpolationError, match=reason):
        Resolver(values, {"upper": str.upper}).value(("here",))


def test_a_failed_reference_leaves_the_others_readable() -> None:
    resolver = Resolver({"bad": "${bad}", "good": "${one}", "one": 1}, {})
    with pytest.raises(InterpolationError):
        resolver.value(("bad",))
    assert resolver.value(("good",)) == 1


@pytest.mark.clause("REC-6")
def test_texts_and_chains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpolation, "MAX_CHARS", 8)
    resolver = Resolver({"four": "abcd", "eight": "${four}${four}", "nine": "${four}${four}x"}, {})
    assert resolver.value(("eight",)) == "abcdabcd"
    with pytest.raises(InterpolationError, match="a text of more than 8 characters"):
        resolver.value(("nine",))
    chain = {f"k{number}": f"${{k{number + 1}}}" for number in range(60)} | {"k60": 1}
    assert Resolver(chain, {}).value(("k20",)) == 1
    with pytest.raises(InterpolationError, match="more than 40 references"):
        Resolver(chain, {}).value(("k0",))


def test_each_value_is_resolved_once() -> None:
    asked: list[str] = []

    def count(text: str) -> str:
        asked.append(text)
        return text

    resolver = Resolver({"a": "${count:x}", "b": "${a}${a}", "c": "${b}${a}"}, {"count": count})
    assert (resolver.value(("c",)), asked) == ("xxx", ["x"])


def test_items_of_lists_are_named_by_their_number() -> None:
    resolver = Resolver({"a": {"b": [{"c": 5}, 6]}, "one": "${a.b.0.c}", "two": "${a.b.1}", "no": "${a.b.c}"}, {})
    assert (resolver.value(("one",)), resolver.value(("two",))) == (5, 6)
    with pytest.raises(InterpolationError, match="not found"):
        resolver.value(("no",))


def test_references_that_omegaconf_2_4_has_parsed_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2.3 its visitor hands over a reference's text, from 2.4 on a NodeInterpolationKey, whose `raw` it is."""

    class Visitor(GrammarVisitor):
        def __init__(self, refer: Callable[[Any, Any], Any], call: Callable[..., Any], memo: Any):
            super().__init__(lambda key, seen: refer(SimpleNamespace(raw=getattr(key, "raw", key)), seen), call, memo)

    monkeypatch.setattr(interpolation, "GrammarVisitor", Visitor)
    written: JsonObject = {"a": {"b": 1, "near": "${.b}"}, "far": "${a.b}"}
    resolver = Resolver(written, {})
    assert (resolver.value(("a", "near")), resolver.value(("far",))) == (1, 1)
