from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build

SHORTEST: dict[str, Any] = {
    "model": {
        "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 16, "ffn_size": 160, "vocab_size": 512,
    },
    "data": {"seq_len": 64, "source": "python_stdlib", "tokenizer": {"vocab_size": 512}},
    "optim": {"lr": 0.1},
    "batching": {"global_batch_size": 8},
    "train": {"max_steps": 20},
    "cluster": {"devices_per_node": 2},
}  # fmt: skip
"""The shortest whole recipe."""
SPEC, _ = build(RunSpec, SHORTEST)


@pytest.fixture
def data() -> dict[str, Any]:
    return copy.deepcopy(SHORTEST)


def with_value(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set the value of a dotted path, and return all of the data."""
    *sections, name = path.split(".")
    node = data
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    return data


@pytest.fixture
def make_spec(data: dict[str, Any]) -> Callable[..., RunSpec]:
    """make_spec({"optim.lr": 1}): a spec with some values changed."""

    def make(changes: dict[str, Any]) -> RunSpec:
        for path, value in changes.items():
            with_value(data, path, value)
        spec, problems = build(RunSpec, data)
        assert problems == []
        return spec

    return make
