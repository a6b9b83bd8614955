"""An engine's keys read back into values of a recipe, by the table that says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainspec_cli.interop.line import CannotSayError, Line, OneOf, show
from trainspec_cli.interop.run_values import DERIVED, RunValues
from trainspec_cli.interop.target import Target
from trainspec_cli.json_value import JsonValue

LEFT_OUT = "trainspec has no key for it"


@dataclass(frozen=True)
class Heard:
    """What a file of an engine says."""

    values: Mapping[str, JsonValue]
    """Key of a recipe -> value."""
    followed: tuple[str, ...]
    """Keys of the engine that follow from others, or that every emitted file has."""
    unread: Mapping[str, str]
    """Key of the engine -> why no key of a recipe says it."""


def listen(target: Target, keys: Mapping[str, JsonValue]) -> Heard:
    """Read an engine's keys. A line is read when the values that its conditions ask for are known."""
    known: dict[str, JsonValue] = {}
    why: dict[str, str] = {}
    lines = [line for line in target.lines if line.theirs in keys]
    waiting = list(lines)
    while waiting:
        ready = [line for line in waiting if _is_decided(line, known, waiting)] or waiting[:1]
        waiting = [line for line in waiting if line not in ready]
        for line in ready:
            _hear(line, keys[line.theirs], known, why)
    read = {line.theirs for line in lines if line.theirs not in why}
    fixed = {one.theirs for one in target.fixed if one.theirs in keys and show(keys[one.theirs]) == show(one.value)}
    derived = {line.theirs for line in lines if line.ours.startswith(DERIVED)}
    unread = {key: why.get(key, LEFT_OUT) for key in keys if key not in read and key not in fixed}
    values = {key: value for key, value in known.items() if not key.startswith(DERIVED)}
    values = {**values, **_of_processes(known)}
    if target.settle:
        values = target.settle(values, keys)
    return Heard(values, tuple(sorted((fixed | derived) - unread.keys())), unread)


def _hear(line: Line, value: JsonValue, known: dict[str, JsonValue], why: dict[str, str]) -> None:
    run = RunValues("", known)
    if not all(condition.holds(run) for condition in _conditions(line)):
        return
    try:
        ours = line.codec.read(value, run)
    except (CannotSayError, KeyError, AssertionError, TypeError, ZeroDivisionError) as error:
        allowed = error.allowed if isinstance(error, CannotSayError) else "what belongs to the keys beside it"
        if line.ours not in known:
            why[line.theirs] = f"{show(value)} is not read: {allowed} would be"
        return
    if known.setdefault(line.ours, ours) != ours:
        why[line.theirs] = f"it says {line.ours}={show(ours)}, and another key says {show(known[line.ours])}"
    else:
        why.pop(line.theirs, None)


def _is_decided(line: Line, known: Mapping[str, JsonValue], waiting: list[Line]) -> bool:
    """Return whether no line that waits gives a value that a condition of this one asks for."""
    awaited = {one.ours for one in waiting if one is not line} - known.keys()
    return not any(condition.key in awaited for condition in _conditions(line))


def _conditions(line: Line) -> list[OneOf]:
    """Return the conditions on single other keys: the codec decides about the line's own."""
    return [one for one in line.when if isinstance(one, OneOf) and one.key not in (line.ours, f"{DERIVED}shards")]


def _of_processes(known: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the devices of a node, where a file counts processes and nodes."""
    processes, nodes = known.get(f"{DERIVED}world_size"), known.get("cluster.num_nodes")
    if not isinstance(processes, int) or not isinstance(nodes, int) or nodes < 1:
        return {}
    return {"cluster.devices_per_node": processes // nodes}
