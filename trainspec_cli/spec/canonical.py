"""Convert specs and plans to JSON and back, and compute a run's digest. Workers read this JSON without Hydra."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from trainspec_cli.errors import RecipeError
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.structure import build, key_of

T = TypeVar("T")


def to_plain(value: Any) -> dict[str, Any]:
    """Convert a dataclass to JSON types: dicts, lists, numbers, text."""
    return {key_of(field): _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_plain(cls: type[T], data: Mapping[str, Any]) -> T:
    """Build a dataclass from the output of `to_plain`. Raises RecipeError with every key that does not fit."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{type(data).__name__} in the place of the fields of {cls.__name__}", code="wrong_type")
    built, problems = build(cls, data)
    if problems:
        raise RecipeError(problems)
    return built


def canonical_json(data: Any) -> str:
    """Return JSON that is the same for equal content: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(spec: RunSpec) -> str:
    """Return the sha256 of a spec. The run folder is left out: its location does not change the run."""
    plain = to_plain(spec)
    del plain["run"]["dir"]
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()
