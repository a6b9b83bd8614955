"""Names of other programs lead to keys that exist, and none of them is a key itself."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from trainspec_cli.spec.foreign_names import NAMES_BY_KEY, all_names, hint_for
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.structure import known_choices, known_paths

PATHS = set(known_paths(RunSpec))


def test_hints_name_keys_and_values_that_recipes_have() -> None:
    for name in all_names():
        named = re.findall(r"`([^`]+)`", hint_for(name))
        assert named, name
        for key, _, value in (word.partition("=") for word in named):
            assert key in PATHS, f"the hint for {name} names {key}, which recipes do not have"
            assert not value or value in known_choices(RunSpec, key), f"{key} is never {value}"


def test_a_name_stands_once_and_is_no_key_of_a_recipe() -> None:
    names = Counter(name for names in NAMES_BY_KEY.values() for name in names.split())
    assert [name for name, count in names.items() if count > 1] == []
    own = {path.rpartition(".")[2] for path in PATHS}
    assert sorted(own & {*all_names()}) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", "did you mean `optim.lr`?"),
        ("per-device-train-batch-size", "did you mean `batching.micro_batch_size`?"),
        ("Tensor_Model_Parallel_Size", "did you mean `layout.tp`?"),
        ("bf16", "did you mean `precision.compute=bf16`?"),
        (
            "gradient_accumulation_steps",
            "a rank's micro-batches of a step follow from `batching.global_batch_size` and `batching.micro_batch_size`",
        ),
        ("zzz", ""),
    ],
)
def test_what_is_hinted(name: str, hint: str) -> None:
    assert hint_for(name) == hint
