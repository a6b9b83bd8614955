"""Events of what changes a run between two steps: shares, layers, layout, buckets, memory and nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.canonical import ABSENT, Absent, from_plain
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import Count, FieldError, Rate, Seconds, ValueKind
from trainspec_cli.recipe.results.memory import MemorySetting
from trainspec_cli.run.folder.event_types.event import Event


def _read_layout(value: object) -> Layout:
    try:
        return from_plain(Layout, value)
    except RecipeError as error:
        raise FieldError(error.problems[0].message) from error


WrittenLayout = Annotated[Layout, ValueKind("a layout", _read_layout, section=Layout)]


ADVICE = "advice: "
"""The beginning of the reason for a layout that was not changed to because `scheduler.mode` is advise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerEvent(Event):
    """A line of `directives.jsonl`: a directive, or its effect."""

    step: Count
    """Updates made before it; a directive holds from the next one on."""
    number: Count
    """Directives are numbered 1, 2, ... over the starts of a run; each replica group numbers its own, and group_shares
    have their step's."""
    before_s: Seconds
    """The slowest rank's own computing in a step took so long, with the exchanges of its micro-batches; before another
    layout, the step itself."""
    expected_s: Seconds
    """The same is expected to take so long after the change; both are 0 where the recipe asked for it."""
    group: Count | Absent | None = ABSENT
    """The replica group whose ranks it is about, where there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectiveEvent(SchedulerEvent):
    """The scheduler changes the run between two steps, or advises it."""

    type: Literal["directive"] = "directive"
    kind: Literal["shares", "group_shares", "layers", "layout"] = "shares"
    """shares: of the data-parallel ranks. group_shares: of the replica groups that take part. layers: of the pipeline's
    stages. layout: any other change of the layout."""
    applied: bool
    """False: `scheduler.mode` is advise, or the layout could not be changed."""
    counts: tuple[Count, ...]
    """Each takes so many samples of a step."""
    micro_batch_size: Count | Absent = ABSENT
    """A rank processes at most so many samples at a time; absent of group_shares."""
    micro_batches: Count | Absent = ABSENT
    reason: str
    before: WrittenLayout | Absent = ABSENT
    """layers, layout: the layout up to now."""
    layout: WrittenLayout | Absent = ABSENT
    """The layout from here on."""
    largest_micro_batch_size: Count | Absent | None = ABSENT
    """layers, layout: what memory allows there, for shares; None where that is not known."""
    largest_stage_layers: Count | Absent | None = ABSENT
    pause_s: Seconds | Absent = ABSENT
    """layers, layout: what the change took."""
    moved_bytes: Count | Absent = ABSENT
    """Bytes of the state that were sent from rank to rank."""
    peak_bytes: Count | Absent = ABSENT
    """One rank held so much of the state meanwhile, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedEvent(SchedulerEvent):
    """The effect of a directive was measured."""

    type: Literal["achieved"] = "achieved"
    achieved_s: Seconds
    """The same takes so long since then."""


@dataclass(frozen=True, slots=True)
class BucketTry:
    bucket_bytes: Count
    """0: each block's gradients by themselves."""
    waited_s: Seconds
    """The time of a step in which a rank waited for gradients: the median over the tries, of the ranks' mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketsEvent(Event):
    """A size of the buckets in which gradients are summed was found by tries. Also a line of `directives.jsonl`."""

    type: Literal["buckets"] = "buckets"
    step: Count
    """Updates made before it."""
    layout: str
    """The axes that it was found in: a run in another layout does not follow it."""
    bucket_bytes: Count
    tries: tuple[BucketTry, ...]
    group: Count | Absent | None = ABSENT


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent(Event):
    """Memory ran out, and the run goes on with another setting. A directive: also a line of `directives.jsonl`."""

    type: Literal["memory"] = "memory"
    kind: Literal["memory"] = "memory"
    step: Count
    """Updates made before it."""
    layout: str
    """The axes that the setting was of: a run in another layout does not follow it."""
    failed: MemorySetting
    taken: MemorySetting
    restarts: bool
    """False: the same processes made the step again."""
    was_killed: bool = False
    """The kernel killed a process; else an allocation failed."""
    reason: str
    lost_steps: Count = 0
    used_bytes: Count | Absent | None = ABSENT
    """Memory that the process held."""
    limit_bytes: Count | Absent | None = ABSENT
    """Memory that it may hold."""
    group: Count | Absent | None = ABSENT
    """The replica group whose memory it was, where there are several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesEvent(Event):
    """A node is left out of the run, or that is advised. A directive: also a line of `directives.jsonl`."""

    type: Literal["nodes"] = "nodes"
    kind: Literal["nodes"] = "nodes"
    step: Count
    """Updates made before it."""
    number: Count
    """These are numbered 1, 2, ... over the starts of a run, apart from other directives."""
    applied: bool
    """False: `scheduler.mode` is advise."""
    node: Count
    """As it was numbered when the run was started."""
    host: str
    spare: Count | Absent = ABSENT
    """The node that takes its place."""
    num_nodes: Count
    """Nodes that take part from here on."""
    layout: WrittenLayout
    """The layout from here on."""
    pace: Rate
    """The slowest of its ranks computes so many times as long as usual."""
    before_s: Seconds
    """A step took so long."""
    expected_s: Seconds
    """A step is expected to take so long without the node."""
    cost_s: Seconds
    """The new start is expected to take so long, from the stop to its first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesAchievedEvent(Event):
    """The effect of leaving a node out was measured."""

    type: Literal["nodes_achieved"] = "nodes_achieved"
    step: Count
    number: Count
    """The number of the directive."""
    achieved_s: Seconds
    """A step takes so long since then."""
    restart_s: Seconds
    """The new start took so long, from the stop to its first step."""
