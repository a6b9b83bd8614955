"""Dataclasses as JSON and back, and a run's digest. Workers read what `to_plain` wrote, without Hydra."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.structure import build, key_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


class Absent(Enum):
    """The type of `ABSENT`, the value of a field that has no key in the JSON object; null is None."""

    ABSENT = "absent"

    def __bool__(self) -> Literal[False]:
        return False


ABSENT = Absent.ABSENT


def to_plain(value: DataclassInstance) -> JsonObject:
    """Return a dataclass as what JSON holds: dicts, lists, numbers, text. Fields that are `ABSENT` are left out."""
    items = ((key_of(field), getattr(value, field.name)) for field in dataclasses.fields(value))
    return {key: _plain(item) for key, item in items if item is not ABSENT}


def _plain(value: Any) -> JsonValue:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def from_plain(cls: type[T], data: object) -> T:
    """Build a dataclass from the output of `to_plain`. Raises RecipeError with every key that does not fit."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{type(data).__name__} in the place of the fields of {cls.__name__}", code="wrong_type")
    built, problems = build(cls, data)
    if problems:
        raise RecipeError(problems)
    return built


def canonical_json(data: object) -> str:
    """Return JSON that is the same for equal content: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(spec: RunSpec) -> str:
    """Return the sha256 of a spec. The run folder is left out: its location does not change the run."""
    plain = to_plain(spec)
    # A moved or copied run is still the same run.
    plain["run"] = {key: value for key, value in to_plain(spec.run).items() if key != "dir"}
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()
