"""Names of other programs lead to keys that exist, and 100 mistypings to the word that was meant."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.intentions import NAMES_BY_KEY, OTHER_WORDS, WITHOUT_KEY, closest, closest_path, hint_for
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import known_choices, known_paths

PATHS = set(known_paths(RunSpec))
NAMES = [*" ".join(NAMES_BY_KEY.values()).split(), *WITHOUT_KEY]


def test_hints_name_keys_and_values_that_recipes_have() -> None:
    for name in NAMES:
        named = re.findall(r"`([^`]+)`", hint_for(name))
        assert named, name
        for key, _, value in (word.partition("=") for word in named):
            assert key in PATHS, f"the hint for {name} names {key}, which recipes do not have"
            assert not value or value in known_choices(RunSpec, key), f"{key} is never {value}"


def test_a_name_stands_once_and_is_no_key_of_a_recipe() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []
    own = {path.rpartition(".")[2] for path in PATHS}
    assert sorted(own & {*NAMES}) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", "did you mean `optim.lr`?"),
        ("per-device-train-batch-size", "did you mean `batching.micro_batch_size`?"),
        ("Tensor_Model_Parallel_Size", "did you mean `layout.tp`?"),
        ("bf16", "did you mean `precision.compute=bf16`?"),
        (
            "gradient_accumulation_steps",
            "the number of micro-batches per step follows from `batching.global_batch_size` and "
            "`batching.micro_batch_size`",
        ),
        ("zzz", ""),
    ],
)
def test_what_is_hinted(name: str, hint: str) -> None:
    assert hint_for(name) == hint


def test_another_word_stands_for_what_is_allowed_where_it_is_typed() -> None:
    assert closest("gpu", ["cpu", "cuda"]) == "cuda"
    assert closest("gpus", ["accelerator", "cluster"]) == "accelerator"
    assert closest("4090", ["rtx_4090", "rtx_a5000"]) == "rtx_4090"
    assert closest("rtx", ["rtx_4090", "rtx_a5000"]) is None
    assert all(word == word.lower() and "-" not in word for word in OTHER_WORDS)
    assert closest_path("optm.lrr", ["optim.lr", "optim.name", "run.dir"]) == "optim.lr"
    assert closest_path("optm.zzz", ["optim.lr", "run.dir"]) is None


LISTS = re.compile(r"(Options|options|Groups|groups|commands|there are|has): ")
"""Before a list of all that there is, which holds every word."""


def hints_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[tuple[int | None, str]]:
    """(number of the argument, what is to be typed in its place)"""
    code = run([*arguments, "--json"])
    printed = json.loads(capsys.readouterr().out)
    if code == 0:
        return [(None, str(printed))]
    assert code in (2, 4), arguments
    return [(error["line"], LISTS.split(error["hint"])[0]) for error in printed["errors"]]


def test_mistypings_lead_to_the_word_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """95 of 100: the wrong keys are given all at once, each wrong value and command by itself."""
    lines = Path(__file__).with_name("mistypings.txt").read_text(encoding="utf-8").splitlines()
    examples = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    groups = {"cluster", "model", "recipe", "data", "optim", "precision"}
    names = Counter(typed.partition("=")[0] for typed, _ in examples)
    missed = []
    together: list[tuple[str, str]] = []
    for typed, meant in examples:
        key = typed.partition("=")[0]
        if typed.startswith("trainspec "):
            hints = [hint for _, hint in hints_of(shlex.split(typed)[1:], capsys)]
        elif key in groups or names[key] > 1 or key.startswith(("cluster.acc", "+", "accel")):
            recipe = [] if key == "recipe" else ["recipe=tiny"]
            hints = [hint for _, hint in hints_of(["validate", *recipe, typed], capsys)]
        else:
            together.append((typed, meant))
            continue
        if not any(_names(hint, meant) for hint in hints):
            missed.append((typed, meant, hints))
    found = hints_of(["validate", "recipe=tiny", *(typed for typed, _ in together)], capsys)
    for number, (typed, meant) in enumerate(together, start=2):
        hints = [hint for line, hint in found if line == number]
        if not any(_names(hint, meant) for hint in hints):
            missed.append((typed, meant, hints))
    assert len(examples) >= 100
    assert len(missed) <= len(examples) * 0.05, missed


def _names(hint: str, word: str) -> bool:
    end = r"(?![\w.]*\w)" if word[-1].isalnum() else ""
    return re.search(rf"(?<![\w.]){re.escape(word)}{end}", hint) is not None
