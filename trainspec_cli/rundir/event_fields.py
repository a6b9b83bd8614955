"""Which kind of value each field of an event has, so that a damaged line is told of and not reckoned with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainspec_cli.reading.json_file import show_kind


@dataclass(frozen=True)
class Number:
    low: float
    high: float
    whole: bool = False
    may_miss: bool = False
    """null."""
    may_diverge: bool = False
    """NaN and infinity."""

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.may_miss
        if isinstance(value, float) and not math.isfinite(value):
            return self.may_diverge
        kinds = (int,) if self.whole else (int, float)
        return type(value) in kinds and self.low <= value <= self.high

    def describe(self) -> str:
        return f"{'a whole number' if self.whole else 'a number'} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Words:
    def holds(self, value: Any) -> bool:
        return isinstance(value, str)

    def describe(self) -> str:
        return "text"


@dataclass(frozen=True)
class Truth:
    def holds(self, value: Any) -> bool:
        return isinstance(value, bool)

    def describe(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Seconds:
    """Seconds by name."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict) and all(_SECONDS.holds(seconds) for seconds in value.values())

    def describe(self) -> str:
        return "an object of seconds"


_COUNT = Number(0, 2**53, whole=True)
_SECONDS = Number(-1e12, 1e12)
_LOSS = Number(-1e30, 1e30, may_diverge=True)
_FIGURE = Number(-1e30, 1e30, may_miss=True, may_diverge=True)
_RATE = Number(0, 1e30)


@dataclass(frozen=True)
class Sets:
    """Losses of validation sets by name."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict) and all(map(self._holds_one, value.values()))

    def _holds_one(self, figures: Any) -> bool:
        if not isinstance(figures, dict) or not {"loss", "bits_per_byte"} <= figures.keys():
            return False
        return _LOSS.holds(figures["loss"]) and _FIGURE.holds(figures["bits_per_byte"])

    def describe(self) -> str:
        return "an object of sets with `loss` and `bits_per_byte`"


FIELDS: dict[str, Number | Words | Truth | Seconds | Sets] = {
    "type": Words(),
    "time": _SECONDS,
    "rank": Number(-1, 1e7, whole=True),
    "step": _COUNT,
    "world_size": Number(1, 1e6, whole=True),
    "params": _COUNT,
    "tokens": _COUNT,
    "samples": _COUNT,
    "bytes": _COUNT,
    "lost_steps": Number(0, 2**53, whole=True, may_miss=True),
    "group": Number(0, 1e7, whole=True, may_miss=True),
    "loss": _FIGURE,
    "grad_norm": _FIGURE,
    "lr": _FIGURE,
    "heldout_loss": _LOSS,
    "heldout_bits_per_byte": _FIGURE,
    "heldout_accuracy": _LOSS,
    "heldout_dice": _LOSS,
    "xz_bits_per_byte": _FIGURE,
    "peak_flops": _RATE,
    "flops_per_token": _RATE,
    "step_time_s": _SECONDS,
    "seconds": _SECONDS,
    "written_s": Number(-1e12, 1e12, may_miss=True),
    "waited_s": Number(-1e12, 1e12, may_miss=True),
    "stall_s": Number(-1e12, 1e12, may_miss=True),
    "time_s": Seconds(),
    "sets": Sets(),
    "skipped": Truth(),
    "device_name": Words(),
    "peak_source": Words(),
    "unit": Words(),
    "path": Words(),
    "message": Words(),
    "prompt": Words(),
    "text": Words(),
    "change": Words(),
}
NEEDED: dict[str, tuple[str, ...]] = {
    "start": ("step", "world_size", "device_name", "params", "peak_flops", "peak_source", "flops_per_token"),
    "step": ("step", "loss", "grad_norm", "step_time_s", "time_s", "skipped"),
    "eval": ("step", "heldout_loss"),
    "checkpoint": ("step", "path", "bytes", "seconds"),
    "sample": ("step", "prompt", "text"),
    "warning": ("step", "message"),
    "recovery": ("step", "change", "group", "stall_s", "lost_steps"),
}
"""What the readers of a kind of event count on, besides `type`, `time` and `rank`."""
ONE_NEEDED = {
    "step": ("tokens", "samples"),
    "eval": ("heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}
"""Of these one at least."""


def find_fault(event: dict[str, Any]) -> str | None:
    """What is wrong with the first field that is not of its kind; None where all are."""
    for name in ("type", "time", *NEEDED.get(str(event.get("type")), ())):
        if name not in event:
            return f"it has no `{name}`"
    choices = ONE_NEEDED.get(event["type"]) if isinstance(event["type"], str) else None
    if choices and not event.keys() & set(choices):
        return f"it has none of {', '.join(f'`{name}`' for name in choices)}"
    for name, value in event.items():
        kind = FIELDS.get(name)
        if kind is not None and not kind.holds(value):
            return f"`{name}` is {show_kind(value)}; {kind.describe()} is needed"
    return None
