"""Targets of `emit`: their tables and files. Translate a run into the keys of a target, and read a target's keys into a
recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import yaml

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.wings.interop.not_carried import NOT_CARRIED, OFF, governed_by, nearest
from trainspec_cli.wings.interop.table import (
    DERIVED,
    Destination,
    Fixed,
    Line,
    OneOf,
    RunValues,
    UnsupportedValueError,
    batch_problem,
    show,
)

EMITTED = "emitted.json"
LEFT_OUT = "trainspec has no such key"
Keys = Mapping[str, JsonValue]


@dataclass(frozen=True)
class TranslatedKey:
    """A recipe key, and the engine key that it was translated into."""

    ours: str
    value: JsonValue
    theirs: str
    """The engine's key; empty if other keys of the engine imply the value."""
    their_value: JsonValue
    destination: Destination
    approximate: str = ""


@dataclass(frozen=True)
class NotCarried:
    ours: str
    """A recipe key that is not carried over, or a section that no engine needs."""
    why: str
    value: JsonValue = None
    """The value of a key; None for a section."""


@dataclass(frozen=True)
class Translation:
    """A run translated into an engine's keys. It accounts for every recipe key."""

    translated: tuple[TranslatedKey, ...]
    not_carried: tuple[NotCarried, ...]
    fixed: tuple[Fixed, ...]

    def keys_of(self, destination: Destination) -> dict[str, JsonValue]:
        """Return the engine's dotted keys for one destination. Keys with fixed values come last."""
        keys = {one.theirs: one.their_value for one in self.translated if one.destination == destination and one.theirs}
        return keys | {one.theirs: one.value for one in self.fixed if one.destination == destination}


