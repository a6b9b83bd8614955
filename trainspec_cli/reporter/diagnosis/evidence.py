"""The evidence for verdicts: arrays over T steps and R ranks, with shape (T, R), in seconds unless stated otherwise.
Unknown values are NaN. A counter that covers a window of several steps is spread evenly over these steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from trainspec_cli.recipe.results.verdict import Look
from trainspec_cli.run.folder.event_types.events import LinkEvent, StallEvent

Figures = npt.NDArray[np.float64]

OWN_PARTS = ("data_wait", "forward", "backward", "optimizer", "checkpoint", "other")
"""Parts of a step where a rank works alone. In the other parts, it waits for its peers or exchanges data with
them."""
COMPUTE_PARTS = ("forward", "backward", "optimizer")
COUNTERS = (
    "cpu_s",
    "queued_s",
    "exposed_queued_s",
    "throttled_s",
    "steal_s",
    "memory_stall_s",
    "major_faults",
    "gc_s",
    "compiles",
    "allocator_retries",
    "samples",
    "tokens",
    "attended",
    "agreed_s",
    "starved_s",
    "rss_bytes",
    "swap_bytes",
    "available_bytes",
)
READINGS = ("rss_bytes", "swap_bytes", "available_bytes")
"""Counters that are known only for the last step of a window, because they are read there."""


@dataclass(frozen=True)
class Connection:
    """A connection between two ranks as seen by its sender; arrays have the shape (T,)."""

    ranks: tuple[int, int]
    """(sender, receiver). If the receiver is unknown, the sender is listed twice."""
    sent_bytes: Figures
    segments: Figures
    resent: Figures
    timeouts: Figures
    busy_s: Figures
    rtt_s: Figures


@dataclass(frozen=True)
class RunEvidence:
    """All evidence on a run, or on its newest steps."""

    steps: npt.NDArray[np.int64]
    """(T,): the step numbers, ascending."""
    parts_s: Mapping[str, Figures]
    """The time of each part of a step, (T, R)."""
    counters: Mapping[str, Figures]
    """The counters listed in `COUNTERS`, by name, (T, R); empty if the ranks have no counters."""
    nodes: tuple[int, ...]
    """The node index of each rank."""
    kinds: tuple[int, ...]
    """The kind of each rank. Ranks of one kind do the same work, such as those of one pipeline stage."""
    connections: tuple[Connection, ...] = ()
    stalls: Mapping[int, StallEvent] = field(default_factory=dict)
    """The newest stall report of each rank, for the step after the last one."""
    link_changes: tuple[LinkEvent, ...] = ()
    """Links that were measured to be faster or slower than before."""
    retried_steps: tuple[int, ...] = ()
    """Steps that were repeated because an exchange between replica groups failed although no group left or joined."""
    looks: tuple[Look, ...] = ()
    """Profiles that ranks have taken of themselves. The profiled steps are not part of the evidence."""
    total_steps: int | None = None
    changed_steps: tuple[int, ...] = ()
    """The first steps after a change in a rank's work (by a directive, a larger batch or a restart)."""
    planned_s: Mapping[str, float] = field(default_factory=dict)
    """Planned time in seconds of each part of a step; empty without a plan."""
    parts_are_known: bool = True
    """False for a user command, whose entire step counts as `other`."""

    @property
    def on_accelerator(self) -> bool:
        """Return True if accelerators perform the exchanges. Their connections are not counted, and the exchanges do
        not depend on what the host does."""
        return "host_queued_s" in self.counters

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    def part(self, *names: str) -> Figures:
        """Return the total time of these parts, (T, R)."""
        return reduce(np.add, (self.parts_s[name] for name in names))

    def counter(self, name: str) -> Figures:
        """Return a counter (T, R), NaN where unknown."""
        found = self.counters.get(name)
        return np.full((len(self.steps), self.ranks), np.nan) if found is None else found

    @cached_property
    def shares(self) -> Figures:
        """Each rank's number of samples relative to the mean of the ranks that do the same work, (T, R); 1 if unknown
        or without samples."""
        samples = self.counter("samples")
        kinds = np.array(self.kinds)
        shares = np.ones_like(samples)
        for kind in np.unique(kinds):
            of_kind = np.flatnonzero(kinds == kind)
            mean = samples[:, of_kind].mean(axis=1, keepdims=True)
            known = (mean > 0) & (samples[:, of_kind] > 0)
            shares[:, of_kind] = np.where(known, samples[:, of_kind] / np.where(known, mean, 1.0), 1.0)
        return shares
