"""Records of a run folder: dataclasses whose annotations say which values each field may have on disk.

A record is read leniently where versions differ and strictly where a file is damaged: unknown keys are passed over,
a missing key is filled from the field's default, and a value of the wrong kind raises FieldError.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol, TypeVar

from trainspec_cli.reading.json_file import show_kind
from trainspec_cli.spec.canonical import Absent
from trainspec_cli.spec.structure import key_of

T = TypeVar("T")


class FieldError(ValueError):
    """A field is missing, or holds a value that is not of its kind."""


class ValueKind(Protocol):
    """The values that a field may have."""

    def read(self, value: Any) -> Any:
        """Return the value as the record holds it. Raises FieldError where it is not of this kind."""

    def describe(self) -> str:
        """Name the kind, for people."""


@dataclass(frozen=True)
class Number:
    low: float
    high: float
    whole: bool = False
    may_diverge: bool = False
    """Accept NaN and infinity too."""

    def read(self, value: Any) -> Any:
        if type(value) is int or (type(value) is float and not self.whole):
            if self.low <= value <= self.high:
                return value
            if self.may_diverge and not math.isfinite(value):
                return value
        raise FieldError

    def describe(self) -> str:
        return f"{'a whole number' if self.whole else 'a number'} from {self.low:g} to {self.high:g}"


Count = Annotated[int, Number(0, 2**53, whole=True)]
Rank = Annotated[int, Number(-1, 1e7, whole=True)]
"""-1 stands for the supervisor."""
WorldSize = Annotated[int, Number(1, 1e6, whole=True)]
Seconds = Annotated[float, Number(-1e12, 1e12)]
Rate = Annotated[float, Number(0, 1e30)]
"""A loss or the like is a plain float. The writer puts null for one that is not finite, so its field allows None."""


@dataclass(frozen=True)
class _Instance:
    wanted: type
    name: str

    def read(self, value: Any) -> Any:
        if type(value) is not self.wanted:
            raise FieldError
        return value

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True)
class _ListOf:
    item: ValueKind

    def read(self, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise FieldError
        return tuple(map(self.item.read, value))

    def describe(self) -> str:
        return f"a list, each item {self.item.describe()},"


@dataclass(frozen=True)
class _ObjectOf:
    item: ValueKind

    def read(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise FieldError
        return {key: self.item.read(item) for key, item in value.items()}

    def describe(self) -> str:
        return f"an object, each value {self.item.describe()},"


@dataclass(frozen=True)
class _RecordOf:
    cls: type

    def read(self, value: Any) -> Any:
        if type(value) is not dict:
            raise FieldError
        return read_record(self.cls, value)

    def describe(self) -> str:
        return "an object"


@dataclass(frozen=True)
class _Nullable:
    kind: ValueKind

    def read(self, value: Any) -> Any:
        return None if value is None else self.kind.read(value)

    def describe(self) -> str:
        return f"{self.kind.describe()} or null"


@dataclass(frozen=True)
class _Anything:
    """Free-form JSON."""

    def read(self, value: Any) -> Any:
        return value

    def describe(self) -> str:
        return "anything"


_PLAIN: dict[Any, ValueKind] = {
    int: Number(-(2**53), 2**53, whole=True),
    float: Number(-1e30, 1e30, may_diverge=True),
    str: _Instance(str, "text"),
    bool: _Instance(bool, "true or false"),
    Any: _Anything(),
}


def _kind_of(annotation: Any) -> ValueKind:
    """`Absent` in a union says that the key may miss, which the field's default says too."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind: ValueKind = annotation.__metadata__[0]
        return kind
    if origin in (typing.Union, types.UnionType):
        (wanted,) = (member for member in members if member not in (types.NoneType, Absent))
        kind = _kind_of(wanted)
        return _Nullable(kind) if types.NoneType in members else kind
    if origin is tuple:
        return _ListOf(_kind_of(members[0]))
    if origin is dict:
        return _ObjectOf(_kind_of(members[1]))
    if origin is typing.Literal:
        return _PLAIN[str]
    is_record = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    return _RecordOf(annotation) if is_record else _PLAIN[annotation]


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
        _Field(field.name, key_of(field), _kind_of(hints[field.name]), _is_needed(field))
        for field in dataclasses.fields(cls)
    )


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def read_record(cls: type[T], plain: Mapping[str, Any]) -> T:
    """Return the dataclass `cls` with the values of `plain`. Raises FieldError that says what is wrong with the first
    field that does not fit."""
    values = {}
    record: Any = cls
    for field in _fields_of(record):
        if field.key in plain:
            try:
                values[field.name] = field.kind.read(plain[field.key])
            except FieldError as error:
                if inner := str(error):
                    raise FieldError(f"`{field.key}` does not fit: {inner}") from error
                wrong = show_kind(plain[field.key])
                raise FieldError(f"`{field.key}` is {wrong}; {field.kind.describe()} is needed") from error
        elif field.needed:
            raise FieldError(f"it has no `{field.key}`")
    return cls(**values)
