"""Events and figures as short texts, the same in the live view and in the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainspec_cli.report.kernels_text import describe_choice
from trainspec_cli.report.plan.labels import stages_label
from trainspec_cli.report.progress import Progress
from trainspec_cli.rundir.accounting import Recovery, recovery_of
from trainspec_cli.rundir.event_types import (
    ADVICE,
    AchievedEvent,
    CadenceEvent,
    CheckpointEvent,
    DirectiveEvent,
    EvalEvent,
    Event,
    MemoryEvent,
    NodesAchievedEvent,
    NodesEvent,
    RecoveryEvent,
    StartEvent,
    WarningEvent,
)
from trainspec_cli.spec.canonical import Absent
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.prediction import LocalPrediction
from trainspec_cli.units import format_bytes, format_count, format_duration, format_si

MANY = 8
"""Shares of more ranks than this are not listed one by one."""


def describe_progress(progress: Progress) -> str:
    """`loss 4.213 · 2,810 tokens/s · 41.0% MFU · 1 min 33 s left`, as far as known."""
    parts = [_loss(progress.loss)] if progress.has_stepped else []
    if progress.tokens_per_s is not None and progress.mfu is not None:
        parts.append(describe_speed(progress.tokens_per_s, progress.mfu, progress.unit))
    if progress.time_left_s:
        parts.append(f"{format_duration(progress.time_left_s)} left")
    return " · ".join(parts)


def describe_speed(units_per_s: float, mfu: float, unit: str = "tokens") -> str:
    """`2,810 tokens/s · 41.0% MFU`, or `2.81 samples/s`: of images and volumes there may be few."""
    rate = f"{units_per_s:,.0f}" if units_per_s >= 100 else f"{units_per_s:.3g}"
    return f"{rate} {unit}/s · {mfu:.1%} MFU"


def describe_event(event: Event) -> str:
    """Describe in a line or two what happens beside the steps; empty for events that need none."""
    match event:
        case StartEvent():
            return describe_start(event)
        case EvalEvent():
            return f"step {event.step}: held out {describe_evaluation(event)}"
        case CheckpointEvent():
            return f"step {event.step}: checkpoint, {format_bytes(event.bytes)} {describe_saving(event)}"
        case CadenceEvent():
            return f"step {event.step}: {describe_cadence(event)}"
        case RecoveryEvent():
            return describe_recovery(recovery_of(event))
        case DirectiveEvent():
            return describe_directive(event)
        case MemoryEvent():
            return describe_memory(event)
        case NodesEvent():
            return describe_left_out(event)
        case WarningEvent():
            return f"step {event.step}: warning: {event.message}"
    return ""


def describe_recovery(recovery: Recovery) -> str:
    """`step 41: group 1 left: 1.26 s, 1 step lost`: one entry of result.json's `recoveries`."""
    who = f"group {recovery.group} " if recovery.group is not None else ""
    kinds = {
        "left": "left",
        "joined": "came back",
        "retried": "the step was made again",
        "restart": "the run restarted",
    }
    lost, stall_s = recovery.lost_steps, recovery.stall_s
    cost = [f"{stall_s:.2f} s"] if stall_s is not None else []
    cost += [f"{lost} step{'s' if lost > 1 else ''} lost"] if lost else []
    return f"step {recovery.step}: {who}{kinds[recovery.kind]}: {', '.join(cost)}".removesuffix(": ")


def describe_directive(event: DirectiveEvent, achieved: AchievedEvent | None = None) -> str:
    """`step 30: shares are now 9, 9, 5, 9 of 32: data-parallel rank 2 computes a sample in 44 ms, the median is 24 ms;
    38% less computing is expected`."""
    if event.kind in ("layers", "layout"):
        return f"step {event.step}: {_describe_relayout(event, achieved)}"
    saved = _describe_saving(event, achieved)
    group = f"group {event.group}: " if isinstance(event.group, int) else ""
    verb = "shares are now" if event.applied else "advice: scheduler=auto would make shares"
    return f"step {event.step}: {group}{verb} {summarise_counts(event.counts)}: {event.reason}; {saved}"


def _describe_saving(event: DirectiveEvent, achieved: AchievedEvent | None) -> str:
    """`38% less computing is expected, 35% achieved`; of another layout the step itself is compared."""
    what = "shorter steps are" if event.kind == "layout" else "less computing is"
    saved = f"{_saving(event.before_s, event.expected_s)} {what} expected"
    return saved if achieved is None else f"{saved}, {_saving(achieved.before_s, achieved.achieved_s)} achieved"


