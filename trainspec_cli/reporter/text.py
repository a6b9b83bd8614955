"""Format events and metrics as short texts for the live view and the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter

from trainspec_cli.core.printable import (
    cut_middle,
    format_bytes,
    format_count,
    format_duration,
    format_params,
    format_si,
)
from trainspec_cli.recipe.records import ABSENT, Absent
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan
from trainspec_cli.reporter.changes import (
    RunChange,
    describe_buckets,
    describe_directive,
    describe_left_out,
    describe_memory,
    describe_recovery,
    without_old_advice,
)
from trainspec_cli.reporter.collect import Report
from trainspec_cli.reporter.kernels_text import describe_choice
from trainspec_cli.reporter.plan.labels import stages_label
from trainspec_cli.reporter.progress import Progress
from trainspec_cli.reporter.run_speed import STEPS, describe_speed
from trainspec_cli.run.folder.accounting import recovery_of
from trainspec_cli.run.folder.event_types.events import (
    BucketsEvent,
    CadenceEvent,
    CheckpointEvent,
    DirectiveEvent,
    EvalEvent,
    Event,
    FirstTextEvent,
    LinkEvent,
    MemoryEvent,
    NodesEvent,
    RecoveryEvent,
    StartEvent,
    WarningEvent,
)

LINE_CHARS, TEXT_CHARS = 72, 240
"""Maximum number of characters of the first text to show: one line if the entire text is trained on, otherwise about
three lines."""
MANY = 8
"""More ranks than this are summarised instead of listed."""


def describe_progress(progress: Progress) -> str:
    """`loss 4.213 · 2,810 tokens/s · 41.0% MFU · 1 min 33 s left`, without values that are unknown."""
    parts = [_loss(progress.loss)] if progress.has_stepped and progress.unit != STEPS else []
    if progress.tokens_per_s is not None and progress.mfu is not None:
        parts.append(describe_speed(progress.tokens_per_s, progress.mfu, progress.unit))
    if (usage := progress.usage) is not None:
        # `1.9 cores · 1.2 GiB · GPU 93%, 31.0 GiB`
        parts += [f"{usage.cores:.1f} cores", format_bytes(usage.rss_bytes)]
        if not isinstance(usage.gpu_busy, Absent) and not isinstance(usage.gpu_bytes, Absent):
            parts.append(f"GPU {usage.gpu_busy:.0%}, {format_bytes(usage.gpu_bytes)}")
    if progress.time_left_s:
        parts.append(f"{format_duration(progress.time_left_s)} left")
    return " · ".join(parts)


def describe_event(event: Event) -> str:
    """Describe an event other than a step in one or two lines; empty for events that need no description."""
    match event:
        case StartEvent():
            processes = f"{event.world_size} process{'es' if event.world_size > 1 else ''}"
            resumed = f", from step {event.step}" if event.step else ""
            if event.unit == STEPS:
                return f"counting the steps of {processes}, {event.device_name}{resumed}"
            return (
                f"{format_params(event.params, event.adapter_params)} on {processes}, {event.device_name}{resumed}\n"
                f"MFU is relative to {format_si(event.peak_flops, 'FLOP/s')} per process ({event.peak_source})"
            )
        case FirstTextEvent():
            return "".join(text for text, _ in first_text_parts(event))
        case EvalEvent():
            return f"step {event.step}: held out {describe_evaluation(event)}"
        case CheckpointEvent():
            # A checkpoint written in the background blocks training only part of the time.
            written_s = (
                event.seconds if event.written_s is None or isinstance(event.written_s, Absent) else event.written_s
            )
            held = f", training held up for {format_duration(event.seconds)}" if event.seconds < written_s else ""
            size = format_bytes(event.bytes)
            return f"step {event.step}: checkpoint, {size} in {format_duration(written_s)}{held}"
        case CadenceEvent():
            # State the interval chosen by `checkpoint.interval_steps: auto`, and the reason for it.
            failures = "no failures are expected"
            if event.mtbf_s is not None:
                failures = f"a failure is expected every {format_duration(event.mtbf_s)}"
            if not isinstance(event.failures, Absent) and not isinstance(event.observed_s, Absent):
                failures += (
                    f", judging by {event.failures:,} in {format_duration(event.observed_s)} and the cluster's figure"
                )
            whole = format_duration(event.written_s)
            cost = f"one costs {format_duration(event.blocked_s + event.drag_s)} and is complete after {whole}"
            return f"step {event.step}: from here a checkpoint every {event.interval_steps:,} steps: {cost}; {failures}"
        case RecoveryEvent():
            return describe_recovery(recovery_of(event)).line
        case DirectiveEvent():
            return describe_directive(event).line
        case BucketsEvent():
            return describe_buckets(event).line
        case MemoryEvent():
            return describe_memory(event).line
        case NodesEvent():
            return describe_left_out(event).line
        case LinkEvent():
            # `step 420: tp link of ranks 2 to 3: 1.2 GB/s, 0.5 times the 2.4 GB/s before step 400`.
            now = event.now_bytes_per_s
            before = event.before_bytes_per_s
            others = f", and {event.changed_links - 1:,} more of its links" if event.changed_links > 1 else ""
            change = f"{now / before:.2g} times the {format_bandwidth(before)}"
            group = f"group {event.group}: " if isinstance(event.group, int) else ""
            where = f"{event.axis} link of {describe_ranks(event.ranks)}{others}"
            return (
                f"step {event.step}: {group}{where}: {format_bandwidth(now)}, {change} before step {event.since_step}"
            )
        case WarningEvent():
            return f"step {event.step}: warning: {event.message}"
    return ""


def first_text_parts(event: FirstTextEvent) -> Iterator[tuple[str, str]]:
    """Yield (text, rich style) for one or two lines. Trained tokens are bold and in brackets; the others are dim. A
    text whose tokens are all trained on needs no marks."""
    how_many = f"{event.trained:,} of {event.tokens:,}" if event.trained < event.tokens else f"all {event.tokens:,}"
    yield f"first text of the first batch: {how_many} tokens are trained on", ""
    if event.trained == event.tokens:
        yield ": ", ""
        yield _on_one_line("".join(part.text for part in event.parts), LINE_CHARS), "dim"
        return
    yield ", those in [ ]\n", ""
    for part in event.parts:
        text = _on_one_line(part.text, max(LINE_CHARS // 2, TEXT_CHARS // len(event.parts)))
        yield (f"[{text}]", "bold") if part.trained else (text, "dim")


def _on_one_line(text: str, most_chars: int) -> str:
    return cut_middle(text.replace("\n", "\\n").replace("\t", "\\t"), most_chars)


def format_bandwidth(bytes_per_s: float) -> str:
    """`1.23 GB/s`; GB is decimal."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def describe_ranks(ranks: Sequence[int]) -> str:
    """`ranks 0, 4, 8`, `ranks 2 to 5` for consecutive ranks, or `rank 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:MANY]))
    return f"ranks {shown}, ... ({len(ranks):,})" if len(ranks) > MANY else f"ranks {shown}"


def describe_plan(plan: Plan) -> str:
    """Describe a plan, one property per line."""
    spec = plan.spec
    unit = plan.spec.data.unit
    # `8 samples of 64 tokens`; images and volumes are counted without a length. A batch that changes is shown with its
    # schedule.
    length = f" of {spec.data.seq_len} tokens" if unit == "tokens" else ""
    kind = spec.batching.schedule.kind
    changes = "" if kind == "constant" else f" at first ({kind})"
    batch = f"{spec.batching.global_batch_size} samples{length}{changes}"
    micro = f"{plan.micro_batch_size} per process and micro-batch, {plan.grad_accum_steps} micro-batches per step"
    groups = f"{plan.replica_groups} of {plan.group_size} each, which exchange over {plan.group_backend}"
    facts = {
        "model": f"{spec.model.name or spec.model.family}, {format_params(plan.params, plan.adapter_params)}",
        "devices": f"{plan.world_size} x {plan.device}, {plan.compute}",
        "layout": plan.layout.describe(),
        **({"stages": f"{cut} layers"} if (cut := stages_label(plan.layout.stage_layers)) else {}),
        **({"groups": groups} if plan.replica_groups > 1 else {}),
        "batch": f"{batch}, {micro}",
        "steps": f"{plan.total_steps}, {format_count(spec.train.max_steps * plan.tokens_per_step)} {unit} in total",
        **({"kernels": describe_choice(plan.kernels, None)} if plan.kernels.changed else {}),
        "compute": f"{format_si(plan.flops_per_token, 'FLOP')} per {unit.removesuffix('s')}",
    }
    return "\n".join(f"{name:<9} {fact}" for name, fact in facts.items())


def describe_prediction(prediction: LocalPrediction, tokens_per_step: int) -> str:
    """`predicted: 240 ms per step, 8,533 tokens/s · 65.50 GiB per process, of which 56.75 GiB is tensors`."""
    seconds = prediction.step_time_s
    tensors = ""
    if prediction.beside:  # a run can only measure its tensors
        tensors = f", of which {format_bytes(prediction.peak_memory_bytes)} is tensors"
    return (
        f"predicted: {format_duration(seconds)} per step, {tokens_per_step / seconds:,.0f} tokens/s · "
        f"{format_bytes(prediction.needed_bytes)} per process{tensors}"
    )


def describe_evaluation(event: EvalEvent) -> str:
    """`2.310 bits per byte (xz 2.651), loss 3.123`; for images, `accuracy 0.910, loss 0.3121`; for volumes, `Dice
    ...`."""
    for name, value in (("accuracy", event.heldout_accuracy), ("Dice", event.heldout_dice)):
        if not isinstance(value, Absent):
            return f"{name} {_figure(value, 3)}, {_loss(event.heldout_loss)}"
    assert not isinstance(event.heldout_bits_per_byte, Absent), "an evaluation has accuracy, Dice or bits per byte"
    xz = event.xz_bits_per_byte
    beside = "" if xz is None or isinstance(xz, Absent) else f" (xz {xz:.3f})"
    # The results of validation sets follow those of the recipe's held-out text.
    sets = {} if isinstance(event.sets, Absent) else event.sets
    of_sets = "".join(f"; {name} {_text_loss(one.loss, one.bits_per_byte)}" for name, one in sets.items())
    return _text_loss(event.heldout_loss, event.heldout_bits_per_byte, beside) + of_sets


def _text_loss(loss: float | None, bits_per_byte: float | None, beside: str = "") -> str:
    """Format the loss on a text, preceded by bits per byte if the number of bytes is known."""
    bits = f"{_figure(bits_per_byte, 3)} bits per byte{beside}, " if bits_per_byte is not None else ""
    return f"{bits}{_loss(loss)}"


def _loss(loss: float | None) -> str:
    return f"loss {_figure(loss, 4)}"


def _figure(value: float | None, digits: int) -> str:
    """Format a metric. (Events store values that are not finite as null.)"""
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


# Lines and values from a Report, shared by the terminal and the page.


SHOWN_RANKS = 8
"""Maximum number of ranks to list."""


def title_of(report: Report) -> str:
    """`baseline: done`; for a run without a name, its folder is shown."""
    return f"{report.name or report.path}: {report.status}"


def status_line(report: Report) -> str:
    """`stopped (exit code 6), 20 of 20 steps in 1 min 30 s`."""
    of = f" of {report.max_steps}" if report.max_steps is not None else ""
    code = f" (exit code {report.exit_code})" if report.exit_code is not None else ""
    return f"{report.status}{code}, {report.steps}{of} steps in {format_duration(report.elapsed_s)}"


def facts_of(report: Report) -> Iterator[tuple[str, str]]:
    yield "run", report.path
    yield "recipe", report.recipe
    yield "status", status_line(report)
    if report.reason:
        yield "reason", report.reason
    if report.hint:
        yield "hint", report.hint
    if len(report.start_steps) > 1:
        yield "resumed", f"from step {', '.join(map(str, report.start_steps[1:]))}"
    if report.params:
        yield "model", format_params(report.params, report.adapter_params)
    if report.world_size is not None:
        yield "devices", f"{report.world_size} x {report.device_name}"
    if report.peak_memory_bytes is not None:
        beside = f" (predicted {format_bytes(report.predicted.peak_memory_bytes)})" if report.predicted else ""
        yield "memory", f"{format_bytes(report.peak_memory_bytes)} at most, on one device{beside}"
    if report.kernels.changed or report.kernel_table is not None:
        yield "kernels", describe_choice(report.kernels, report.kernel_table)
    if report.weights_sha256 is not None:
        yield "weights", f"sha256 {report.weights_sha256}"


def heldout_title(report: Report) -> str:
    text = all(event.heldout_bits_per_byte is not ABSENT for event in report.evaluations)
    return "held-out text" if text else "held-out samples"


def scheduler_changes(report: Report) -> list[RunChange]:
    """Return the changes that the scheduler made or currently advises, with their effects, ordered by step."""
    achieved = {(event.group, event.number): event for event in report.achieved}
    of_nodes = {event.number: event for event in report.left_out_achieved}
    directives = without_old_advice(report.directives)
    changes = [describe_directive(event, achieved.get((event.group, event.number))) for event in directives]
    changes += map(describe_buckets, report.buckets)
    changes += map(describe_memory, report.memory)
    changes += [describe_left_out(event, of_nodes.get(event.number)) for event in report.left_out]
    return sorted(changes, key=attrgetter("step"))


def warning_lines(report: Report) -> list[str]:
    """Return the warnings. Identical warnings from several ranks are merged into one line."""
    # Every rank logs its own warnings, and a thousand identical lines would hide the others.
    by_text: dict[str, list[int]] = {}
    for event in report.warnings:
        by_text.setdefault(f"step {event.step}: {event.message}", []).append(event.rank)
    lines = [f"{text} (rank {_join(ranks)})" for text, ranks in by_text.items()]
    missing = [f"no events of rank {_join(report.missing_ranks)}"] if report.missing_ranks else []
    return lines + missing


def _join(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SHOWN_RANKS} more" if len(numbers) > SHOWN_RANKS else ""
    return ", ".join(map(str, numbers[:SHOWN_RANKS])) + more


def wall_time_rows(report: Report) -> list[tuple[str, float, str, float]]:
    """Return (part, seconds, text, fraction) for the wall time of all attempts, without empty parts."""
    spent = [(bucket.name.replace("_", " "), getattr(report.time_s, bucket.name)) for bucket in fields(report.time_s)]
    wall_s = report.time_s.total_s
    return [(name, seconds, format_duration(seconds), seconds / wall_s) for name, seconds in spent if seconds > 0]
