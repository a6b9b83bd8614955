from __future__ import annotations

import shlex

import pytest
from lab.problems import assert_problems

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.compose.values import MAX_ARGUMENT_CHARS, assign, parse_arguments, value_paths


def told(*texts: str) -> list[Problem]:
    return parse_arguments(texts)[1]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("+optim.lr=1", "optim.lr", 1),
        ("++optim.lr=1", "optim.lr", 1),
        ("train.max_steps=1_000", "train.max_steps", 1000),
        ("compile=true", "compile", True),
        ("sample.prompt='1,2'", "sample.prompt", "1,2"),
        ("data.path=/tmp/a b", "data.path", "/tmp/a b"),
        ("checkpoint.interval_steps=null", "checkpoint.interval_steps", None),
        ("sample.prompt=", "sample.prompt", ""),
        ("model={num_layers: 3}", "model", {"num_layers": 3}),
        ("recipe=my, own=.yaml", "recipe", "my, own=.yaml"),
        ("recipe='tiny'", "recipe", "tiny"),
    ],
)
def test_reads_key_and_value(text: str, key: str, value: object) -> None:
    (argument,), problems = parse_arguments([text])
    assert (argument.key, argument.value, argument.number, problems) == (key, value, 1, [])


def test_tilde_takes_a_key_out() -> None:
    (argument,), _ = parse_arguments(["~optim.eps"])
    assert (argument.key, argument.deletes) == ("optim.eps", True)
    assert_problems(told("~optim.eps=3"), ("bad_override", "optim.eps", "type ~optim.eps", "optim.eps=..."))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("quickstart", ("`quickstart`", "key=value", "set recipe=quickstart")),
        ("optim.lr", ("`optim.lr`", "key=value", "set optim.lr=<value>")),
        ("optim.lr: 3", ("`optim.lr: 3`", "key=value", "set optim.lr=3")),
        ("", ("empty", "key=value")),
        ("a..b=1", ("`a..b`", "such as optim.lr")),
        ("-train.seed=1", ("`-train.seed`", "such as optim.lr", "`train.seed`?")),
        ("a[0]=1", ("`a[0]`", "such as optim.lr", "a=[...]")),
        ("data.path=~/text", ("~/text", "'data.path=\"~/text\"'")),
        ("data.path=[a", ("`[`", "[a", "close the [")),
        ("sample.prompt='a", ("`'`", "'a", "close the '")),
    ],
)
def test_says_what_is_wrong_with_an_argument(text: str, parts: tuple[str, ...]) -> None:
    assert_problems(told(text), ("bad_override", "command line:1", *parts))


@pytest.mark.parametrize("text", ["train.seed=1,2", "train.seed=choice(1,2)", "train.seed=range(1,3)"])
def test_a_run_takes_one_value(text: str) -> None:
    assert_problems(told(text), ("bad_override", "command line:1", "`train.seed`", "several values"))


@pytest.mark.parametrize("value", ["~/x", 'dé"f', "a=b", "it's", "#1 \\ 2\\"])
def test_the_quoting_that_is_advised_works(value: str) -> None:
    (argument,), problems = parse_arguments(shlex.split(shlex.quote(assign("data.path", value))))
    assert (argument.value, problems) == (value, [])


def test_hydras_own_keys_are_refused() -> None:
    assert_problems(told("hydra.run.dir=x"), ("unknown_key", "command line:1", "`hydra.run.dir`", "Hydra"))


def test_a_key_given_twice() -> None:
    first = ("`optim.lr`", "optim.lr=1 (argument 1)", "++optim.lr=2")
    assert_problems(told("optim.lr=1", "++optim.lr=2"), ("duplicate_override", "command line:2", *first))
    whole = ("`train.seed`", "train={seed: 1} (argument 1)", "train.seed=2")
    assert_problems(told("train={seed: 1}", "train.seed=2"), ("duplicate_override", "command line:2", *whole))


def test_choosing_a_group_and_changing_its_values_is_no_duplicate() -> None:
    assert told("model=llama_6m", "model={num_layers: 2}", "model.num_heads=2")[1:] == []
    assert told("optim=sgd", "optim.lr=1") == []


def test_faults_are_numbered_by_argument_and_hide_no_others() -> None:
    arguments, problems = parse_arguments(["recipe=tiny", "oops", "optim.lr=1", "a=[1"])
    assert [argument.key for argument in arguments] == ["recipe", "optim.lr"]
    assert [problem.where() for problem in problems] == ["command line:2", "command line:4"]


def test_an_argument_may_have_so_many_characters() -> None:
    longest = MAX_ARGUMENT_CHARS - len("data.path=")
    assert told("data.path=" + "x" * longest) == []
    limits = (f"{MAX_ARGUMENT_CHARS + 1:,}", f"{MAX_ARGUMENT_CHARS:,}")
    too_long = ("bad_override", "command line:1", "`data.path`", "recipe=FILE.yaml", *limits)
    assert_problems(told("data.path=" + "x" * (longest + 1)), too_long)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("--json", "the first `--`"), ("model@other=x", "packages (`@`)")],
)
def test_options_and_packages_are_no_keys(text: str, hint: str) -> None:
    (problem,) = told(text)
    assert hint in problem.hint


def test_a_whole_section_and_a_value_of_it_are_a_duplicate_in_either_order() -> None:
    texts = ["train.seed=2", "train={seed: 1}"]
    assert [problem.code for problem in parse_arguments(texts)[1]] == ["duplicate_override"]
    assert parse_arguments(texts)[1][0].line == 2


def test_of_a_key_given_twice_the_last_stays() -> None:
    arguments, _ = parse_arguments(["optim.lr=1", "optim.lr=2"])
    assert [(argument.key, argument.value, argument.number) for argument in arguments] == [("optim.lr", 2, 2)]


def test_paths_of_a_section() -> None:
    assert list(value_paths("a", {"b": {"c": 1}, "d": 2})) == ["a", "a.b", "a.b.c", "a.d"]
    assert list(value_paths("a", [1])) == ["a"]
