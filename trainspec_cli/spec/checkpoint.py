"""When the run's state goes to disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointSpec:
    interval_steps: int | None = None
    """Steps between checkpoints; null writes one at the end (and on a stop) alone."""
    keep_last: int = 2
    """Older whole checkpoints are removed."""
