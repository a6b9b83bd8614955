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
from recipe.conftest import with_value

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


def told(data: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return [(problem.code, problem.path, problem.message, problem.hint) for problem in build(RunSpec, data)[1]]


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
    ("path", "value", "code", "message", "hint"),
    [
        ("train.max_steps", "four", "wrong_type", "`train.max_steps` is 'four'; expected a whole number",
         "set train.max_steps=<a whole number>"),
        ("train.max_steps", 2.5, "wrong_type", "`train.max_steps` is 2.5; expected a whole number",
         "set train.max_steps=<a whole number>"),
        ("train.max_steps", True, "wrong_type", "`train.max_steps` is true; expected a whole number",
         "set train.max_steps=<a whole number>"),
        ("train.max_steps", "", "wrong_type", "`train.max_steps` is empty; expected a whole number",
         "set train.max_steps=<a whole number>"),
        ("train.max_steps", [1], "wrong_type", "`train.max_steps` is [1]; expected a whole number",
         "set train.max_steps=<a whole number>"),
        ("optim.lr", None, "wrong_type", "`optim.lr` is null; expected a number", "set optim.lr=<a number>"),
        ("optim.lr", float("nan"), "wrong_type", "`optim.lr` is nan; expected a number", "set optim.lr=<a number>"),
        ("optim.lr", float("inf"), "wrong_type", "`optim.lr` is inf; expected a number", "set optim.lr=<a number>"),
        ("optim.lr", True, "wrong_type", "`optim.lr` is true; expected a number", "set optim.lr=<a number>"),
        ("compile", "yes", "wrong_type", "`compile` is 'yes'; expected true or false",
         "set compile=true or compile=false"),
        ("compile", 1, "wrong_type", "`compile` is 1; expected true or false", "set compile=true or compile=false"),
        ("sample.prompt", 5, "wrong_type", "`sample.prompt` is 5; expected text",
         "quote it to make it text: 'sample.prompt=\"5\"'"),
        ("data.path", {"x": 1}, "wrong_type", "`data.path` is a section (keys x); expected text or null",
         "set data.path=<text or null>"),
        ("optim.schedule.kind", "cosin", "wrong_choice",
         "`optim.schedule.kind` is 'cosin'; expected constant, cosine or wsd",
         "did you mean optim.schedule.kind=cosine?"),
        ("cluster.device", "gpu", "wrong_choice", "`cluster.device` is 'gpu'; expected cpu, cuda or auto",
         "did you mean cluster.device=cuda?"),
        ("layout.zero_stage", 4, "wrong_choice", "`layout.zero_stage` is 4; expected 1, 2, 3 or auto",
         "set layout.zero_stage=<1, 2, 3 or auto>"),
        ("layout.zero_stage", True, "wrong_choice", "`layout.zero_stage` is true; expected 1, 2, 3 or auto",
         "set layout.zero_stage=<1, 2, 3 or auto>"),
        ("layout.stage_layers", [1, "x"], "wrong_type", "`layout.stage_layers` is [1, 'x']; expected a list or null",
         "set layout.stage_layers=<a list or null>"),
        ("optim.options", 3, "wrong_type", "`optim.options` is 3; expected a section of values by name",
         "set optim.options=<a section of values by name>"),
        ("layout.tp", "aut", "wrong_type", "`layout.tp` is 'aut'; expected a whole number or auto",
         "did you mean layout.tp=auto?"),
        ("train.callbacks", "mine.py:make", "wrong_type", "`train.callbacks` is 'mine.py:make'; expected a list",
         "set train.callbacks=[mine.py:make]"),
        ("train.callbacks", 3, "wrong_type", "`train.callbacks` is 3; expected a list",
         "set train.callbacks=<a list>"),
        ("train", "max_steps:3", "wrong_type",
         "`train` is 'max_steps:3'; expected a section with the keys max_steps, tokens, epochs, "
         "seed, max_skipped_steps, eval_interval_steps, early_stop_evals, sample_interval_steps, log_interval_steps, "
         "loss, loss_options, callbacks", "put a space after the colon"),
        ("sample", None, "wrong_type",
         "`sample` is null; expected a section with the keys prompt, max_new_tokens, temperature",
         "set its keys one by one, such as sample.prompt"),
        ("model", "llama_tiny", "wrong_type", "`model` is 'llama_tiny'; expected a section of keys",
         "to select the option of that name, write `- override /model: llama_tiny` in the recipe's defaults"),
    ],
)  # fmt: skip
def test_what_is_refused(data, path: str, value: Any, code: str, message: str, hint: str) -> None:
    assert told(with_value(data, path, value)) == [(code, path, message, hint)]


