from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import pytest
from lab.problems import assert_problems, words
from lab.recorded import Recorded
from recipe.conftest import with_value

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.intentions import FORMER_KEYS, FORMER_WORDS
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.recipe.json_schema import path_of_group
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec
from trainspec_cli.recipe.records import (
    OPTION_SECTIONS,
    UNKNOWN,
    UnknownTouched,
    build,
    choices_of,
    describe,
    hints_of,
    key_of,
    known_paths,
    sections_of,
)
from trainspec_cli.recipe.results.plan import Plan


def told(data: dict[str, Any]) -> list[Problem]:
    return build(RunSpec, data)[1]


def test_a_whole_recipe(data) -> None:
    spec, problems = build(RunSpec, data)
    assert isinstance(spec, RunSpec)
    assert (spec.optim.lr, spec.optim.beta2, spec.layout.dp_shard, problems) == (0.1, 0.95, "auto", [])


@pytest.mark.parametrize(
    ("path", "given", "taken"),
    [
        ("train.max_steps", 1e3, 1000),
        ("optim.lr", 1, 1.0),
        ("layout.tp", "auto", "auto"),
        ("layout.tp", 2.0, 2),
        ("layout.zero_stage", 2, 2),
        ("checkpoint.interval_steps", None, None),
        ("optim.grad_clip_norm", None, None),
        ("optim.grad_clip_norm", 2, 2.0),
        ("cluster.device", "cuda", "cuda"),
        ("data.path", "x", "x"),
        ("compile", False, False),
        ("layout.stage_layers", [1, 2.0], (1, 2)),
        ("resilience.hang_floor_s", None, None),
    ],
)
def test_what_is_accepted(data, path: str, given: Any, taken: Any) -> None:
    spec, problems = build(RunSpec, with_value(data, path, given))
    value = attrgetter(path)(spec)
    assert (value, type(value), problems) == (taken, type(taken), [])


@pytest.mark.clause("REC-4")
@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("train.max_steps", "four", "wrong_type"),
        ("train.max_steps", 2.5, "wrong_type"),
        ("train.max_steps", True, "wrong_type"),
        ("train.max_steps", "", "wrong_type"),
        ("train.max_steps", [1], "wrong_type"),
        ("optim.lr", None, "wrong_type"),
        ("optim.lr", float("nan"), "wrong_type"),
        ("optim.lr", float("inf"), "wrong_type"),
        ("optim.lr", True, "wrong_type"),
        ("compile", "yes", "wrong_type"),
        ("compile", 1, "wrong_type"),
        ("sample.prompt", 5, "wrong_type"),
        ("data.path", {"x": 1}, "wrong_type"),
        ("optim.schedule.kind", "cosin", "wrong_choice"),
        ("cluster.device", "gpu", "wrong_choice"),
        ("layout.zero_stage", 4, "wrong_choice"),
        ("layout.zero_stage", True, "wrong_choice"),
        ("layout.stage_layers", [1, "x"], "wrong_type"),
        ("optim.options", 3, "wrong_type"),
        ("layout.tp", "aut", "wrong_type"),
        ("train.callbacks", "mine.py:make", "wrong_type"),
        ("train.callbacks", 3, "wrong_type"),
        ("train", "max_steps:3", "wrong_type"),
        ("sample", None, "wrong_type"),
        ("model", "llama_tiny", "wrong_type"),
    ],
)
def test_what_is_refused(data, path: str, value: Any, code: str, recorded: Recorded) -> None:
    problems = told(with_value(data, path, value))
    assert_problems(problems, (code, path, f"`{path}`"))
    recorded(words(problems))


@pytest.mark.clause("REC-3")
@pytest.mark.parametrize(
    "path",
    [
        *("optim.lrr", "optm", "lr", "train.lr", "batch_size", "micro_batch", "path", "optim.warmup-step"),
        *("optim.learning_rate", "max-grad-norm", "batching.warmup_ratio", "optim.zzz", "model.block"),
        *("model.num_classes", "zzz"),
    ],
)
def test_unknown_keys(data, path: str, recorded: Recorded) -> None:
    problems = told(with_value(data, path, 1))
    assert_problems(problems, ("unknown_key", path, f"`{path}`"))
    recorded(words(problems))


