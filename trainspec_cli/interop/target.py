"""An engine to emit for: its table, what it cannot say, and how its files are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.interop.line import CannotSayError, Fixed, Line, Place, show
from trainspec_cli.interop.not_carried import OFF, asks_for_nothing, governing_key, not_carried_as
from trainspec_cli.interop.run_values import RunValues, batch_problem
from trainspec_cli.json_value import JsonObject, JsonValue

Judged = Literal["parser", "golden"]
Keys = Mapping[str, JsonValue]


@dataclass(frozen=True)
class Said:
    """A value of the recipe in the engine's words."""

    ours: str
    value: JsonValue
    theirs: str
    """Empty where other keys imply the value."""
    their_value: JsonValue
    place: Place
    approximate: str = ""


@dataclass(frozen=True)
class NotCarried:
    ours: str
    """A key, or a section of keys that no engine has a use for."""
    why: str
    value: JsonValue = None
    """The value of a key; None of a section."""


@dataclass(frozen=True)
class Spoken:
    """A run in an engine's keys, and what became of every key of the recipe."""

    said: tuple[Said, ...]
    not_carried: tuple[NotCarried, ...]
    fixed: tuple[Fixed, ...]

    def keys_of(self, place: Place) -> dict[str, JsonValue]:
        """Return the engine's dotted keys of one place, those of every run last."""
        said = {one.theirs: one.their_value for one in self.said if one.place == place and one.theirs}
        return {**said, **{one.theirs: one.value for one in self.fixed if one.place == place}}


@dataclass(frozen=True)
class Target:
    name: str
    title: str
    version: str
    """The version whose keys these are."""
    lines: tuple[Line, ...]
    render: Callable[[Spoken, RunValues], dict[str, str]]
    """File name -> text."""
    fixed: tuple[Fixed, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Key of the recipe -> what the engine allows in its place, and why."""
    not_carried: Mapping[str, str] = field(default_factory=dict)
    """Key or section -> why it is not carried, besides those that no engine carries."""
    rules: tuple[Callable[[RunValues], Iterator[Problem]], ...] = ()
    """What the engine refuses of several keys together."""
    settle: Callable[[dict[str, JsonValue], Keys], dict[str, JsonValue]] | None = None
    """Complete the recipe's values that were read of the engine's keys by what the keys say together, or by absence."""
    carries_recipe: bool = False
    """trainspec itself is started, so that the recipe's arguments say all else."""


def speak(target: Target, run: RunValues) -> Spoken:
    """Say a run in a target's keys. Raises RecipeError with every value that the engine cannot say."""
    said, problems = [], []
    accounted: set[str] = set()
    for line in (line for line in target.lines if line.applies(run) and line.ours in run.values):
        accounted |= {line.ours, *line.also}
        try:
            their_value = line.codec.write(run[line.ours], run)
        except CannotSayError as error:
            problems.append(_cannot(target, line.ours, run, error))
            continue
        said.append(Said(line.ours, run[line.ours], line.theirs, their_value, line.place, line.approximate))
    left = [key for key in run.keys if key not in accounted and not asks_for_nothing(key, run)]
    left = [] if target.carries_recipe else left
    listed = {key: not_carried_as(key, target.not_carried) for key in left}
    problems += [_cannot(target, key, run) for key, name in listed.items() if name is None]
    not_carried = {ours: NotCarried(ours, why, run[ours]) for ours, why in filter(None, listed.values())}
    problems += [problem for rule in target.rules for problem in rule(run)]
    if not target.carries_recipe and (unequal := batch_problem(run)):
        problems.append(unequal)
    if problems:
        raise RecipeError(_causes(problems))
    return Spoken(
        tuple(said), tuple(not_carried.values()), tuple(fixed for fixed in target.fixed if fixed.applies(run))
    )


def _causes(problems: list[Problem]) -> list[Problem]:
    """Return one problem for each key, without those of keys that have a meaning only through another refused one."""
    first = {problem.path: problem for problem in reversed(problems)}
    return [first[path] for path in reversed(first) if governing_key(path) not in first]


def _cannot(target: Target, key: str, run: RunValues, error: CannotSayError | None = None) -> Problem:
    allowed = error.allowed if error else show(OFF[key]) if key in OFF else ""
    why = target.cannot.get(key, "")
    reason = "; ".join(filter(None, (f"it allows {allowed}" if allowed else "", why)))
    message = f"`{key}` is {show(run[key])}, which {target.title} cannot say" + (f": {reason}" if reason else "")
    return Problem("not_said", message, key, _hint(key, allowed, error))


def _hint(key: str, allowed: str, error: CannotSayError | None) -> str:
    if error and error.hint:
        return f"type {error.hint.format(key=key)}"
    first = allowed.partition(" or ")[0]
    return f"type {key}={first}" if first else "another engine may know it: see trainspec emit --help"


def nest(keys: Keys) -> JsonObject:
    """Return dotted keys as nested objects; `name[i]` is an item of a list."""
    nested: JsonObject = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        inner = nested
        for section in sections:
            below = inner.setdefault(section, {})
            assert isinstance(below, dict), f"{key} lies below a value"
            inner = below
        name, _, index = last.partition("[")
        if not index:
            inner[name] = value
            continue
        items = inner.setdefault(name, [])
        assert isinstance(items, list) and len(items) == int(index[:-1]), f"{key} is out of order"
        items.append(value)
    return nested


def flat(nested: JsonObject, prefix: str = "") -> dict[str, JsonValue]:
    """Return nested objects as dotted keys, the inverse of `nest` for those that a table has."""
    keys: dict[str, JsonValue] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            keys.update(flat(value, f"{prefix}{name}."))
        elif isinstance(value, list):
            keys.update({f"{prefix}{name}[{index}]": item for index, item in enumerate(value)})
        else:
            keys[f"{prefix}{name}"] = value
    return keys