@pytest.mark.clause("REC-3")
@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("optim.lrr", "did you mean `optim.lr`?"),
        ("optm", "did you mean `optim`?"),
        ("lr", "did you mean `optim.lr`?"),
        ("train.lr", "did you mean `optim.lr`?"),
        ("batch_size", "did you mean `batching.global_batch_size` or `batching.micro_batch_size`?"),
        ("micro_batch", "did you mean `batching.micro_batch_size`?"),
        ("path", "did you mean `data.path` or `data.tokenizer.path`?"),
        ("optim.warmup-step", "did you mean `optim.schedule.warmup_steps`?"),
        ("optim.learning_rate", "did you mean `optim.lr`?"),
        ("max-grad-norm", "did you mean `optim.grad_clip_norm`?"),
        ("batching.warmup_ratio", "did you mean `optim.schedule.warmup_steps`?"),
        ("optim.zzz", "`optim` has: lr, name, beta1, beta2, eps, momentum, weight_decay, grad_clip_norm, schedule, "
         "options, state_bytes"),
        ("model.block", "set model=own too"),
        ("model.num_classes", "the family conv has this key: `trainspec list model` shows each option's family"),
        ("zzz", f"a recipe has: {', '.join(field.name for field in dataclasses.fields(RunSpec))}"),
    ],
)  # fmt: skip
def test_unknown_keys(data, path: str, hint: str) -> None:
    assert told(with_value(data, path, 1)) == [("unknown_key", path, f"unknown key `{path}`", hint)]


def test_missing_values(data) -> None:
    del data["train"]
    data["optim"]["lr"] = "???"
    data["data"]["path"] = "???"
    assert told(data) == [
        ("missing_value", "data.path", "`data.path` has no value; expected text", "set data.path=<text>"),
        ("missing_value", "optim.lr", "`optim.lr` has no value; expected a number", "set optim.lr=<a number>"),
        ("missing_value", "train.max_steps", "`train.max_steps` has no value; expected a whole number",
         "set train.max_steps=<a whole number>"),
    ]  # fmt: skip


def test_all_faults_at_once_and_the_rest_is_kept_in_a_draft(data) -> None:
    data["optim"] |= {"lr": "x", "eps": "y", "foo": 1}
    draft, problems = build(RunSpec, data)
    assert [problem.path for problem in problems] == ["optim.foo", "optim.lr", "optim.eps"]
    assert (draft.optim.lr is UNKNOWN, draft.optim.beta1, draft.train.max_steps) == (True, 0.9, 20)


def test_types_in_words() -> None:
    assert describe(int | None) == "a whole number or null"
    assert describe(int | None, with_null=False) == "a whole number"
    assert describe(tuple[str, ...]) == "a list"
    assert describe(dict[str, int] | None) == "a section of values by name or null"


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
    ((code, where, message, hint),) = told(with_value(data, path, above))
    assert (code, where, hint) == ("out_of_range", path, f"set {path}={most} or less")
    assert message.endswith(f"; at most {most:,} is allowed")


@pytest.mark.parametrize("value", [-(10**15), 10**15])
def test_the_largest_value_counts_below_zero_too(data, value: int) -> None:
    assert told(with_value(data, "train.seed", value)) == []
    assert told(with_value(data, "train.seed", value + (1 if value > 0 else -1)))[0][0] == "out_of_range"


def test_a_list_has_a_greatest_length_and_its_numbers_a_largest_value(data) -> None:
    assert told(with_value(data, "layout.stage_layers", [1] * 1000)) == []
    ((code, _, message, _),) = told(with_value(data, "layout.stage_layers", [1] * 1001))
    assert (code, message) == ("out_of_range", "`layout.stage_layers` has 1,001 values; at most 1000 are allowed")
    assert told(with_value(data, "layout.stage_layers", [1, 10**15 + 1]))[0][0] == "out_of_range"


def test_a_key_that_many_could_mean_is_no_guess(data) -> None:
    """Three places are named, and more are not."""
    ((_, _, _, hint),) = told(with_value(data, "steps", 1))
    assert hint.startswith("a recipe has: ")


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
    assert [(code, path) for code, path, *_ in found] == [("wrong_type", "sample.prompt")] * refused
    assert all(len(message) < 200 and message.isascii() for _, _, message, _ in found)


@pytest.mark.parametrize("value", [10**400, -(10**400), -1e300], ids=["400 digits", "below 0", "a float"])
def test_a_number_that_no_format_holds_is_too_large_and_breaks_nothing(data, value: float) -> None:
    (problem,) = told(with_value(data, "optim.lr", value))
    assert (problem[0], problem[3]) == ("out_of_range", "set optim.lr=1e+30 or less")


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
    ((code, where, message, hint),) = told(with_value(data, path, "low_rank"))
    assert (code, where) == ("wrong_choice", path)
    assert "is no longer a setting" in message and "comm=int8" in hint


def test_a_former_key_is_passed_over_where_it_states_what_always_holds_and_else_refused(data):
    assert told(with_value(data, "comm.rank", 4)) == []
    ((code, where, message, hint),) = told(with_value(data, "comm.rank", 8))
    assert (code, where, hint) == ("unknown_key", "comm.rank", "leave it out")
    assert "is no longer a setting" in message


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
