"""The events that record what happened in a run, with one dataclass per type.

Each event is a JSON object on one line of its rank's file. A field that is `Absent` has no key on disk. A reader
ignores fields of later versions; an event of an unknown type becomes an `UnknownEvent`. The leading replica group
writes rank 0's file, which is the run's log. Each process of a group also has a separate file below `groupNNNNN/`. The
supervisor's marks (launch, failure, ended) are in another file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.wings import Point, parts_of
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import (
    ABSENT,
    Absent,
    Count,
    FieldError,
    Rank,
    Rate,
    Seconds,
    ValueKind,
    WorldSize,
    from_plain,
    read_record,
)
from trainspec_cli.recipe.results.doctor import NodeFault
from trainspec_cli.recipe.results.tables import MemorySetting
from trainspec_cli.recipe.results.verdict import Collective, Look, RunVerdict

PARTS = ("data_wait", "forward", "backward", "exposed_comm", "optimizer", "checkpoint", "other")
"""The parts of a step's time, which sum to `step_time_s`."""
STARTUP = ("import", "join", "build", "restore", "prepare")
"""The parts of a worker's start: import torch and the engine, join the other workers, build the model, load the newest
state, and prepare the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The fields that all events have. The writer sets `time` and `rank`."""

    type: str
    time: Seconds = 0.0
    """Unix time in seconds."""
    rank: Rank = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownEvent(Event):
    """An event of a type that only a later version knows."""


# Events about changes to a run between two steps: sample shares, layers, layout, buckets, memory and nodes.


def _read_layout(value: object) -> Layout:
    try:
        return from_plain(Layout, value)
    except RecipeError as error:
        raise FieldError(error.problems[0].message) from error


WrittenLayout = Annotated[Layout, ValueKind("a layout", _read_layout, section=Layout)]


ADVICE = "advice: "
"""Prefix of the reason for not adopting a layout, if `scheduler.mode` is advise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerEvent(Event):
    """A line of `directives.jsonl`: a directive, or its effect."""

    step: Count
    """Number of updates completed before this event; a directive takes effect with the next update."""
    number: Count
    """Directives are numbered 1, 2, ... across the starts of a run, separately in each replica group. Changes of
    group_shares use the step as their number."""
    before_s: Seconds
    """Compute time of the slowest rank in a step, including the exchanges of its micro-batches; for a layout change,
    the step time."""
    expected_s: Seconds
    """The expected value of that time after the change. Both times are 0 if the recipe requested the change."""
    group: Count | Absent | None = ABSENT
    """The replica group of the ranks, if there are several groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectiveEvent(SchedulerEvent):
    """The scheduler changes the run between two steps, or advises a change."""

    type: Literal["directive"] = "directive"
    kind: Literal["shares", "group_shares", "layers", "layout"] = "shares"
    """shares: sample shares of the data-parallel ranks. group_shares: sample shares of the participating replica
    groups. layers: layers of the pipeline stages. layout: any other layout change."""
    applied: bool
    """Whether the change was made: False if `scheduler.mode` is advise, or if the layout could not be changed."""
    counts: tuple[Count, ...]
    """Number of samples per step for each rank or group."""
    micro_batch_size: Count | Absent = ABSENT
    """Maximum number of samples that a rank processes at a time; absent for group_shares."""
    micro_batches: Count | Absent = ABSENT
    reason: str
    before: WrittenLayout | Absent = ABSENT
    """For layers and layout: the previous layout."""
    layout: WrittenLayout | Absent = ABSENT
    """The new layout."""
    largest_micro_batch_size: Count | Absent | None = ABSENT
    """For layers and layout: the size, in samples, of the largest micro-batch that fits in memory in the new layout;
    None if unknown."""
    largest_stage_layers: Count | Absent | None = ABSENT
    pause_s: Seconds | Absent = ABSENT
    """For layers and layout: duration of the change."""
    moved_bytes: Count | Absent = ABSENT
    """Bytes of training state sent between ranks."""
    peak_bytes: Count | Absent = ABSENT
    """Peak number of bytes of training state on one rank during the change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedEvent(SchedulerEvent):
    """The effect of a directive was measured."""

    type: Literal["achieved"] = "achieved"
    achieved_s: Seconds
    """The measured value of that time after the change."""


@dataclass(frozen=True, slots=True)
class BucketTry:
    bucket_bytes: Count
    """Bucket size; 0 means that each block's gradients are reduced separately."""
    waited_s: Seconds
    """Time per step that a rank spent waiting for gradients: the mean over the ranks, then the median over the
    trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketsEvent(Event):
    """Trials have determined the best bucket size for reducing gradients. This is also recorded in
    `directives.jsonl`."""

    type: Literal["buckets"] = "buckets"
    step: Count
    """Number of updates completed before this event."""
    layout: str
    """The layout's axes during the trials. A run in another layout does not use this size."""
    bucket_bytes: Count
    tries: tuple[BucketTry, ...]
    group: Count | Absent | None = ABSENT


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent(Event):
    """The run has run out of memory and continues with another setting. This is a directive, so it is also recorded in
    `directives.jsonl`."""

    type: Literal["memory"] = "memory"
    kind: Literal["memory"] = "memory"
    step: Count
    """Number of updates completed before this event."""
    layout: str
    """The layout's axes at that time. A run in another layout does not use this setting."""
    failed: MemorySetting
    taken: MemorySetting
    restarts: bool
    """Whether the run restarted; False if the same processes repeated the step."""
    was_killed: bool = False
    """True if the kernel killed a process; False if an allocation failed."""
    reason: str
    lost_steps: Count = 0
    used_bytes: Count | Absent | None = ABSENT
    """Memory used by the process."""
    limit_bytes: Count | Absent | None = ABSENT
    """The process's memory limit."""
    group: Count | Absent | None = ABSENT
    """The replica group that ran out of memory, if there are several groups."""


