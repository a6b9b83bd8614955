"""result.json: how a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RunResult:
    """A run that its workers have ended themselves."""

    status: Literal["done", "stopped"]
    exit_code: int
    steps: int
    final_loss: float | None
    heldout: Mapping[str, Any]
    """Figures of the last evaluation, by the names that they have in the file."""
    unit: str
    """What the data is counted in: tokens or samples."""
    units_per_s: float
    mfu: float
    peak_memory_bytes: int
    """Of the rank that used most."""
    weights_sha256: str
    goodput: float | None
    time_s: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds: evaluated figures stand beside the others, and the speed is named by its unit."""
        renamed = {"heldout": self.heldout, "unit": {}, "units_per_s": {f"{self.unit}_per_s": self.units_per_s}}
        columns = (renamed.get(name, {name: value}) for name, value in vars(self).items())
        return {key: value for column in columns for key, value in column.items()}