def _describe_relayout(event: DirectiveEvent, achieved: AchievedEvent | None) -> str:
    """`the layout is now pp=2 dp_shard=2, and was dp_shard=4: the recipe plans it; 120 MiB moved in 310 ms, at most
    90 MiB of the state in a process meanwhile`."""
    before, after = event.before, event.layout
    assert isinstance(before, Layout) and isinstance(after, Layout), "both stand in it"
    what = "the stages' layers are" if event.kind == "layers" else "the layout is"
    now, was = (_cut(one) if event.kind == "layers" else _axes(one) for one in (after, before))
    if not event.applied and event.reason.startswith(ADVICE):
        reason, saved = event.reason.removeprefix(ADVICE), _describe_saving(event, None)
        return f"{what} {was}; {ADVICE}scheduler=auto would make {now} of it: {reason}; {saved}"
    if not event.applied:
        return f"{what} {was} and could not become {now}: {event.reason}"
    parts = [event.reason]
    if not isinstance(event.pause_s, Absent):
        moved, peak = (format_bytes(size or 0) for size in (event.moved_bytes, event.peak_bytes))
        took = f"{moved} moved in {format_duration(event.pause_s)}"
        parts.append(f"{took}, at most {peak} of the state in a process meanwhile")
    if event.before_s:
        parts.append(_describe_saving(event, achieved))
    return f"{what} now {now}, and {'were' if event.kind == 'layers' else 'was'} {was}: {'; '.join(parts)}"


def _cut(layout: Layout) -> str:
    return stages_label(layout.stage_layers) or "even"


def _axes(layout: Layout) -> str:
    """`pp=2 dp_shard=2 zero_stage=1`."""
    return f"{layout.describe()}{f' zero_stage={layout.zero_stage}' if layout.dp_shard > 1 else ''}"


def describe_memory(event: MemoryEvent) -> str:
    """`step 30: micro-batches of 4 samples from here on: memory ran out: ...; no step lost`."""
    group = f"group {event.group}: " if isinstance(event.group, int) else ""
    lost = f"{event.lost_steps} step{'s' if event.lost_steps > 1 else ''} lost" if event.lost_steps else "no step lost"
    how = "after a new start" if event.restarts else "in place"
    taken = event.taken.describe(event.failed)
    return f"step {event.step}: {group}{taken} from here on ({how}, {lost}): {event.reason}"


def describe_left_out(event: NodesEvent, achieved: NodesAchievedEvent | None = None) -> str:
    """`step 120: node 3 is left out: its ranks compute 4.1 times as long; a step took 2.1 s and is expected to take
    1.3 s`, and what it came to."""
    spare = f", node {event.spare} takes its place" if isinstance(event.spare, int) else ""
    if event.applied:
        what = f"node {event.node} is left out{spare}"
    else:
        what = f"advice: scheduler=auto would leave node {event.node} out{spare}"
    pace = f"its ranks compute {event.pace:.1f} times as long"
    before, expected = format_duration(event.before_s), format_duration(event.expected_s)
    text = f"step {event.step}: {what}: {pace}; a step took {before} and is expected to take {expected}"
    if achieved is None:
        return text
    took, restart = format_duration(achieved.achieved_s), format_duration(achieved.restart_s)
    return f"{text}, takes {took} (the new start took {restart})"


def _saving(before_s: float, after_s: float) -> str:
    return f"{1 - after_s / before_s:.0%}" if before_s > 0 else "?"


def summarise_counts(counts: Sequence[int]) -> str:
    """`9, 9, 5, 9 of 32`; of many ranks the range, `5 to 9 of 1,024`; `8 each` where all are equal."""
    if len(set(counts)) == 1:
        return f"{counts[0]:,} each"
    shown = ", ".join(map(str, counts)) if len(counts) <= MANY else f"{min(counts):,} to {max(counts):,}"
    return f"{shown} of {sum(counts):,}"


def describe_saving(event: CheckpointEvent) -> str:
    """`in 320 ms`; of one written beside training `in 320 ms, training held up for 7 ms`."""
    written_s = event.seconds if event.written_s is None or isinstance(event.written_s, Absent) else event.written_s
    beside = f", training held up for {format_duration(event.seconds)}" if event.seconds < written_s else ""
    return f"in {format_duration(written_s)}{beside}"