NodeReason = Literal["slow", "lost", "unfit", "returned"]
"""Why a run changes its nodes: one is slow, was lost or cannot take part, or one that was missing is connected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesEvent(Event):
    """A start of the run uses other nodes than the one before, or dropping a node is advised. This is a directive, so
    it is also recorded in `directives.jsonl`."""

    type: Literal["nodes"] = "nodes"
    kind: Literal["nodes"] = "nodes"
    step: Count
    """Number of updates completed before this event."""
    number: Count
    """These events are numbered 1, 2, ... across the starts of a run, separately from other directives."""
    applied: bool
    """False if `scheduler.mode` is advise."""
    reason: NodeReason = "slow"
    node: Count
    """The number that the node had when the run started."""
    host: str
    spare: Count | Absent = ABSENT
    """The spare node that replaces the slow or lost one."""
    num_nodes: Count
    """Number of nodes that take part from now on."""
    layout: WrittenLayout
    """The new layout."""
    pace: Rate | Absent = ABSENT
    """Slowdown of a slow node's slowest rank: its compute time divided by the usual compute time."""
    before_s: Seconds | Absent = ABSENT
    """The current step time, if the node is slow."""
    expected_s: Seconds | Absent = ABSENT
    """The expected step time without a slow node."""
    cost_s: Seconds | Absent = ABSENT
    """Expected time of the restart, from the stop to its first step, if one was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesAchievedEvent(Event):
    """The effect of dropping a node was measured."""

    type: Literal["nodes_achieved"] = "nodes_achieved"
    step: Count
    number: Count
    """The directive's number."""
    achieved_s: Seconds
    """The step time since the restart."""
    restart_s: Seconds
    """Time of the restart, from the stop to its first step."""


