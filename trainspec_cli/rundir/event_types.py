"""Events: what happened in a run, one dataclass per type. Each is one JSON object on a line of its rank's file.

A field that is `Absent` has no key on disk. Where a field of a later version is unknown here, it is passed over; an
event of an unknown type becomes an `UnknownEvent`.

The leading replica group writes rank 0's file, the run's log; each process of a group has a file of its own below
`groupNNNNN/`. The supervisor's marks (launch, failure, ended) are in a file of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from trainspec_cli.errors import RecipeError
from trainspec_cli.rundir.fields import Count, FieldError, Rank, Rate, Seconds, ValueKind, WorldSize, read_record
from trainspec_cli.spec.canonical import ABSENT, Absent, from_plain
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.memory import MemorySetting


def _read_layout(value: Any) -> Layout:
    try:
        return from_plain(Layout, value)
    except RecipeError as error:
        raise FieldError(error.problems[0].message) from error


WrittenLayout = Annotated[Layout, ValueKind("a layout", _read_layout)]
ADVICE = "advice: "
"""So begins the reason of a layout that was not changed to because `scheduler.mode` is advise."""
PARTS = ("data_wait", "forward", "backward", "exposed_comm", "optimizer", "checkpoint", "other")
"""What a step's time is divided into; the parts sum to `step_time_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The fields that every event has. The writer stamps `time` and `rank`."""

    type: str
    time: Seconds = 0.0
    """Unix seconds."""
    rank: Rank = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownEvent(Event):
    """An event of a type that a later version writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent(Event):
    """The workers of a launch, a resume or a restart are ready to train."""

    type: Literal["start"] = "start"
    step: Count
    world_size: WorldSize
    device_name: str
    params: Count
    peak_flops: Rate
    """Of one device; `peak_source` says how it is known."""
    peak_source: str
    flops_per_token: Rate
    unit: str = "tokens"
    restored_from: str | None = None
    """The checkpoint's folder."""
    pid: int | Absent = ABSENT
    host: str | Absent = ABSENT


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(Event):
    type: Literal["step"] = "step"
    step: Count
    loss: float | None
    grad_norm: float | None
    lr: float | Absent | None = ABSENT
    tokens: Count | Absent = ABSENT
    """Absent for images and volumes, which count samples."""
    samples: Count | Absent = ABSENT
    step_time_s: Seconds
    time_s: dict[str, Seconds]
    """By part (`PARTS`)."""
    noise_scale: float | Absent | None = ABSENT
    """Of the gradients, in samples (`policy/noise.py`), averaged over the steps so far; None where it is infinite."""
    skipped: bool
    """The loss or the gradients were not finite, and nothing was updated."""
    h2d_copies: Count | Absent = ABSENT
    h2d_bytes: Count | Absent = ABSENT
    """Batches copied to the device; 0 where it is the host itself."""
    allocations: Count | Absent = ABSENT
    """Buffers made for batches, and calls to a GPU's driver for memory; what malloc does on a CPU is not counted."""
    group: Count | Absent | None = ABSENT
    """The replica group that wrote this event; `groups` took part in the step."""
    groups: tuple[Count, ...] | Absent = ABSENT
    took: tuple[Count, ...] | Absent = ABSENT
    """(first sample, samples) of this group."""

    @property
    def units(self) -> int:
        """Tokens, or samples where no tokens are counted (images, volumes)."""
        counted = self.samples if isinstance(self.tokens, Absent) else self.tokens
        assert not isinstance(counted, Absent), "a step counts tokens or samples"
        return counted


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFigures:
    loss: float | None
    bits_per_byte: float | None
    """None where the number of bytes is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent(Event):
    """The held-out data were evaluated. Text has bits per byte, images have an accuracy, volumes have Dice."""

    type: Literal["eval"] = "eval"
    step: Count
    heldout_loss: float | None
    heldout_bits_per_byte: float | Absent | None = ABSENT
    xz_bits_per_byte: float | Absent | None = ABSENT
    sets: dict[str, SetFigures] | Absent = ABSENT
    """By name, where there are several."""
    heldout_accuracy: float | Absent | None = ABSENT
    heldout_dice: float | Absent | None = ABSENT
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(Event):
    type: Literal["checkpoint"] = "checkpoint"
    step: Count
    path: str
    bytes: Count
    seconds: Seconds
    """How long training waited."""
    written_s: Seconds | Absent | None = ABSENT
    """Until it was whole on disk, beside later steps."""
    waited_s: Seconds | Absent | None = ABSENT
    """Of the last one: how long the run's end waited for it, outside any step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CadenceEvent(Event):
    """`checkpoint.interval_steps: auto` has chosen an interval, for these reasons."""

    type: Literal["cadence"] = "cadence"
    step: Count
    interval_steps: Count
    blocked_s: Seconds
    drag_s: Seconds
    written_s: Seconds
    step_time_s: Seconds
    mtbf_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HangEvent(Event):
    """This rank has waited longer than a step may take."""

    type: Literal["hang"] = "hang"
    step: Count
    waited_s: Seconds
    deadline_s: float | None
    host: str
    waiting: bool
    """In a collective."""
    waits_in: str | None
    collectives: dict[str, int]
    """How many this rank has entered, by process group."""
    stack: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEvent(Event):
    """Text that the model wrote."""

    type: Literal["sample"] = "sample"
    step: Count
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WarningEvent(Event):
    type: Literal["warning"] = "warning"
    step: Count
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryEvent(Event):
    """An exchange between replica groups failed, and the step is made again."""

    type: Literal["retry"] = "retry"
    step: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryEvent(Event):
    type: Literal["recovery"] = "recovery"
    step: Count
    change: str
    """left, joined or retried (replica groups), or restart (the whole run)."""
    group: Count | None
    stall_s: Seconds | None
    lost_steps: Count | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerEvent(Event):
    """A line of `directives.jsonl`: a directive, or its effect."""

    step: Count
    """So many updates were made before it; a directive holds from the next one on."""
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
    """So much of the state was sent from rank to rank."""
    peak_bytes: Count | Absent = ABSENT
    """One rank held so much of the state meanwhile, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedEvent(SchedulerEvent):
    """The effect of a directive was measured."""

    type: Literal["achieved"] = "achieved"
    achieved_s: Seconds
    """The same takes so long since then."""


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
    """What the process held."""
    limit_bytes: Count | Absent | None = ABSENT
    """What it may hold."""
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
    """So many take part from here on."""
    layout: WrittenLayout
    """From here on."""
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
    """Of the directive."""
    achieved_s: Seconds
    """A step takes so long since then."""
    restart_s: Seconds
    """The new start took so long, from the stop to its first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(Event):
    type: Literal["end"] = "end"
    step: Count
    status: str
    weights_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchMark(Event):
    """The supervisor starts the processes."""

    type: Literal["launch"] = "launch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureMark(Event):
    """The supervisor has learned of a failure."""

    type: Literal["failure"] = "failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedMark(Event):
    """All processes have ended."""

    type: Literal["ended"] = "ended"
    exit_code: int | None = None