@dataclass(frozen=True)
class Target:
    name: str
    title: str
    version: str
    """The engine version that these keys belong to."""
    lines: tuple[Line, ...]
    render: Callable[[Translation, RunValues], dict[str, str]]
    """File name -> text."""
    fixed: tuple[Fixed, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    """Recipe key -> what the engine supports instead, and why."""
    not_carried: Mapping[str, str] = field(default_factory=dict)
    """Key or section -> why it is not carried over. This adds to the keys that are not carried over for any engine."""
    rules: tuple[Callable[[RunValues], Iterator[Problem]], ...] = ()
    """Finds combinations of keys that the engine does not support."""
    complete: Callable[[dict[str, JsonValue], Keys], dict[str, JsonValue]] | None = None
    """Completes the values that were read with those that follow from several engine keys together, or from missing
    ones."""
    carries_recipe: bool = False
    """True if the target starts trainspec itself. All other keys are then carried over by the recipe's arguments."""


def translate(target: Target, run: RunValues) -> Translation:
    """Translate a run into a target's keys. Raises RecipeError with every value that the engine does not support."""
    translated = []
    problems = []
    accounted: set[str] = set()
    for line in (line for line in target.lines if line.applies(run) and line.ours in run.values):
        accounted |= {line.ours, *line.also}
        try:
            their_value = line.conversion.write(run[line.ours], run)
        except UnsupportedValueError as error:
            problems.append(_unsupported(target, line.ours, run, error))
            continue
        translated.append(
            TranslatedKey(line.ours, run[line.ours], line.theirs, their_value, line.destination, line.approximate)
        )
    table = {**NOT_CARRIED, **target.not_carried}
    not_carried: dict[str, NotCarried] = {}
    for key in run.keys if not target.carries_recipe else ():
        condition = governed_by(key)
        has_no_effect = (key in OFF and run[key] == OFF[key]) or (condition is not None and condition.holds(run))
        if key in accounted or has_no_effect:
            continue
        name = nearest(key, table)
        if name is None:
            problems.append(_unsupported(target, key, run))
        else:
            # List a section as a whole if only trainspec uses it.
            ours = name if name in NOT_CARRIED and name not in target.not_carried else key
            not_carried[ours] = NotCarried(ours, table[name], run[ours])
    problems += [problem for rule in target.rules for problem in rule(run)]
    if not target.carries_recipe and (unequal := batch_problem(run)):
        problems.append(unequal)
    if problems:
        # Report one problem per key, except for keys whose meaning depends on another rejected key.
        first = {problem.path: problem for problem in reversed(problems)}
        independent = []
        for path, problem in reversed(first.items()):
            condition = governed_by(path)
            if condition is None or condition.key not in first:
                independent.append(problem)
        raise RecipeError(independent)
    return Translation(
        tuple(translated), tuple(not_carried.values()), tuple(fixed for fixed in target.fixed if fixed.applies(run))
    )


def _unsupported(target: Target, key: str, run: RunValues, error: UnsupportedValueError | None = None) -> Problem:
    allowed = error.allowed if error else show(OFF[key]) if key in OFF else ""
    why = target.limits.get(key, "")
    reason = "; ".join(filter(None, (f"it allows {allowed}" if allowed else "", why)))
    message = f"{target.title} does not support `{key}`={show(run[key])}" + (f": {reason}" if reason else "")
    hint = "another engine may support it: see trainspec emit --help"
    if error and error.hint:
        hint = f"set {error.hint.format(key=key)}"
    elif first := allowed.partition(" or ")[0]:
        hint = f"set {key}={first}"
    return Problem("not_said", message, key, hint)


# Writing keys and files


def nest(keys: Keys) -> JsonObject:
    """Return dotted keys as nested objects. `name[i]` is an item of a list."""
    nested: JsonObject = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        inner = nested
        for section in sections:
            below = inner.setdefault(section, {})
            assert isinstance(below, dict), f"{key} is inside a key that has a value"
            inner = below
        name, _, index = last.partition("[")
        if not index:
            inner[name] = value
            continue
        items = inner.setdefault(name, [])
        assert isinstance(items, list) and len(items) == int(index[:-1]), f"the items of {key} are out of order"
        items.append(value)
    return nested


def flat(nested: JsonObject, prefix: str = "") -> dict[str, JsonValue]:
    """Return nested objects as dotted keys. This is the inverse of `nest` for the keys in a table."""
    keys: dict[str, JsonValue] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            keys.update(flat(value, f"{prefix}{name}."))
        elif isinstance(value, list):
            keys.update({f"{prefix}{name}[{index}]": item for index, item in enumerate(value)})
        else:
            keys[f"{prefix}{name}"] = value
    return keys


def yaml_file(keys: Keys) -> str:
    """Return a YAML file with these dotted keys."""
    text: str = yaml.safe_dump(nest(keys), sort_keys=False)
    return text


def json_file(keys: Keys) -> str:
    """Return a JSON file with these dotted keys."""
    return json.dumps(nest(keys), indent=2, allow_nan=False) + "\n"


def call_lines(name: str, call: str, literals: Mapping[str, str]) -> list[str]:
    """Return the lines of a keyword argument `name=call(...)` in a Python module. `literals` are already source
    text."""
    return [f"{name}={call}(", *(f"    {key}={literal}," for key, literal in literals.items()), "),"]


FOLDER = '"$(dirname "$0")"'
"""Shell expression for the folder of the script, which contains the other emitted files."""
USER_SCRIPT = ': "${SCRIPT:?set SCRIPT to your training script, such as SCRIPT=train.py}"'


def shell_script(
    about: str, command: Iterable[str], environment: Mapping[str, JsonValue], *, needs: Iterable[str] = ()
) -> str:
    """Return a bash script. `command` consists of words that are already quoted for the shell."""
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()]
    lines = ["#!/usr/bin/env bash", f"# {about}", "set -euo pipefail", *needs, *exports]
    return "\n".join([*lines, "exec " + " \\\n  ".join(command) + ' "$@"', ""])


