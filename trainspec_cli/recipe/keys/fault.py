"""Faults to inject into a run: `kill(group=1,step=40); slow(step=60,seconds=0.2,steps=5)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, get_args

FaultKind = Literal[
    "kill",
    "stop",
    "hang",
    "exception",
    "oom",
    "slow",
    "throttle",
    "bitflip",
    "disk_full",
    "lighthouse",
    "move_kill",
    "move_oom",
]


@dataclass(frozen=True)
class Fault:
    """A fault, injected once in a run after `step` updates, during the gradient exchange of the next."""

    kind: FaultKind
    """kill: SIGKILL. stop: SIGSTOP. hang: the worker waits forever. exception, oom: it raises one. slow: it sleeps.

    oom with `above`: from `step` on, in every start, the backward of a micro-batch of more samples finds no memory.

    throttle: its passes take `seconds` longer for each sample, as on a slower device.

    bitflip: one bit of a parameter changes. disk_full: no file that it writes grows beyond a page. lighthouse: the
    rendezvous server, where the replica groups meet, is killed. move_kill, move_oom: as kill and oom, when half of the
    state has been moved to another layout.
    """
    step: int
    group: int = 0
    rank: int = 0
    """The rank within the replica group."""
    seconds: float = 1.0
    """slow: the delay per step; throttle: per sample."""
    steps: int = 1
    """slow, throttle, disk_full: the number of steps."""
    above: int | None = None
    """oom: the samples that there is memory for."""

    def lasts_at(self, step: int) -> bool:
        """Return whether a fault of several steps goes on after update `step`."""
        return self.step <= step < self.step + self.steps


class FaultSyntaxError(ValueError):
    """The text of a fault is wrong; the message says what is allowed."""


_ONE = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_NUMBERS = {"step": int, "group": int, "rank": int, "seconds": float, "steps": int, "above": int}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults separated by `;`. Raises FaultSyntaxError."""
    return tuple(_parse(part) for part in text.split(";") if part.strip())


def _parse(text: str) -> Fault:
    match = _ONE.fullmatch(text)
    if match is None:
        raise FaultSyntaxError(f"`{text.strip()}` is not a fault; write, for example, kill(group=1,step=40)")
    kind, arguments = match.group(1), dict(_arguments(match.group(2)))
    if kind not in get_args(FaultKind):
        raise FaultSyntaxError(f"there is no fault `{kind}`; there are {', '.join(get_args(FaultKind))}")
    if "step" not in arguments:
        raise FaultSyntaxError(f"`{text.strip()}` has no step; write, for example, {kind}(step=40)")
    return Fault(kind, **arguments)  # type: ignore[arg-type]


def _arguments(text: str) -> Iterator[tuple[str, float]]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _NUMBERS:
            names = ", ".join(field.name for field in fields(Fault) if field.name != "kind")
            raise FaultSyntaxError(f"a fault has no `{name}`; it has {names}")
        try:
            number = _NUMBERS[name](value)
        except ValueError:
            raise FaultSyntaxError(f"`{part}` needs a number") from None
        if number < 0:
            raise FaultSyntaxError(f"`{part}` is below 0")
        yield name, number
