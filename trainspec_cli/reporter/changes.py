"""Describe changes to a run, made by the scheduler or after a failure: the step, what changed, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import Absent
from trainspec_cli.reporter.plan.labels import stages_label
from trainspec_cli.run.folder.accounting import Recovery
from trainspec_cli.run.folder.event_types.events import (
    ADVICE,
    AchievedEvent,
    BucketsEvent,
    DirectiveEvent,
    MemoryEvent,
    NodesAchievedEvent,
    NodesEvent,
)

MANY = 8
"""With more ranks than this, sample shares are summarised instead of listed."""

RECOVERY_KINDS = {
    "left": "left",
    "joined": "came back",
    "retried": "the step was repeated",
    "restart": "the run restarted",
}


@dataclass(frozen=True)
class RunChange:
    step: int
    what: str
    why: str
    """The reason, and the time lost or saved; empty if there is nothing to add."""

    @property
    def line(self) -> str:
        """`step 30: shares are now 9, 5 of 14: rank 1 is slow; 38% less compute time is expected`."""
        return ": ".join(filter(None, (f"step {self.step}", self.what, self.why)))


def describe_recovery(recovery: Recovery) -> RunChange:
    """`step 41: group 1 left: 1.26 s, 1 step lost`: one entry of result.json's `recoveries`."""
    # For a participant other than a replica group, the kind has a prefix, as in `site_left`.
    noun, _, change = recovery.kind.rpartition("_")
    who = f"{noun or 'group'} {recovery.group} " if recovery.group is not None else ""
    lost = recovery.lost_steps
    stall_s = recovery.stall_s
    cost = [f"{stall_s:.2f} s"] if stall_s is not None else []
    cost += [f"{lost} step{'s' if lost > 1 else ''} lost"] if lost else []
    kind = RECOVERY_KINDS.get(change, change)
    return RunChange(recovery.step, f"{who}{kind}", ", ".join(cost))


def advises_shares(event: DirectiveEvent) -> bool:
    """Return whether the event only recommends different sample shares, without changing them. Such advice varies with
    the machine's load."""
    return not event.applied and event.kind in ("shares", "group_shares")


def keeps_shares(event: DirectiveEvent) -> bool:
    """Return whether this advice on sample shares cancels earlier advice. A run that only receives advice still has
    even shares, so advice to keep them cancels it."""
    return advises_shares(event) and max(event.counts) - min(event.counts) <= 1


def without_old_advice(directives: Iterable[DirectiveEvent]) -> list[DirectiveEvent]:
    """Return the directives without outdated advice. For each group, only the newest advice on its sample shares is
    kept, or none if that advice is to keep the current shares."""
    listed = list(directives)
    newest = {event.group: place for place, event in enumerate(listed) if advises_shares(event)}
    current = [event for at, event in enumerate(listed) if not advises_shares(event) or newest[event.group] == at]
    return [event for event in current if not keeps_shares(event)]


def describe_directive(event: DirectiveEvent, achieved: AchievedEvent | None = None) -> RunChange:
    """`step 30: shares are now 9, 9, 5, 9 of 32: data-parallel rank 2 takes 44 ms per sample (median: 24 ms);
    38% less compute time is expected`."""
    if event.kind in ("layers", "layout"):
        # `the layout is now pp=2 dp_shard=2, and was dp_shard=4: the recipe plans it; 120 MiB moved in 310 ms, with at
        # most 90 MiB of the state in any process during the change`.
        what = "the stages' layers are" if event.kind == "layers" else "the layout is"
        now, was = (_cut(one) if event.kind == "layers" else _axes(one) for one in (event.layout, event.before))
        if not event.applied and event.reason.startswith(ADVICE):
            advice = f"{what} {was}; {ADVICE}scheduler=auto would change this to {now}"
            return RunChange(event.step, advice, f"{event.reason.removeprefix(ADVICE)}; {_describe_gain(event, None)}")
        if not event.applied:
            return RunChange(event.step, f"{what} {was} and could not be changed to {now}", event.reason)
        parts = [event.reason]
        if not isinstance(event.pause_s, Absent):
            moved, peak = (format_bytes(size or 0) for size in (event.moved_bytes, event.peak_bytes))
            took = f"{moved} moved in {format_duration(event.pause_s)}"
            parts.append(f"{took}, with at most {peak} of the state in any process during the change")
        if event.before_s:
            parts.append(_describe_gain(event, achieved))
        changed = f"{what} now {now}, and {'were' if event.kind == 'layers' else 'was'} {was}"
        return RunChange(event.step, changed, "; ".join(parts))
    if keeps_shares(event):
        advice = f"{_group(event.group)}the advice is withdrawn: shares stay {summarise_counts(event.counts)}"
        return RunChange(event.step, advice, event.reason)
    verb = "shares are now" if event.applied else "advice: scheduler=auto would make shares"
    what = f"{_group(event.group)}{verb} {summarise_counts(event.counts)}"
    return RunChange(event.step, what, f"{event.reason}; {_describe_gain(event, achieved)}")


