"""Events of what the ranks observe beside training: links, counters, stalls and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.canonical import ABSENT, Absent
from trainspec_cli.recipe.records import Count, Rate, Seconds
from trainspec_cli.recipe.results.look import Look
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.run.folder.event_types.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """The slowest link of an axis, as the steps' own exchanges show it."""

    axis: str
    """An axis of the mesh, `expert_shard` or `groups` (`engine/run/scheduling/links.py`)."""
    ranks: tuple[Count, ...]
    """The ranks of the link; of `groups` one rank of every replica group."""
    links: Count
    """The number of the axis' links."""
    bytes_per_s: Rate
    """Rate at which each of its ranks sends, waiting left out: the median over the samples since its last change."""
    noise: Rate
    """The samples' standard deviation, as a fraction."""
    sent_bytes: Rate
    """Bytes that a rank sends in one exchange."""
    waited_s: Seconds
    """The first rank waits so long for the last one in each exchange."""
    last_rank: Count
    """The rank that came last in most samples."""
    samples: Count
    planned_bytes_per_s: Rate | Absent | None = ABSENT
    """The plan's figure; absent where it has not looked at the axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksEvent(Event):
    """The speeds of the links of each axis by now."""

    type: Literal["links"] = "links"
    step: Count
    links: tuple[LinkRate, ...]
    group: Count | Absent | None = ABSENT
    """The replica group whose ranks these are, where there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEvent(Event):
    """A link has become faster or slower."""

    type: Literal["link"] = "link"
    step: Count
    since_step: Count
    """The first step that showed it."""
    axis: str
    ranks: tuple[Count, ...]
    before_bytes_per_s: Rate
    now_bytes_per_s: Rate
    changed_links: Count = 1
    """The number of links of the axis that changed at once; this one changed most."""
    group: Count | Absent | None = ABSENT
    """The replica group whose ranks these are, where there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionCounts:
    """A connection's segments in a window, sent and lost, counted by the kernel of the sending end."""

    local: str
    """Address and port of this end; the other end knows the connection by the same two."""
    peer: str
    sent_bytes: Count
    segments: Count
    resent: Count
    """Segments that were sent again, and had been lost."""
    timeouts: Count
    """Times that no answer came until the connection gave up waiting, and sent again."""
    busy_s: Seconds
    """Time in which something sent had not been acknowledged."""
    rtt_s: Seconds
    """Smoothed round-trip time at the window's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersEvent(Event):
    """Counters of a rank's process over the `steps` steps up to `step`."""

    type: Literal["counters"] = "counters"
    step: Count
    steps: Count
    wall_s: Seconds
    own_s: Seconds
    """Time of the steps without what was spent in exchanges."""
    cpu_s: Seconds
    """Processor time of the main thread."""
    queued_s: Seconds
    """Time in which the main thread could run and had no processor, in exposed communication."""
    throttled_s: Seconds
    """Time for which a quota held the process's control group back, over all processors."""
    steal_s: Seconds
    """Time for which other virtual machines had the node's processors, over all of them."""
    memory_stall_s: Seconds
    """Time in which some process of the node waited for memory."""
    major_faults: Count
    """Pages that had to be read from disk."""
    gc_s: Seconds
    """Processor time in Python's garbage collection."""
    gc_runs: Count
    compiles: Count
    """Graphs that torch compiled."""
    allocator_retries: Count
    """Times that the GPU's allocator gave back what it held to satisfy a request."""
    rss_bytes: Count
    swap_bytes: Count
    """At the window's end."""
    available_bytes: Count | Absent = ABSENT
    """Memory that the process may still take, by the node's memory and its control groups."""
    samples: Count | Absent = ABSENT
    """Samples of this rank: the scheduler may give it more than others."""
    tokens: Count
    attended: Count
    """The sum of the squares of the lengths within which tokens attend to one another."""
    agreed_s: Seconds
    """The shortest of the small exchanges that end each step; of all ranks' the least is the network's latency."""
    left_at: Seconds
    """Unix time when this rank left the last of them, by its node's clock."""
    connections: tuple[ConnectionCounts, ...]
    """The connections that sent most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageEvent(Event):
    """What a process of one's own command uses, seen from outside, with what it has started."""

    type: Literal["usage"] = "usage"
    step: Count
    cores: Rate
    """Processor time in a second since the last such event."""
    rss_bytes: Count
    """Memory of the process itself."""
    swap_bytes: Count
    available_bytes: Count
    """Memory that it may still take."""
    gpu_busy: Rate | Absent = ABSENT
    """Part of the last second or so in which its GPU ran a kernel; absent where it has none."""
    gpu_bytes: Count | Absent = ABSENT
    """Memory of its GPUs that it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateStepEvent(Event):
    """The position of this rank in a step that takes too long."""

    step: Count
    waited_s: Seconds
    host: str
    waiting: bool
    """True in a collective."""
    waits_in: str | None
    collectives: dict[str, int]
    """The number that this rank has entered, by process group."""
    stack: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StallEvent(LateStepEvent):
    """The step takes far longer than usual, and may be hung; the time-out has not come yet."""

    type: Literal["stall"] = "stall"
    usual_s: Seconds
    """The slowest of the steps before it took so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangEvent(LateStepEvent):
    """This rank has waited longer than a step may take."""

    type: Literal["hang"] = "hang"
    deadline_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictEvent(Event):
    """Something that slows the run was found while it goes on: a line of `verdicts.jsonl`."""

    type: Literal["verdict"] = "verdict"
    step: Count
    """Steps made when it was found, or had ended."""
    is_over: bool
    verdict: RunVerdict


@dataclass(frozen=True, kw_only=True, slots=True)
class LookEvent(Event):
    """This rank has looked at itself more deeply for a few steps."""

    type: Literal["look"] = "look"
    step: Count
    look: Look
