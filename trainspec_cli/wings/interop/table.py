"""The building blocks of an engine's table: a run as flat values, and lines that map recipe keys to engine keys.

A line consists of both keys, the conditions under which it applies, and a conversion. The conversion writes the value
for the engine and reads it back for the recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal, Protocol

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonValue, flatten
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import to_plain

DERIVED = "derived."
"""Prefix of values that are derived from a recipe and are not recipe keys."""


@dataclass(frozen=True)
class Container:
    """Properties of the container that a manifest starts. They are not part of a recipe."""

    image: str = ""
    """A container image that contains trainspec."""
    volume: str = ""
    """A volume that all nodes mount. It contains recipes, data and the run folder."""


NO_CONTAINER = Container()


@dataclass(frozen=True)
class RunValues:
    recipe: str
    """The name of the recipe, in a form that is safe inside a comment."""
    values: Mapping[str, JsonValue]
    """Values by dotted recipe key, or by `derived.NAME`."""
    arguments: tuple[str, ...] = ()
    """The command line that specifies the recipe, for targets that start trainspec itself."""
    container: Container = NO_CONTAINER

    def __getitem__(self, key: str) -> JsonValue:
        return self.values.get(key)

    def whole(self, key: str) -> int:
        value = self.values[key]
        assert isinstance(value, int), f"{key} must be an integer"
        return value

    def number(self, key: str) -> float:
        value = self.values[key]
        assert isinstance(value, (int, float)), f"{key} must be a number"
        return float(value)

    @property
    def keys(self) -> Iterable[str]:
        """The keys of the recipe."""
        return [key for key in self.values if not key.startswith(DERIVED)]


def run_values(
    recipe: str, spec: RunSpec, arguments: tuple[str, ...] = (), container: Container = NO_CONTAINER
) -> RunValues:
    """Return the values of a spec whose `auto` values are all resolved."""
    layout = layout_of(spec)
    micro = spec.batching.micro_batch_size
    free = spec.cluster.devices_per_node
    assert isinstance(micro, int), "a resolved run has a micro-batch size"
    assert isinstance(free, int), "a resolved run has a device count"
    accumulated = max(1, spec.batching.global_batch_size // (micro * layout.data_parallel_size))
    accelerator = spec.cluster.accelerator.name.lower() if spec.cluster.accelerator else ""
    values = {
        **flatten(to_plain(spec)),
        f"{DERIVED}grad_accum_steps": accumulated,
        f"{DERIVED}world_size": layout.world_size,
        f"{DERIVED}data_parallel_size": layout.data_parallel_size,
        f"{DERIVED}shards": layout.shards,
        f"{DERIVED}is_ddp": layout.world_size == layout.dp_replicate,
        f"{DERIVED}reserved_nodes": spec.cluster.num_nodes + (spec.cluster.reliability.spare_nodes or 0),
        f"{DERIVED}rank_batch_size": micro * accumulated,
        f"{DERIVED}samples": spec.batching.global_batch_size * spec.train.max_steps,
        # `hopper` stands for all chips before Blackwell. The environment of some engines depends on this value.
        f"{DERIVED}arch": "blackwell" if any(chip in accelerator for chip in ("b200", "b300")) else "hopper",
        f"{DERIVED}device_batch_size": micro * layout.data_parallel_size / layout.world_size,
    }
    # Split each axis into the part within a node and the part across nodes. The innermost axes fill a node first.
    for axis in ("tp", "cp", "dp_shard", "dp_replicate"):
        size = getattr(layout, axis)
        within = gcd(size, free)
        free //= within
        values |= {f"{DERIVED}within_node.{axis}": within, f"{DERIVED}across_nodes.{axis}": size // within}
    return RunValues(re.sub(r"[^\w./ -]", "_", recipe), values, arguments, container)


def layout_of(spec: RunSpec) -> Layout:
    layout = spec.layout
    assert AUTO not in vars(layout).values(), "every axis of a resolved run has a size"
    return Layout(**vars(layout))


def batch_problem(run: RunValues) -> Problem | None:
    """Return a problem if the ranks would get different numbers of samples, because only trainspec supports that."""
    samples = run.whole("batching.global_batch_size")
    micro = run.whole("batching.micro_batch_size")
    ranks = run.whole(f"{DERIVED}data_parallel_size")
    each_round = micro * ranks
    if samples % each_round == 0:
        return None
    allowed = [max(1, samples // each_round) * each_round, (samples // each_round + 1) * each_round]
    message = (
        f"`batching.global_batch_size` is {samples}, but other engines need the same number of samples on all ranks: "
        f"multiples of {each_round} (micro-batches of {micro} on {ranks} data-parallel ranks)"
    )
    hint = " or ".join(f"batching.global_batch_size={size}" for size in dict.fromkeys(allowed))
    return Problem("not_said", message, "batching.global_batch_size", f"set {hint}")


# Conversions

Destination = Literal["config", "launcher", "command", "environment"]
"""Where to write the engine's key. `launcher`: the configuration of another program that starts the engine."""


class UnsupportedValueError(ValueError):
    """The engine does not support this value."""

    def __init__(self, allowed: str, hint: str = ""):
        super().__init__(allowed)
        self.allowed = allowed
        """The values that the engine supports."""
        self.hint = hint