def _group(group: int | Absent | None) -> str:
    return f"group {group}: " if isinstance(group, int) else ""


def _describe_gain(event: DirectiveEvent, achieved: AchievedEvent | None) -> str:
    """`38% less compute time is expected, 35% achieved`; for a new layout, the full step times are compared."""
    what = "shorter steps are" if event.kind == "layout" else "less compute time is"
    saved = f"{_saving(event.before_s, event.expected_s)} {what} expected"
    return saved if achieved is None else f"{saved}, {_saving(achieved.before_s, achieved.achieved_s)} achieved"


def _saving(before_s: float, after_s: float) -> str:
    return f"{1 - after_s / before_s:.0%}" if before_s > 0 else "?"


def _cut(layout: Layout | Absent) -> str:
    return "?" if isinstance(layout, Absent) else stages_label(layout.stage_layers) or "even"


def _axes(layout: Layout | Absent) -> str:
    """`pp=2 dp_shard=2 zero_stage=1`."""
    if isinstance(layout, Absent):
        return "?"
    return f"{layout.describe()}{f' zero_stage={layout.zero_stage}' if layout.dp_shard > 1 else ''}"


def describe_buckets(event: BucketsEvent) -> RunChange:
    """`step 12: gradients are reduced in buckets of 4.00 MiB: a step waits 3 ms for them (block by block 9 ms)`."""
    taken = f"{_group(event.group)}gradients are reduced {_size_of_buckets(event.bucket_bytes)}"
    waited = {one.bucket_bytes: format_duration(one.waited_s) for one in event.tries}
    chosen = waited.pop(event.bucket_bytes, "?")
    beside = ", ".join(f"{_size_of_buckets(size)} {seconds}" for size, seconds in waited.items())
    return RunChange(event.step, taken, f"a step waits {chosen} for them{f' ({beside})' if beside else ''}")


def _size_of_buckets(bucket_bytes: int) -> str:
    return f"in buckets of {format_bytes(bucket_bytes)}" if bucket_bytes else "block by block"


def describe_memory(event: MemoryEvent) -> RunChange:
    """`step 30: micro-batches of 4 samples from here on: out of memory: ...; no step lost`."""
    lost = f"{event.lost_steps} step{'s' if event.lost_steps > 1 else ''} lost" if event.lost_steps else "no step lost"
    how = "after a restart" if event.restarts else "in place"
    taken = f"{_group(event.group)}{event.taken.describe(event.failed)}"
    return RunChange(event.step, f"{taken} from here on ({how}, {lost})", event.reason)


def describe_left_out(event: NodesEvent, achieved: NodesAchievedEvent | None = None) -> RunChange:
    """`step 120: node 3 is dropped: its ranks take 4.1 times as long as usual to compute; a step took 2.1 s and is
    expected to take 1.3 s`, followed by the result; `step 120: node 3 was lost: the run continues on 2 nodes`."""
    spare = f", node {event.spare} takes its place" if isinstance(event.spare, int) else ""
    if event.reason != "slow":
        what = {"lost": "was lost", "unfit": "cannot take part"}.get(event.reason, "takes part again")
        where = f"{event.num_nodes} node{'s' if event.num_nodes > 1 else ''}"
        return RunChange(event.step, f"node {event.node} {what}{spare}", f"{where} from here on, {_axes(event.layout)}")
    assert not isinstance(event.pace, Absent), "known for a slow node"
    assert not isinstance(event.before_s, Absent) and not isinstance(event.expected_s, Absent), "likewise"
    if event.applied:
        what = f"node {event.node} is dropped{spare}"
    else:
        what = f"advice: scheduler=auto would drop node {event.node}{spare}"
    before = format_duration(event.before_s)
    expected = format_duration(event.expected_s)
    why = (
        f"its ranks take {event.pace:.1f} times as long as usual to compute; "
        f"a step took {before} and is expected to take {expected}"
    )
    if achieved is not None:
        took = format_duration(achieved.achieved_s)
        restart = format_duration(achieved.restart_s)
        why += f"; it now takes {took} (the restart took {restart})"
    return RunChange(event.step, what, why)


def summarise_counts(counts: Sequence[int]) -> str:
    """`9, 9, 5, 9 of 32`; for many ranks the range, `5 to 9 of 1,024`; `8 each` if all are equal."""
    if len(set(counts)) == 1:
        return f"{counts[0]:,} each"
    shown = ", ".join(map(str, counts)) if len(counts) <= MANY else f"{min(counts):,} to {max(counts):,}"
    return f"{shown} of {sum(counts):,}"
