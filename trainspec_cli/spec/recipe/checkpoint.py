"""Checkpoints: intervals, mode and number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AutoInt
from trainspec_cli.spec.numbers import PositiveInt


@dataclass(frozen=True)
class CheckpointSpec:
    interval_steps: AutoInt | None = None
    """Steps between checkpoints; null writes one only at the end (and on a stop).

    auto: as often as the checkpoints' measured cost and the cluster's failure rate ask for (Daly 2006).
    """
    mode: Literal["async", "sync"] = "async"
    """async: training waits for a copy in memory, which is then written in the background; sync: until it is on
    disk."""
    memory_interval_steps: PositiveInt | None = None
    """Steps between copies in the nodes' memory (/dev/shm), each node also keeping its predecessor's; null: none.

    They outlive the workers: a run that restarts on the same nodes, or with one of them replaced, resumes from them.
    They take twice the state's size (four times with two nodes or more) until the run has ended normally.
    """
    keep_last: PositiveInt = 2
    """Older whole checkpoints are removed."""
