from __future__ import annotations

import shlex

import pytest

from trainspec_cli.recipe.compose.values import MAX_ARGUMENT_CHARS, assign, parse_arguments, value_paths


def told(*texts: str) -> list[tuple[str, str, str]]:
    return [(problem.code, problem.message, problem.hint) for problem in parse_arguments(texts)[1]]


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
    hint = "type ~optim.eps, or optim.eps=..."
    assert told("~optim.eps=3") == [("bad_override", "`~optim.eps` takes no value", hint)]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("quickstart", "`quickstart` is not of the form key=value", "to choose a recipe, set recipe=quickstart"),
        ("optim.lr", "`optim.lr` is not of the form key=value", "set optim.lr=<value>, without spaces"),
        ("optim.lr: 3", "`optim.lr: 3` is not of the form key=value", "set optim.lr=3"),
        ("", "an argument is empty", "leave it out, or write key=value"),
        ("a..b=1", "`a..b` is not a key; a key is words joined by dots, such as optim.lr",
         "write key=value without spaces"),
        ("-train.seed=1", "`-train.seed` is not a key; a key is words joined by dots, such as optim.lr",
         "did you mean `train.seed`?"),
        ("a[0]=1", "`a[0]` is not a key; a key is words joined by dots, such as optim.lr",
         "write the complete list: a=[...]"),
        ("data.path=~/text", "the value ~/text contains characters that must be quoted", "set 'data.path=\"~/text\"'"),
        ("data.path=[a", "`[` is not closed in [a", "close the ["),
        ("sample.prompt='a", "`'` is not closed in 'a", "close the '"),
    ],
)  # fmt: skip
def test_says_what_is_wrong_with_an_argument(text: str, message: str, hint: str) -> None:
    assert told(text) == [("bad_override", message, hint)]


@pytest.mark.parametrize("text", ["train.seed=1,2", "train.seed=choice(1,2)", "train.seed=range(1,3)"])
def test_a_run_takes_one_value(text: str) -> None:
    assert told(text)[0][:2] == ("bad_override", "`train.seed` has several values; a run needs one")


@pytest.mark.parametrize("value", ["~/x", 'dé"f', "a=b", "it's", "#1 \\ 2\\"])
def test_the_quoting_that_is_advised_works(value: str) -> None:
    (argument,), problems = parse_arguments(shlex.split(shlex.quote(assign("data.path", value))))
    assert (argument.value, problems) == (value, [])


def test_hydras_own_keys_are_refused() -> None:
    message = "`hydra.run.dir` belongs to Hydra's own launcher, which trainspec does not use"
    assert told("hydra.run.dir=x") == [("unknown_key", message, "leave it out")]


def test_a_key_given_twice() -> None:
    message = "`optim.lr` is given twice: optim.lr=1 (argument 1) and ++optim.lr=2"
    assert told("optim.lr=1", "++optim.lr=2") == [("duplicate_override", message, "keep one of them")]
    message = "`train.seed` is given twice: train={seed: 1} (argument 1) and train.seed=2"
    assert told("train={seed: 1}", "train.seed=2") == [("duplicate_override", message, "keep one of them")]


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
    ((code, message, hint),) = told("data.path=" + "x" * (longest + 1))
    assert (code, hint) == ("bad_override", "write the value into a recipe: recipe=FILE.yaml")
    limit = f"{MAX_ARGUMENT_CHARS + 1:,} characters; at most {MAX_ARGUMENT_CHARS:,} are allowed"
    assert message == f"the argument `data.path` has {limit}"


@pytest.mark.parametrize(
    ("text", "hint"),
    [("--json", "options come before the first `--`"), ("model@other=x", "write only the key: packages (`@`)")],
)
def test_options_and_packages_are_no_keys(text: str, hint: str) -> None:
    ((_, _, found),) = told(text)
    assert found.startswith(hint)


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
