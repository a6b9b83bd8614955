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
    memory_interval_steps: int | None = None
    """Steps between copies in the hosts' memory (/dev/shm), each node keeping the one before it's too; null: none.

    They outlive the workers: a run that starts again on the same hosts, a lost one replaced, goes on from them. They
    take twice the state's size, of two nodes or more four times, until the run has ended in order.
    """
    keep_last: int = 2
    """Older whole checkpoints are removed."""
