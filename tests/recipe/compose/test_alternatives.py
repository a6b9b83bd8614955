"""Which of several keys that take one another's place stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose.compose import Completion, amend, compose

GRANDPARENT = "train: {max_steps: 5}"
PARENT = "defaults: [old]\ntrain: {tokens: 6}"
CHILD = "defaults: [middle]\ntrain: {epochs: 7}"


@pytest.mark.clause("REC-2")
@pytest.mark.parametrize(
    ("recipe", "arguments", "kept"),
    [
        ("old", [], {"max_steps": 5}),
        ("middle", [], {"tokens": 6}),
        ("young", [], {"epochs": 7}),
        ("young", ["train.max_steps=8"], {"max_steps": 8}),
        ("young", ["~train.epochs"], {"tokens": 6}),
        ("middle", ["train.tokens=null"], {"max_steps": 5}),
        ("old", ["train.tokens=8", "train.epochs=9"], {"tokens": 8, "epochs": 9}),
    ],
)
def test_what_is_given_last_takes_the_place_of_the_others(
    write, tmp_path: Path, recipe: str, arguments: list[str], kept: dict[str, int]
) -> None:
    for name, text in (("old", GRANDPARENT), ("middle", PARENT), ("young", CHILD)):
        write(f"recipes/{name}.yaml", text)
    composed = compose(recipe, arguments, tmp_path)
    train = composed.data["train"]
    keys = ("max_steps", "tokens", "epochs")
    assert {key: train[key] for key in keys if train.get(key) not in (None, "???")} == kept
    assert {key for key in keys if f"train.{key}" in composed.origins and train.get(key) in kept.values()} == set(kept)


def test_an_argument_takes_the_place_of_a_runs_own_value() -> None:
    def complete(data: JsonObject, _: frozenset[str]) -> Completion:
        seen.append(data["train"])
        return Completion({"train": {"max_steps": 9}}, "train.tokens")

    seen: list[object] = []
    own: JsonObject = {"train": {"max_steps": 5, "epochs": 7.0, "tokens": None}}
    composed = amend("mine", own, ["train.tokens=6"], [complete])
    assert seen == [{"tokens": 6}]
    assert composed.data["train"] == {"tokens": 6, "max_steps": 9}
    assert composed.origins["train.max_steps"] == composed.origins["train.tokens"]
    assert amend("mine", own, [], []).data == own
