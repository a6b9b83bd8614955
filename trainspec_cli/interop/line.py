"""A line of an engine's table: a key of the recipe, the engine's key, and how the value is said and read there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trainspec_cli.interop.run_values import RunValues
from trainspec_cli.json_value import JsonValue

Place = Literal["config", "launcher", "command", "environment"]
"""`launcher`: the configuration of another program, which starts the engine."""


class CannotSayError(ValueError):
    """The engine has no value for this one of the recipe."""

    def __init__(self, allowed: str, hint: str = ""):
        super().__init__(allowed)
        self.allowed = allowed
        """The values that the engine has."""
        self.hint = hint


class Wording(Protocol):
    """How a value is said: `write` for the engine, `read` for the recipe. Both raise CannotSayError."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue: ...

    def read(self, value: JsonValue, known: RunValues) -> JsonValue: ...


@dataclass(frozen=True)
class Same:
    """The value as it is."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        return value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few values, each under the engine's own name."""

    names: Mapping[Any, JsonValue]
    """The recipe's value -> the engine's."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        for ours, theirs in self.names.items():
            if ours == value and isinstance(ours, bool) == isinstance(value, bool):
                return theirs
        raise CannotSayError(" or ".join(show(ours) for ours in self.names))

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        ours: JsonValue
        for ours, theirs in self.names.items():
            if _folded(theirs) == _folded(value):
                return ours
        raise CannotSayError(" or ".join(show(theirs) for theirs in self.names.values()))


@dataclass(frozen=True)
class Times:
    """A ratio, where the engine wants its product with another value of the recipe."""

    key: str

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, (int, float))
        return float(f"{value * run.number(self.key):.12g}")

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, (int, float)):
            raise CannotSayError("a number")
        return float(f"{value / known.number(self.key):.12g}")


@dataclass(frozen=True)
class OrNone:
    """A number, or the one by which the engine says null."""

    none: JsonValue

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        return self.none if value is None else value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return None if value == self.none else value


@dataclass(frozen=True)
class AtLeast:
    """A whole number that the engine wants above some bound."""

    low: int

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        if not isinstance(value, int) or value < self.low:
            raise CannotSayError(f"{self.low} or more", f"{{key}}={self.low}")
        return value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return value


@dataclass(frozen=True)
class LastSteps:
    """A fraction of the run, as the steps that it lasts."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, (int, float))
        start = max(run.whole("optim.schedule.warmup_steps"), round(run.whole("train.max_steps") * (1 - value)))
        return run.whole("train.max_steps") - start

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, int):
            raise CannotSayError("a whole number")
        return float(f"{value / known.whole('train.max_steps'):.12g}")


class When(Protocol):
    """When a line applies."""

    def holds(self, run: RunValues) -> bool: ...


@dataclass(frozen=True)
class Where:
    """A condition on several values together."""

    predicate: Callable[[RunValues], bool]

    def holds(self, run: RunValues) -> bool:
        return self.predicate(run)


def where(predicate: Callable[[RunValues], bool]) -> Where:
    return Where(predicate)


@dataclass(frozen=True)
class OneOf:
    """When a line applies: a value of the run is one of some, or none of them."""

    key: str
    values: tuple[JsonValue, ...]
    inverted: bool = False

    def holds(self, run: RunValues) -> bool:
        return (run[self.key] in self.values) != self.inverted


def given(key: str, *values: JsonValue) -> OneOf:
    return OneOf(key, values)


def unless(key: str, *values: JsonValue) -> OneOf:
    return OneOf(key, values, inverted=True)


@dataclass(frozen=True)
class Line:
    """`ours` is said by `theirs`."""

    ours: str
    """A key of the recipe, or a derived value."""
    theirs: str
    """A dotted key of the engine, `[i]` for an item of a list; empty where other lines imply the value."""
    codec: Wording = field(default_factory=Same)
    when: tuple[When, ...] = ()
    approximate: str = ""
    """What differs in the engine; empty where it does the same."""
    place: Place = "config"
    also: tuple[str, ...] = ()
    """Further keys of the recipe that the line says."""

    def applies(self, run: RunValues) -> bool:
        return all(condition.holds(run) for condition in self.when)


@dataclass(frozen=True)
class Fixed:
    """A key of the engine whose value belongs to every run, or to every run of a kind."""

    theirs: str
    value: JsonValue
    why: str
    when: tuple[When, ...] = ()
    place: Place = "config"

    def applies(self, run: RunValues) -> bool:
        return all(condition.holds(run) for condition in self.when)


def show(value: JsonValue) -> str:
    """Return a value as one types it."""
    words = {True: "true", False: "false"}
    if value is None:
        return "null"
    if isinstance(value, bool):
        return words[value]
    return f"[{','.join(map(show, value))}]" if isinstance(value, list) else str(value)


def _folded(value: JsonValue) -> JsonValue:
    return value.lower() if isinstance(value, str) else value