EVENT_TYPES: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "eval": EvalEvent,
    "checkpoint": CheckpointEvent,
    "cadence": CadenceEvent,
    "hang": HangEvent,
    "sample": SampleEvent,
    "warning": WarningEvent,
    "retry": RetryEvent,
    "recovery": RecoveryEvent,
    "directive": DirectiveEvent,
    "achieved": AchievedEvent,
    "memory": MemoryEvent,
    "nodes": NodesEvent,
    "nodes_achieved": NodesAchievedEvent,
    "end": EndEvent,
    "launch": LaunchMark,
    "failure": FailureMark,
    "ended": EndedMark,
}
_ONE_OF = {"step": ("tokens", "samples"), "eval": ("heldout_bits_per_byte", "heldout_accuracy", "heldout_dice")}
"""At least one of these must be there."""


def parse_event(plain: Mapping[str, Any]) -> Event:
    """Return the event that a line holds. Raises FieldError where a field that readers count on is missing, or one is
    not of its kind."""
    for key in ("type", "time"):
        if key not in plain:
            raise FieldError(f"it has no `{key}`")
    kind = plain["type"]
    event = read_record(EVENT_TYPES.get(kind, UnknownEvent) if isinstance(kind, str) else UnknownEvent, plain)
    choices = _ONE_OF.get(event.type)
    if choices and not any(choice in plain for choice in choices):
        raise FieldError(f"it has none of {', '.join(f'`{choice}`' for choice in choices)}")
    return event
