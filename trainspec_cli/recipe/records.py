"""Records that trainspec writes and reads: dataclasses whose annotations state which values a field may have on disk.

Reading tolerates other versions and refuses damaged files: unknown keys are ignored, a missing key gets the field's
default, and a value of the wrong kind raises FieldError.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import show_kind
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.structure import build, is_required, key_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Conversion of dataclasses to JSON and back, and a run's digest. Workers read the output of `to_plain` without Hydra.


T = TypeVar("T")


class Absent(Enum):
    """The type of `ABSENT`, the value of a field that has no key in the JSON object; null is None."""

    ABSENT = "absent"

    def __bool__(self) -> Literal[False]:
        return False


ABSENT = Absent.ABSENT


def to_plain(value: DataclassInstance) -> JsonObject:
    """Convert a dataclass to JSON values: dicts, lists, numbers, text. Fields that are `ABSENT` are left out."""
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
    """Build a dataclass from the output of `to_plain`. Raises RecipeError that lists every key that does not fit."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"found {type(data).__name__} where {cls.__name__}'s fields are needed", code="wrong_type")
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


class FieldError(ValueError):
    """A field is missing, or its value has the wrong kind."""


@dataclass(frozen=True)
class ValueKind:
    """The values that a field may have."""

    name: str
    """The kind's name in error messages."""
    read: Callable[[object], Any]
    """Returns the value as the record holds it. Raises FieldError for a value of another kind."""
    schema: JsonObject = field(default_factory=dict, compare=False)
    """The JSON Schema of these values; an empty schema allows anything."""
    section: type | None = None
    """The dataclass that `from_plain` builds from such a value; its schema applies."""


def number(low: float, high: float, *, whole: bool = False, may_diverge: bool = False) -> ValueKind:
    """Return the kind of a number from `low` to `high`. `may_diverge`: accept NaN and infinity too."""

    def read(value: object) -> float:
        # Not isinstance: a boolean is an int in Python, and `true` is not a count.
        if type(value) is int or (type(value) is float and not whole):
            if low <= value <= high:
                return value
            if may_diverge and not math.isfinite(value):
                return value
        raise FieldError

    limits = {"minimum": low, "maximum": high}
    schema: JsonObject = {"type": "integer" if whole else "number"}
    schema |= {name: limit for name, limit in limits.items() if math.isfinite(limit)}
    return ValueKind(f"{'a whole number' if whole else 'a number'} from {low:g} to {high:g}", read, schema)


# Other JSON readers hold numbers as doubles, which are exact up to 2**53.
Count = Annotated[int, number(0, 2**53, whole=True)]
Rank = Annotated[int, number(-1, 1e7, whole=True)]
"""-1 is the supervisor."""
WorldSize = Annotated[int, number(1, 1e6, whole=True)]
Seconds = Annotated[float, number(-1e12, 1e12)]
Rate = Annotated[float, number(0, 1e30)]
"""A loss and similar values are plain floats. The writer replaces one that is not finite by null, so such a field
allows None."""


def _exactly(wanted: type[T], value: object) -> T:
    if type(value) is not wanted:
        raise FieldError
    return value


PLAIN: dict[Any, ValueKind] = {
    int: number(-(2**53), 2**53, whole=True),
    float: number(-1e30, 1e30, may_diverge=True),
    str: ValueKind("text", partial(_exactly, str), {"type": "string"}),
    bool: ValueKind("true or false", partial(_exactly, bool), {"type": "boolean"}),
    object: ValueKind("anything", lambda value: value),
}
"""Kinds of the fields whose annotation is a plain type."""


def _object_of(item: ValueKind) -> ValueKind:
    def read(value: object) -> dict[str, object]:
        return {key: item.read(one) for key, one in _exactly(dict, value).items()}

    return ValueKind(f"an object, each value {item.name},", read)


def _any_of(kinds: Sequence[ValueKind]) -> ValueKind:
    def read(value: Any) -> Any:
        for kind in kinds:
            with suppress(FieldError):
                return kind.read(value)
        raise FieldError

    return ValueKind(" or ".join(kind.name for kind in kinds), read)


def _kind_of(annotation: Any) -> ValueKind:
    """Return the kind of values that a field with this annotation may have. `Absent` in a union means that the key may
    be missing; the field's default states that too."""
    origin = typing.get_origin(annotation)
    members = typing.get_args(annotation)
    if origin is Annotated:
        kind: ValueKind = annotation.__metadata__[0]
        return kind
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind_of(member) for member in members if member not in (types.NoneType, Absent)]
        kind = kinds[0] if len(kinds) == 1 else _any_of(kinds)
        if types.NoneType not in members:
            return kind
        return ValueKind(f"{kind.name} or null", lambda value: None if value is None else kind.read(value))
    if origin is tuple:
        item = _kind_of(members[0])
        return ValueKind(f"a list, each item {item.name},", lambda value: tuple(map(item.read, _exactly(list, value))))
    if origin is dict:
        return _object_of(_kind_of(members[1]))
    if origin is typing.Literal:
        # A newer version may write a word that this one does not know, and its file must stay readable.
        return PLAIN[str]
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return ValueKind("an object", lambda value: read_record(annotation, _exactly(dict, value)))
    return PLAIN[annotation]


@dataclass(frozen=True)
class _Field:
    name: str
    key: str
    kind: ValueKind
    needed: bool


@cache
def _fields_of(cls: type[Any]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        _Field(one.name, key_of(one), _kind_of(hints[one.name]), is_required(one)) for one in dataclasses.fields(cls)
    )


def read_record(cls: type[T], plain: Mapping[str, object]) -> T:
    """Build the dataclass `cls` from the values of `plain`. Raises FieldError that describes the first field that does
    not fit."""
    values = {}
    record: Any = cls
    for one in _fields_of(record):
        if one.key in plain:
            try:
                values[one.name] = one.kind.read(plain[one.key])
            except FieldError as error:
                if inner := str(error):
                    raise FieldError(f"`{one.key}` does not fit: {inner}") from error
                wrong = show_kind(plain[one.key])
                raise FieldError(f"`{one.key}` is {wrong}; {one.kind.name} is needed") from error
        elif one.needed:
            raise FieldError(f"it has no `{one.key}`")
    return cls(**values)
