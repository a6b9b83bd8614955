"""Types for the fields of a recipe: numbers with a range, the largest accepted values, and `auto`."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Range:
    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = True

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return above and below

    def describe(self) -> str:
        """Return text such as `at least 1`, or `more than 0 and less than 1`."""
        low = f"{'at least' if self.includes_low else 'more than'} {self.low:g}"
        high = f"{'at most' if self.includes_high else 'less than'} {self.high:g}"
        return low if math.isinf(self.high) else f"{low} and {high}"


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, includes_low=False)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]

MISSING = "???"
"""Marks a value that the recipe or the command line has to set (Hydra's notation)."""
AUTO: Literal["auto"] = "auto"
"""A value that the planner resolves before launch. Workers never see it."""
Auto = Literal["auto"]
AutoInt = PositiveInt | Auto
Option = bool | int | float | str | tuple[float, ...] | None
"""The value of an argument for user-defined code."""


@cache
def ranges_of(section: type) -> Mapping[str, Range]:
    """Return the ranges of a dataclass's own numeric fields by name. The range of a list applies to each of its
    values."""
    hints = typing.get_type_hints(section, include_extras=True)
    found = {field.name: _range_in(hints[field.name]) for field in fields(section)}
    return {name: allowed for name, allowed in found.items() if allowed}


def _range_in(hint: Any) -> Range | None:
    if typing.get_origin(hint) is Annotated:
        return next((note for note in hint.__metadata__ if isinstance(note, Range)), None)
    return next(filter(None, map(_range_in, typing.get_args(hint))), None)


LARGEST_WHOLE = 10**15
LARGEST = 1e30
"""Maximum for numbers that need not be integers."""

_NAMES_BY_LARGEST = {
    1_000: ("prediction_layers", "planes"),
    10_000: (
        *("num_layers", "mamba_layers", "attention_layers", "mlp_layers", "expert_layers", "first_dense_layers"),
        *("blocks", "pp", "virtual_stages"),
    ),
    65_536: ("num_experts", "top_k", "num_groups", "top_groups", "shared_experts"),
    10**5: ("devices_per_node",),
    10**6: (
        "entropy_values",
        *("num_heads", "num_kv_heads", "head_dim", "widths", "input_size", "rank", "max_new_tokens"),
        *("num_nodes", "scaleup_devices", "spare_nodes", "replica_groups", "min_groups", "max_restarts_per_hour"),
        *("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"),
    ),
    10**7: ("hidden_size",),
    10**8: ("ffn_size", "expert_ffn_size", "shared_expert_ffn_size"),
    10**9: ("vocab_size", "seq_len", "global_batch_size", "micro_batch_size", "samples"),
    10**12: ("max_steps",),
}
LARGEST_OF = {name: largest for largest, names in _NAMES_BY_LARGEST.items() for name in names}
"""Last word of a key -> its largest value, which is far beyond any real run, yet small enough that loops over it
terminate."""


def largest_of(path: str, value: int | float) -> int | float:
    general = LARGEST_WHOLE if isinstance(value, int) else LARGEST
    return LARGEST_OF.get(path.rpartition(".")[2], general)