def test_missing_values(data) -> None:
    del data["train"]
    data["optim"]["lr"] = "???"
    data["data"]["path"] = "???"
    assert_problems(
        told(data),
        ("missing_value", "data.path", "`data.path`", "data.path=<text>"),
        ("missing_value", "optim.lr", "`optim.lr`", "optim.lr=<a number>"),
        ("missing_value", "train.max_steps", "`train.max_steps`", "train.max_steps=<a whole number>"),
    )


def test_all_faults_at_once_and_the_rest_is_kept_in_a_draft(data) -> None:
    data["optim"] |= {"lr": "x", "eps": "y", "foo": 1}
    draft, problems = build(RunSpec, data)
    assert [problem.path for problem in problems] == ["optim.foo", "optim.lr", "optim.eps"]
    assert (draft.optim.lr is UNKNOWN, draft.optim.beta1, draft.train.max_steps) == (True, 0.9, 20)


def test_types_in_words() -> None:
    whole, words_by_name = describe(int), describe(dict[str, int])
    assert describe(int | None, with_null=False) == whole != words_by_name
    assert describe(int | None) == f"{whole} or null" and describe(dict[str, int] | None) == f"{words_by_name} or null"
    assert (whole, describe(tuple[str, ...]), words_by_name[:9]) == ("a whole number", "a list", "a section")


def test_known_paths_reach_into_sections() -> None:
    assert {"seq_len", "tokenizer", "tokenizer.vocab_size"} <= set(known_paths(DataSpec))


@pytest.mark.parametrize(
    ("path", "most"),
    [("train.max_steps", 10**12), ("layout.tp", 10**6), ("train.seed", 10**15), ("optim.lr", 1e30),
     ("model.num_layers", 10**4), ("batching.global_batch_size", 10**9)],
)  # fmt: skip
def test_numbers_have_a_largest_value(data, path: str, most: float) -> None:
    assert told(with_value(data, path, most)) == []
    above = most * 2 if isinstance(most, float) else most + 1
    too_large = ("out_of_range", path, f"{most:,}", f"set {path}={most} or less")
    assert_problems(told(with_value(data, path, above)), too_large)


@pytest.mark.parametrize("value", [-(10**15), 10**15])
def test_the_largest_value_counts_below_zero_too(data, value: int) -> None:
    assert told(with_value(data, "train.seed", value)) == []
    assert told(with_value(data, "train.seed", value + (1 if value > 0 else -1)))[0].code == "out_of_range"


def test_a_list_has_a_greatest_length_and_its_numbers_a_largest_value(data) -> None:
    assert told(with_value(data, "layout.stage_layers", [1] * 1000)) == []
    too_long = ("out_of_range", "layout.stage_layers", "1,001", "1000")
    assert_problems(told(with_value(data, "layout.stage_layers", [1] * 1001)), too_long)
    assert told(with_value(data, "layout.stage_layers", [1, 10**15 + 1]))[0].code == "out_of_range"


def test_a_key_that_many_could_mean_is_no_guess(data) -> None:
    """Three places are named, and more are not."""
    (problem,) = told(with_value(data, "steps", 1))
    assert problem.hint.startswith("a recipe has: ")


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "arrow", "chat", "tokens", "nanogpt", "megatron"])
def test_every_kind_of_text_may_be_a_part(make_spec, source: str) -> None:
    part = {"source": source, "path": "x"}
    spec = make_spec({"data.source": "mixture", "data.mixture": {"a": part}, "data.validation": {"b": part}})
    assert (spec.data.mixture["a"].source, spec.data.validation["b"].source) == (source, source)


@pytest.mark.parametrize(
    ("text", "refused"),
    [("x" * 100_000, False), ("x" * 100_001, True), ("a\0b", True), ("\ud800", True), ("ünïcode \n \U0001f600", False)],
    ids=["as long as can be", "too long", "NUL", "half a surrogate pair", "any other characters"],
)
def test_text_that_no_file_could_hold_is_refused(data, text: str, refused: bool) -> None:
    """NUL would cut a path, and half a surrogate pair has no UTF-8."""
    found = told(with_value(data, "sample.prompt", text))
    assert_problems(found, *[("wrong_type", "sample.prompt")] * refused)
    assert all(len(problem.message) < 200 and problem.message.isascii() for problem in found)