def describe_cadence(event: CadenceEvent) -> str:
    """Describe what `checkpoint.interval_steps: auto` has chosen, and why."""
    cost_s, mtbf_s = event.blocked_s + event.drag_s, event.mtbf_s
    failures = "no failures are expected" if mtbf_s is None else f"failures come every {format_duration(mtbf_s)}"
    return (
        f"from here a checkpoint every {event.interval_steps:,} steps: one costs {format_duration(cost_s)} and is "
        f"whole in {format_duration(event.written_s)}; {failures}"
    )


def describe_plan(plan: Plan) -> str:
    """Describe what a plan has resolved, a fact a line."""
    spec, unit = plan.spec, plan.spec.data.unit
    micro = f"{plan.micro_batch_size} a process at a time, {plan.grad_accum_steps} times a step"
    facts = {
        "model": f"{spec.model.name or spec.model.family}, {format_count(plan.params)} parameters",
        "devices": f"{plan.world_size} x {plan.device}, {plan.compute}",
        "layout": plan.layout.describe(),
        **({"stages": f"{cut} layers"} if (cut := stages_label(plan.layout.stage_layers)) else {}),
        **({"groups": f"{plan.replica_groups} of {plan.group_size} each"} if plan.replica_groups > 1 else {}),
        "batch": f"{describe_batch(plan)}, {micro}",
        "steps": f"{plan.total_steps}, {format_count(spec.train.max_steps * plan.tokens_per_step)} {unit} in all",
        **({"kernels": describe_choice(plan.kernels, None)} if plan.kernels.changed else {}),
        "compute": f"{format_si(plan.flops_per_token, 'FLOP')} a {unit.removesuffix('s')}",
    }
    return "\n".join(f"{name:<9} {fact}" for name, fact in facts.items())


def describe_batch(plan: Plan) -> str:
    """`8 samples of 64 tokens`; a sample of images or volumes is one of them. A batch that changes has its schedule."""
    length = f" of {plan.spec.data.seq_len} tokens" if plan.spec.data.unit == "tokens" else ""
    kind = plan.spec.batching.schedule.kind
    changes = "" if kind == "constant" else f" at first ({kind})"
    return f"{plan.spec.batching.global_batch_size} samples{length}{changes}"


def describe_prediction(prediction: LocalPrediction, tokens_per_step: int) -> str:
    """`predicted: 240 ms a step, 8,533 tokens/s · 700 MiB a process`."""
    seconds = prediction.step_time_s
    return (
        f"predicted: {format_duration(seconds)} a step, {tokens_per_step / seconds:,.0f} tokens/s · "
        f"{format_bytes(prediction.peak_memory_bytes)} a process"
    )


def describe_start(begin: StartEvent) -> str:
    processes = f"{begin.world_size} process{'es' if begin.world_size > 1 else ''}"
    resumed = f", from step {begin.step}" if begin.step else ""
    return (
        f"{format_count(begin.params)} parameters on {processes}, {begin.device_name}{resumed}\n"
        f"MFU is against {format_si(begin.peak_flops, 'FLOP/s')} a process ({begin.peak_source})"
    )


def describe_evaluation(event: EvalEvent) -> str:
    """`2.310 bits per byte (xz 2.651), loss 3.123`; of images `accuracy 0.910, loss 0.3121`, of volumes `Dice ...`."""
    for name, value in (("accuracy", event.heldout_accuracy), ("Dice", event.heldout_dice)):
        if not isinstance(value, Absent):
            return f"{name} {_figure(value, 3)}, {_loss(event.heldout_loss)}"
    assert not isinstance(event.heldout_bits_per_byte, Absent), "an evaluation has one of the three"
    xz = event.xz_bits_per_byte
    beside = "" if xz is None or isinstance(xz, Absent) else f" (xz {xz:.3f})"
    sets = {} if isinstance(event.sets, Absent) else event.sets
    of_sets = "".join(f"; {name} {_text_loss(one.loss, one.bits_per_byte)}" for name, one in sets.items())
    return _text_loss(event.heldout_loss, event.heldout_bits_per_byte, beside) + of_sets


def _text_loss(loss: float | None, bits_per_byte: float | None, beside: str = "") -> str:
    """Begin with bits per byte where the number of bytes is known."""
    bits = f"{_figure(bits_per_byte, 3)} bits per byte{beside}, " if bits_per_byte is not None else ""
    return f"{bits}{_loss(loss)}"


def _loss(loss: float | None) -> str:
    return f"loss {_figure(loss, 4)}"


def _figure(value: float | None, digits: int) -> str:
    """An event has null for what is not finite."""
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