def options(keys: Mapping[str, JsonValue]) -> list[str]:
    """Return `--name value` words. True becomes the name alone, false and null become nothing, and a list becomes
    several words."""
    return [words for name, value in keys.items() if (words := option(name, value))]


def option(name: str, value: JsonValue) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return name
    items = value if isinstance(value, list) else [value]
    return " ".join([name, *(shlex.quote(number(item)) for item in items)])


def number(value: JsonValue) -> str:
    """Return a number as text that any program reads back as the same value."""
    return repr(value) if isinstance(value, float) else str(value)


RENDEZVOUS = '--rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?the first node, as HOST:PORT}"'


def torchrun(nodes: int, devices: int) -> list[str]:
    """Return the words that start torchrun on this many nodes."""
    if nodes == 1:
        return ["torchrun", f"--standalone --nproc-per-node {devices}"]
    return ["torchrun", f"--nnodes {nodes} --nproc-per-node {devices}", RENDEZVOUS]


# Reading an engine's keys


@dataclass(frozen=True)
class ReadBack:
    """What was read from an engine's file."""

    values: Mapping[str, JsonValue]
    """Recipe key -> value."""
    followed: tuple[str, ...]
    """Engine keys that follow from other keys, or that occur in every emitted file."""
    unread: Mapping[str, str]
    """Engine key -> why the recipe has no counterpart for it."""


def read_back(target: Target, keys: Mapping[str, JsonValue]) -> ReadBack:
    """Read an engine's keys. Each line is read once the values in its conditions are known."""
    known: dict[str, JsonValue] = {}
    why: dict[str, str] = {}
    lines = [line for line in target.lines if line.theirs in keys]
    waiting = list(lines)
    while waiting:
        # Read the lines whose conditions do not depend on values that another unread line provides.
        ready = []
        for line in waiting:
            awaited = {one.ours for one in waiting if one is not line} - known.keys()
            if not any(condition.key in awaited for condition in _conditions(line)):
                ready.append(line)
        ready = ready or waiting[:1]
        waiting = [line for line in waiting if line not in ready]
        for line in ready:
            run = RunValues("", known)
            if not all(condition.holds(run) for condition in _conditions(line)):
                continue
            value = keys[line.theirs]
            try:
                ours = line.conversion.read(value, run)
            except (UnsupportedValueError, KeyError, AssertionError, TypeError, ZeroDivisionError) as error:
                allowed = (
                    error.allowed if isinstance(error, UnsupportedValueError) else "a value that matches the other keys"
                )
                if line.ours not in known:
                    why[line.theirs] = f"{show(value)} cannot be read; allowed: {allowed}"
                continue
            if known.setdefault(line.ours, ours) != ours:
                why[line.theirs] = f"it means {line.ours}={show(ours)}, but another key means {show(known[line.ours])}"
            else:
                why.pop(line.theirs, None)
    read = {line.theirs for line in lines if line.theirs not in why}
    fixed = {one.theirs for one in target.fixed if one.theirs in keys and show(keys[one.theirs]) == show(one.value)}
    derived = {line.theirs for line in lines if line.ours.startswith(DERIVED)}
    unread = {key: why.get(key, LEFT_OUT) for key in keys if key not in read and key not in fixed}
    values = {key: value for key, value in known.items() if not key.startswith(DERIVED)}
    processes = known.get(f"{DERIVED}world_size")
    nodes = known.get("cluster.num_nodes")
    if isinstance(processes, int) and isinstance(nodes, int) and nodes >= 1:  # the file states both
        values["cluster.devices_per_node"] = processes // nodes
    if target.complete:
        values = target.complete(values, keys)
    return ReadBack(values, tuple(sorted((fixed | derived) - unread.keys())), unread)


def _conditions(line: Line) -> list[OneOf]:
    """Return the line's conditions on single keys. A condition on the line's own key is left out, because the
    conversion checks it."""
    return [one for one in line.when if isinstance(one, OneOf) and one.key not in (line.ours, f"{DERIVED}shards")]