class Conversion(Protocol):
    """Converts a value: `write` returns the engine's value, `read` the recipe's. Both raise UnsupportedValueError."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue: ...

    def read(self, value: JsonValue, known: RunValues) -> JsonValue: ...


@dataclass(frozen=True)
class Same:
    """The value is the same in both."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        return value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few values that the engine calls by other names."""

    names: Mapping[Any, JsonValue]
    """Value in the recipe -> value in the engine."""
    hint: str = ""
    """What to set instead of any other value; empty: the key to the first value."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        for ours, theirs in self.names.items():
            if ours == value and isinstance(ours, bool) == isinstance(value, bool):
                return theirs
        raise UnsupportedValueError(" or ".join(show(ours) for ours in self.names), self.hint)

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        ours: JsonValue
        for ours, theirs in self.names.items():
            if _folded(theirs) == _folded(value):
                return ours
        raise UnsupportedValueError(" or ".join(show(theirs) for theirs in self.names.values()))


@dataclass(frozen=True)
class Times:
    """A ratio. The engine's value is its product with another value of the recipe."""

    key: str

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, (int, float))
        return float(f"{value * run.number(self.key):.12g}")

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, (int, float)):
            raise UnsupportedValueError("a number")
        return float(f"{value / known.number(self.key):.12g}")


@dataclass(frozen=True)
class OrNone:
    """A number or null. In the engine, a special number means null."""

    none: JsonValue

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        return self.none if value is None else value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return None if value == self.none else value


@dataclass(frozen=True)
class AtLeast:
    """An integer with a lower bound in the engine."""

    low: int

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        if not isinstance(value, int) or value < self.low:
            raise UnsupportedValueError(f"{self.low} or more", f"{{key}}={self.low}")
        return value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return value


@dataclass(frozen=True)
class LastSteps:
    """The final part of the run: a fraction in the recipe, a number of steps in the engine."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, (int, float))
        start = max(run.whole("optim.schedule.warmup_steps"), round(run.whole("train.max_steps") * (1 - value)))
        return run.whole("train.max_steps") - start

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, int):
            raise UnsupportedValueError("a whole number")
        return float(f"{value / known.whole('train.max_steps'):.12g}")


@dataclass(frozen=True)
class Within:
    """A text that has a prefix and a suffix in the recipe but not in the engine's file."""

    allowed: str
    hint: str = ""
    begin: str = ""
    end: str = ""
    refused: str = ""
    """A character that has a special meaning for the engine, and is therefore rejected."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        text = str(value)
        fits = isinstance(value, str) and text.startswith(self.begin) and text.endswith(self.end)
        if not fits or (self.refused and self.refused in text):
            raise UnsupportedValueError(self.allowed, self.hint)
        return text.removeprefix(self.begin).removesuffix(self.end)

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return f"{self.begin}{value}{self.end}" if self.begin or self.end else value


TOKEN_FILE = Within("one .bin file", "data.path=NAME.bin", end=".bin", refused="*")
"""Megatron's dataset. The engines name it without the suffix."""


@dataclass(frozen=True)
class WholeNumber:
    """A number that must be an integer in the engine."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        if not isinstance(value, (int, float)) or int(value) != value:
            raise UnsupportedValueError("a whole number")
        return int(value)

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return value


# Lines of a table


class When(Protocol):
    """The condition for a line to apply."""

    def holds(self, run: RunValues) -> bool: ...


@dataclass(frozen=True)
class Where:
    """A condition on several values at once."""

    predicate: Callable[[RunValues], bool]

    def holds(self, run: RunValues) -> bool:
        return self.predicate(run)


@dataclass(frozen=True)
class OneOf:
    """A condition on one value of the run: it is one of `values` or, if `inverted`, not one of them."""

    key: str
    values: tuple[JsonValue, ...]
    inverted: bool = False

    def holds(self, run: RunValues) -> bool:
        return (run[self.key] in self.values) != self.inverted


def given(key: str, *values: JsonValue) -> OneOf:
    return OneOf(key, values)


def unless(key: str, *values: JsonValue) -> OneOf:
    return OneOf(key, values, inverted=True)


COSINE = given("optim.schedule.kind", "cosine")
WSD = given("optim.schedule.kind", "wsd")
CONSTANT = given("optim.schedule.kind", "constant")
ADAM = given("optim.name", "adamw")
IN_PIPELINE = unless("layout.pp", 1)
SHARDED = unless("derived.shards", 1)
REPLICATED = given("derived.is_ddp", True)


@dataclass(frozen=True)
class Line:
    """Maps the recipe's key `ours` to the engine's key `theirs`."""

    ours: str
    """A recipe key, or a derived value."""
    theirs: str
    """The engine's dotted key, with `[i]` for an item of a list; empty if other lines imply the value."""
    conversion: Conversion = field(default_factory=Same)
    when: tuple[When, ...] = ()
    approximate: str = ""
    """How the engine differs; empty if the meaning is identical."""
    destination: Destination = "config"
    also: tuple[str, ...] = ()
    """Further recipe keys that the line covers."""

    def applies(self, run: RunValues) -> bool:
        return all(condition.holds(run) for condition in self.when)


@dataclass(frozen=True)
class Fixed:
    """An engine key with the same value in every run, or in every run that meets the conditions `when`."""

    theirs: str
    value: JsonValue
    why: str
    when: tuple[When, ...] = ()
    destination: Destination = "config"

    def applies(self, run: RunValues) -> bool:
        return all(condition.holds(run) for condition in self.when)


def show(value: JsonValue) -> str:
    """Return a value as a user would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{','.join(map(show, value))}]" if isinstance(value, list) else str(value)


def _folded(value: JsonValue) -> JsonValue:
    return value.lower() if isinstance(value, str) else value
