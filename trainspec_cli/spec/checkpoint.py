"""When the run's state goes to disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AutoInt


@dataclass(frozen=True)
class CheckpointSpec:
    interval_steps: AutoInt | None = None
    """Steps between checkpoints; null writes one at the end (and on a stop) alone.

    auto: as often as the checkpoints' measured cost and the cluster's failure rate ask for (Daly 2006).
    """
    mode: Literal["async", "sync"] = "async"
    """async: training waits for a copy in memory, which is written while it goes on; sync: until it is on disk."""
    keep_last: int = 2
    """Older whole checkpoints are removed."""