# Events about failures and recoveries, and the supervisor's marks.


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryEvent(Event):
    """An exchange between replica groups failed, and the step is repeated."""

    type: Literal["retry"] = "retry"
    step: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryEvent(Event):
    type: Literal["recovery"] = "recovery"
    step: Count
    change: str
    """left, joined or retried for a replica group, NOUN_left or NOUN_joined for another participant (such as
    site_left), or restart for the entire run."""
    group: Count | None
    """Number of the replica group, or of the participant that NOUN names."""
    stall_s: Seconds | None
    lost_steps: Count | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchMark(Event):
    """The supervisor is starting the processes."""

    type: Literal["launch"] = "launch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureMark(Event):
    """The supervisor has noticed a failure."""

    type: Literal["failure"] = "failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFaultEvent(Event):
    """A node has failed, and this is what it, or the loss of its connection, says about the cause."""

    type: Literal["node_fault"] = "node_fault"
    host: str
    fault: NodeFault


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheckedEvent(Event):
    """A node that had failed repeatedly was examined, and nothing was found."""

    type: Literal["node_checked"] = "node_checked"
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedMark(Event):
    """All processes have ended."""

    type: Literal["ended"] = "ended"
    exit_code: int | None = None


# Events about what the ranks observe: links, counters, stalls and verdicts.


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """The slowest link of an axis, as measured in the exchanges of the training steps."""

    axis: str
    """An axis of the mesh, `expert_shard` or `groups` (`engine/run/scheduling/links.py`)."""
    ranks: tuple[Count, ...]
    """The ranks of the link; for `groups`, one rank from each replica group."""
    links: Count
    """Number of links along the axis."""
    bytes_per_s: Rate
    """Send rate of each rank of the link, excluding waits: the median over the samples since the link's last change."""
    noise: Rate
    """Standard deviation of the samples, as a fraction."""
    sent_bytes: Rate
    """Bytes that a rank sends in one exchange."""
    waited_s: Seconds
    """Time in seconds per exchange that the first rank to arrive waits for the last one."""
    last_rank: Count
    """The rank that arrived last in most samples."""
    samples: Count
    planned_bytes_per_s: Rate | Absent | None = ABSENT
    """The plan's value; absent if the plan has none for the axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksEvent(Event):
    """The current link speeds of each axis."""

    type: Literal["links"] = "links"
    step: Count
    links: tuple[LinkRate, ...]
    group: Count | Absent | None = ABSENT
    """The replica group of these ranks, if there are several groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEvent(Event):
    """A link has become faster or slower."""

    type: Literal["link"] = "link"
    step: Count
    since_step: Count
    """The first step that showed the change."""
    axis: str
    ranks: tuple[Count, ...]
    before_bytes_per_s: Rate
    now_bytes_per_s: Rate
    changed_links: Count = 1
    """Number of the axis's links that changed at the same time; this one changed the most."""
    group: Count | Absent | None = ABSENT
    """The replica group of these ranks, if there are several groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionCounts:
    """The segments that a connection sent and lost in a window, as counted by the sender's kernel."""

    local: str
    """Address and port of this end. The other end identifies the connection by the same pair."""
    peer: str
    sent_bytes: Count
    segments: Count
    resent: Count
    """Number of segments that were lost and retransmitted."""
    timeouts: Count
    """Number of retransmission timeouts."""
    busy_s: Seconds
    """Time during which sent data was not yet acknowledged."""
    rtt_s: Seconds
    """Smoothed round-trip time at the end of the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersEvent(Event):
    """Counters of a rank's process over the `steps` steps that end with `step`."""

    type: Literal["counters"] = "counters"
    step: Count
    steps: Count
    wall_s: Seconds
    own_s: Seconds
    """Total duration of these steps, excluding exchanges."""
    cpu_s: Seconds
    """Processor time of the main thread."""
    queued_s: Seconds
    """Time during exposed communication when the main thread was runnable but did not have a processor."""
    throttled_s: Seconds
    """Time during which a quota throttled the process's control group, summed over all processors."""
    steal_s: Seconds
    """Steal time: time during which other virtual machines occupied the node's processors, summed over all
    processors."""
    memory_stall_s: Seconds
    """Time during which at least one process on the node waited for memory."""
    major_faults: Count
    """Number of pages that had to be read from disk."""
    gc_s: Seconds
    """Processor time spent in Python's garbage collection."""
    gc_runs: Count
    compiles: Count
    """Number of graphs that torch compiled."""
    allocator_retries: Count
    """Number of times that the GPU's allocator released its cache to satisfy a request."""
    rss_bytes: Count
    swap_bytes: Count
    """Memory used by the process at the end of the window."""
    available_bytes: Count | Absent = ABSENT
    """Memory that the process can still allocate, given the node's memory and its control groups."""
    samples: Count | Absent = ABSENT
    """Number of samples that this rank processed. The scheduler may assign it more than others."""
    tokens: Count
    attended: Count
    """Sum of the squared lengths of the spans within which tokens attend to one another."""
    agreed_s: Seconds
    """Duration of the shortest of the small exchanges that end the steps. The minimum over all ranks is the network's
    latency."""
    left_at: Seconds
    """Unix time when this rank left the last of these exchanges, according to its node's clock."""
    starved_s: Seconds | Absent = ABSENT
    """Time in the passes and the optimizer during which an accelerator waited for the host to queue work; absent on a
    CPU."""
    connections: tuple[ConnectionCounts, ...]
    """The counts of the connections that sent the most data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageEvent(Event):
    """Resources used by a process of a user-defined command and its child processes, as seen from outside."""

    type: Literal["usage"] = "usage"
    step: Count
    cores: Rate
    """Processor time per second since the last such event."""
    rss_bytes: Count
    """Memory of the process itself."""
    swap_bytes: Count
    available_bytes: Count
    """Memory that the process can still allocate."""
    gpu_busy: Rate | Absent = ABSENT
    """Fraction of the last second or so during which the process's GPU ran a kernel; absent without a GPU."""
    gpu_bytes: Count | Absent = ABSENT
    """Memory that the process uses on its GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateStepEvent(Event):
    """The position of this rank within a step that is taking too long."""

    step: Count
    waited_s: Seconds
    host: str
    waiting: bool
    """True if the rank is in a collective."""
    waits_in: str | None
    collectives: dict[str, int]
    """Number of collectives that this rank has entered, for each process group."""
    stack: str
    entered: tuple[Collective, ...] = ()
    """The newest collectives of each process group, if a flight recorder is on."""
    late: tuple[Count, ...] | Absent = ABSENT
    """For a user command: the ranks that the run waits for, as found when the hang was reported."""
    why: str | Absent = ABSENT
    """For a user command: why the run waits for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StallEvent(LateStepEvent):
    """The step is taking far longer than usual and may be hanging, but the timeout has not expired yet."""

    type: Literal["stall"] = "stall"
    usual_s: Seconds
    """Duration of the slowest previous step."""
    early: bool = False
    """True if the step may still take longer, but a collective has not ended for a while. Only collectives that can
    never end, because the ranks have called different ones, then count as a hang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangEvent(LateStepEvent):
    """This rank has waited longer than a step may take."""

    type: Literal["hang"] = "hang"
    deadline_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictEvent(Event):
    """The cause of a slowdown was found during training. This is also recorded in `verdicts.jsonl`."""

    type: Literal["verdict"] = "verdict"
    step: Count
    """Number of steps completed when the cause was found, or when its end was detected."""
    is_over: bool
    verdict: RunVerdict


@dataclass(frozen=True, kw_only=True, slots=True)
class LookEvent(Event):
    """This rank has profiled a few of its steps."""

    type: Literal["look"] = "look"
    step: Count
    look: Look


# Events about the training itself: its start, steps, evaluations, checkpoints and end.


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent(Event):
    """The workers of a launch, a resume or a restart are ready to train."""

    type: Literal["start"] = "start"
    step: Count
    world_size: WorldSize
    device_name: str
    is_accelerator: bool = False
    """True if the device works asynchronously, so that the host's counters do not explain the device's times."""
    params: Count
    """Number of the model's own parameters."""
    adapter_params: Count = 0
    """Number of additional parameters trained by LoRA fine-tuning."""
    peak_flops: Rate
    """Peak of one device; `peak_source` states where the value comes from."""
    peak_source: str
    flops_per_token: Rate
    unit: str = "tokens"
    restored_from: str | None = None
    """The checkpoint's folder."""
    pid: int | Absent = ABSENT
    host: str | Absent = ABSENT
    startup_s: dict[str, Seconds] | Absent = ABSENT
    """Time in seconds of each part (`STARTUP`) of the worker's start, from its first line of code to this event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(Event):
    type: Literal["step"] = "step"
    step: Count
    loss: float | None
    grad_norm: float | None
    lr: float | Absent | None = ABSENT
    tokens: Count | Absent = ABSENT
    """Number of tokens; absent for images and volumes, whose samples are counted instead."""
    samples: Count | Absent = ABSENT
    steps: Count | Absent = ABSENT
    """1 for a step of a user-defined command, whose tokens and samples are unknown."""
    step_time_s: Seconds
    time_s: dict[str, Seconds]
    """Time in seconds of each part (`PARTS`)."""
    exchange_s: Seconds | Absent = ABSENT
    """Time during which an exchange between ranks was in progress; absent if no exchange overlaps with compute."""
    exposed_s: Seconds | Absent = ABSENT
    """The part of `exchange_s` that does not overlap with compute."""
    queued_s: Seconds | Absent = ABSENT
    """Time outside exposed communication when the main thread was runnable but did not have a processor."""
    noise_scale: float | Absent | None = ABSENT
    """Noise scale of the gradients, in samples (`balance/batch/batch.py`), averaged over the steps so far; None if it
    is infinite."""
    skipped: bool
    """True if nothing was updated, because the loss or the gradients were not finite."""
    h2d_copies: Count | Absent = ABSENT
    h2d_bytes: Count | Absent = ABSENT
    """Bytes of batches copied to the device; 0 if the device is the host."""
    allocations: Count | Absent = ABSENT
    """Number of buffers allocated for batches, and of memory calls to a GPU's driver. On a CPU, malloc calls are not
    counted."""
    group: Count | Absent | None = ABSENT
    """The replica group that wrote this event. `groups` groups took part in the step."""
    groups: tuple[Count, ...] | Absent = ABSENT
    took: tuple[Count, ...] | Absent = ABSENT
    """This group's (first sample, number of samples)."""

    @property
    def units(self) -> int:
        """Return the number of tokens; if tokens are not counted, the number of samples (images, volumes), or 1
        step."""
        for counted in (self.tokens, self.samples, self.steps):
            if not isinstance(counted, Absent):
                return counted
        raise AssertionError("a step event counts tokens, samples or steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFigures:
    loss: float | None
    bits_per_byte: float | None
    """Held-out loss in bits per byte; None if the number of bytes is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent(Event):
    """The held-out data was evaluated: text by bits per byte, images by accuracy, volumes by Dice."""

    type: Literal["eval"] = "eval"
    step: Count
    heldout_loss: float | None
    heldout_bits_per_byte: float | Absent | None = ABSENT
    xz_bits_per_byte: float | Absent | None = ABSENT
    sets: dict[str, SetFigures] | Absent = ABSENT
    """The results for each evaluation set by name, if there are several."""
    heldout_accuracy: float | Absent | None = ABSENT
    heldout_dice: float | Absent | None = ABSENT
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEvent(Event):
    """Text generated by the model."""

    type: Literal["sample"] = "sample"
    step: Count
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    text: str
    """Decoded text; long parts are shortened in the middle."""
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTextEvent(Event):
    """The first text of the first batch, with a mask that marks its trained tokens."""

    type: Literal["first_text"] = "first_text"
    step: Count
    tokens: Count
    """Number of tokens that could be targets."""
    trained: Count
    """Number of tokens that are targets, that is, counted in the loss."""
    parts: tuple[TextPart, ...]
    """The text is split where trained tokens start and end; these are its first parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(Event):
    type: Literal["checkpoint"] = "checkpoint"
    step: Count
    path: str
    bytes: Count
    seconds: Seconds
    """Time in seconds that training spent waiting."""
    written_s: Seconds | Absent | None = ABSENT
    """Time until the checkpoint was complete on disk; later steps ran in the meantime."""
    waited_s: Seconds | Absent | None = ABSENT
    """Time that the run spent at its end, outside any step, waiting for the last checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CadenceEvent(Event):
    """`checkpoint.interval_steps: auto` has chosen an interval; the other fields state why."""

    type: Literal["cadence"] = "cadence"
    step: Count
    interval_steps: Count
    blocked_s: Seconds
    drag_s: Seconds
    written_s: Seconds
    step_time_s: Seconds
    mtbf_s: float | None = None
    failures: Count | Absent = ABSENT
    """Number of this run's failures that `mtbf_s` takes into account; absent if there were none."""
    observed_s: Seconds | Absent = ABSENT
    """Total running time of the run when the failures were counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarningEvent(Event):
    type: Literal["warning"] = "warning"
    step: Count
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(Event):
    type: Literal["end"] = "end"
    step: Count
    status: str
    weights_sha256: str | None = None


# Parse events from the lines of a file.


EVENT_TYPES_OF_WINGS: Point[Mapping[str, type[Event]]] = Point("event_types")
"""A plug-in's event types by name. If the plug-in is missing, its events are read as UnknownEvent."""
EVENT_TYPES: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "eval": EvalEvent,
    "checkpoint": CheckpointEvent,
    "cadence": CadenceEvent,
    "hang": HangEvent,
    "sample": SampleEvent,
    "first_text": FirstTextEvent,
    "warning": WarningEvent,
    "retry": RetryEvent,
    "recovery": RecoveryEvent,
    "directive": DirectiveEvent,
    "achieved": AchievedEvent,
    "buckets": BucketsEvent,
    "memory": MemoryEvent,
    "nodes": NodesEvent,
    "nodes_achieved": NodesAchievedEvent,
    "links": LinksEvent,
    "link": LinkEvent,
    "counters": CountersEvent,
    "stall": StallEvent,
    "usage": UsageEvent,
    "verdict": VerdictEvent,
    "look": LookEvent,
    "end": EndEvent,
    "launch": LaunchMark,
    "failure": FailureMark,
    "node_fault": NodeFaultEvent,
    "node_checked": NodeCheckedEvent,
    "ended": EndedMark,
}
ONE_OF = {
    "step": ("tokens", "samples", "steps"),
    "eval": ("heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}
"""Maps an event type to a group of fields; each such event has at least one of them."""


@cache
def event_types() -> Mapping[str, type[Event]]:
    """Return all event types by name. Loads the plug-ins to include theirs."""
    return {name: kind for types in (EVENT_TYPES, *parts_of(EVENT_TYPES_OF_WINGS)) for name, kind in types.items()}


def parse_event(plain: Mapping[str, object]) -> Event:
    """Return the event that the values of a line describe. Raises FieldError if a required field is missing or a field
    has the wrong type."""
    for key in ("type", "time"):
        if key not in plain:
            raise FieldError(f"it has no `{key}`")
    kind = plain["type"]
    found = None
    if isinstance(kind, str):  # plug-ins are loaded only if the core has no event of that type
        found = EVENT_TYPES.get(kind) or event_types().get(kind)
    event = read_record(found or UnknownEvent, plain)
    choices = ONE_OF.get(event.type)
    if choices and not any(choice in plain for choice in choices):
        raise FieldError(f"it has none of {', '.join(f'`{choice}`' for choice in choices)}")
    return event