@pytest.mark.parametrize("value", [10**400, -(10**400), -1e300], ids=["400 digits", "below 0", "a float"])
def test_a_number_that_no_format_holds_is_too_large_and_breaks_nothing(data, value: float) -> None:
    assert_problems(told(with_value(data, "optim.lr", value)), ("out_of_range", "optim.lr", "optim.lr=1e+30"))


def test_the_sections_that_options_fill_are_the_groups() -> None:
    sections = {path_of_group(group) for group in find_folders(Path.cwd()).groups} - {"cluster.accelerator"}
    assert sections == OPTION_SECTIONS


@pytest.mark.parametrize(
    ("section", "below", "meant"),
    [
        ("optm", {"lr": 1}, "optim.lr"),
        ("optm", {"schedul": {"kind": "cosine"}}, "optim.schedule.kind"),
        ("training", {"learning_rate": 1}, "optim.lr"),
        ("parallel", {"tp": 2}, "layout.tp"),
        ("optm", {"lr": 1, "name": "sgd"}, "optim"),
    ],
)
def test_a_hint_names_the_whole_key_below_a_wrong_section(data, section: str, below: dict, meant: str) -> None:
    (problem,) = build(RunSpec, data | {section: below})[1]
    assert problem.hint == f"did you mean `{meant}`?"


@pytest.mark.parametrize("name", ["gradients", "across_nodes"])
def test_a_word_that_a_key_no_longer_takes_is_refused_with_what_takes_its_place(data, name):
    path = f"comm.{name}"
    gone = ("wrong_choice", path, "no longer", "comm=int8")
    assert_problems(told(with_value(data, path, "low_rank")), gone)


def test_a_former_key_is_passed_over_where_it_states_what_always_holds_and_else_refused(data):
    assert told(with_value(data, "comm.rank", 4)) == []
    assert_problems(told(with_value(data, "comm.rank", 8)), ("unknown_key", "comm.rank", "no longer", "leave it out"))


def classes_below(cls: type) -> Iterator[type]:
    yield cls
    for wanted in hints_of(cls).values():
        for section in sections_of(wanted):
            yield from classes_below(section)


def test_every_former_key_is_of_a_section_that_has_no_such_key():
    sections = {cls.__name__: cls for cls in (*classes_below(RunSpec), *classes_below(Plan))}
    for section, key in FORMER_KEYS:
        assert key not in {key_of(field) for field in dataclasses.fields(sections[section])}
    for section, key, word in FORMER_WORDS:
        assert word not in choices_of(hints_of(sections[section])[key])


# Sections that may be one of several kinds, and sections of values by name.


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


ROUND = {"shape": {"radius": 1}}


@pytest.mark.parametrize(
    ("data", "drawing"),
    [
        (ROUND, Drawing(Round(1.0))),
        ({"shape": {"family": "square", "side": 2}}, Drawing(Square(2.0))),
        (ROUND | {"frame": None, "sources": None}, Drawing(Round(1.0))),
        (
            ROUND | {"prices": {"ink": 2, "paper": 0.5}, "sources": {"ink": "a shop"}},
            Drawing(Round(1.0), prices={"ink": 2.0, "paper": 0.5}, sources={"ink": "a shop"}),
        ),
    ],
    ids=["the first kind", "the kind that the family names", "null", "values by name"],
)
def test_what_a_section_is_made_of(data: dict[str, Any], drawing: Drawing) -> None:
    assert build(Drawing, data) == (drawing, [])


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"shape": {"family": "square", "side": 1, "radius": 2}}, "shape.radius"),
        (ROUND | {"frame": {"side": "wide"}}, "frame.side"),
        (ROUND | {"prices": {"ink": "dear", "paper": 1}}, "prices.ink"),
    ],
)
def test_faults_in_a_section_have_their_whole_path(data: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in build(Drawing, data)[1]] == [path]


def test_a_misspelt_key_of_any_family_is_recognised() -> None:
    _, problems = build(RunSpec, {"model": {"family": "hybrid", "mamba_layer": 3}})
    hints = {problem.path: problem.hint for problem in problems}
    assert "model.mamba_layers" in hints["model.mamba_layer"]


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
