"""The verdicts on a run: what slows it, heaviest first, or what bounds it where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trainspec_cli.core.units import format_duration
from trainspec_cli.recipe.results.verdict import Cause, RunVerdict, heaviest_first
from trainspec_cli.report.diagnosis.all_ranks import find_common_slowness, find_slow_steps
from trainspec_cli.report.diagnosis.evidence import RunEvidence
from trainspec_cli.report.diagnosis.links import find_retries, find_slow_links
from trainspec_cli.report.diagnosis.looks import with_look
from trainspec_cli.report.diagnosis.memory import find_memory
from trainspec_cli.report.diagnosis.outlook import Outlook
from trainspec_cli.report.diagnosis.planned import as_planned
from trainspec_cli.report.diagnosis.ranks import OwnTimes, find_slow_ranks
from trainspec_cli.report.diagnosis.waste import find_waste
from trainspec_cli.run.recovery.hang import Whereabouts, find_late

LEAST_STEPS = 8
"""Fewer steps than this say nothing, but for a hang."""
WARM_STEPS = 2
"""The first steps compile, connect and allocate."""

EVALUATION_SHARE = 0.2
"""Evaluations that take less than this part of the time of steps and evaluations are not reported."""

ADVICE: dict[Cause, str] = {
    "slow_device": "trainspec doctor; scheduler=auto gives the rank fewer samples",
    "stolen_cores": "end what else runs there; scheduler=auto gives the rank fewer samples",
    "slow_node": "trainspec doctor on the node; scheduler=auto leaves it out",
    "narrow_link": "trainspec doctor; comm=int8 sends fewer bytes",
    "lossy_link": "look at the cable, the port and its errors: ethtool -S",
    "delayed_link": "look for another path; larger batching.global_batch_size exchanges less often",
    "unbalanced_stage": "scheduler=auto moves layers, or layout.stage_layers",
    "uneven_lengths": "scheduler=auto gives late ranks fewer samples; documents of like length in a batch",
    "slow_loader": "a faster or local disk, or more cores to read with",
    "garbage_collection": "find what makes cycles of objects: gc.set_debug(gc.DEBUG_STATS)",
    "host_bound": "compile=true; larger micro-batches",
    "recompilation": "keep shapes the same: TORCH_LOGS=recompiles names what differs",
    "checkpoint_writing": "checkpoint.mode=async, or a larger checkpoint.interval_steps",
    "evaluation": "a larger train.eval_interval_steps, or a smaller data.heldout_fraction",
    "slow_steps": "trainspec doctor; top and nvidia-smi show what else runs there, and how hot the GPUs are",
    "memory_leak": "trainspec resume from a checkpoint before that step",
    "memory_pressure": "recompute=selective, or smaller micro-batches",
    "hang": "the stack shows where it stands; resilience.hang_floor_s ends the run sooner",
    "network_timeouts": "look at the switch and the ports for flaps",
    "noise": "run on a machine of its own",
}


OWN_ADVICE: dict[Cause, str] = {
    "memory_leak": "find what keeps growing: tracemalloc, or lists that losses with their graphs are appended to",
    "memory_pressure": "smaller batches, or activation checkpointing",
    "hang": "the stack shows where it stands; --hang-s ends the run sooner, or later",
}
"""Advice for a command of the user's own, where it differs: such a command follows no recipe."""

NO_OUTLOOK = Outlook("the planner was not asked: this rests on the measured parts alone")


def conclude(evidence: RunEvidence, look_ahead: Callable[[], Outlook] = lambda: NO_OUTLOOK) -> tuple[RunVerdict, ...]:
    """Return the verdicts on a run, heaviest first; on one that goes well what bounds it, and what would help.

    `look_ahead` asks the planner for that, which may take as long as a search over layouts.
    """
    if not evidence.parts_are_known:
        return _conclude_own(evidence)
    verdicts = _hang(evidence)
    warm = without_first(evidence, WARM_STEPS)
    if len(warm.steps) >= LEAST_STEPS:
        steps_s = dict(zip(warm.steps.tolist(), warm.part(*warm.parts_s).max(axis=1).tolist(), strict=True))
        times = OwnTimes(warm)
        verdicts += find_waste(warm, times) + find_slow_ranks(warm, times) + find_slow_links(warm)
        verdicts += find_retries(warm, steps_s) + find_memory(warm)
        verdicts = _explained(verdicts + find_common_slowness(warm, times))
        if all(one.cause == "noise" for one in verdicts):
            verdicts += as_planned(warm, look_ahead())
    advised = [replace(one, advice=one.advice or ADVICE.get(one.cause, "")) for one in verdicts]
    return heaviest_first([with_look(one, evidence.looks) for one in _joined(advised)])


def with_evaluations(
    verdicts: Sequence[RunVerdict], evaluations: Sequence[tuple[int, float]], steps: int, steps_s: float
) -> tuple[RunVerdict, ...]:
    """Return the verdicts with one on evaluations between the steps, where they take much of the time; they are in no
    part of a step. `evaluations`: their (step, seconds); the one at a run's end is needed, and is not judged alone.
    `steps` took `steps_s` together."""
    seconds = sum(each_s for _, each_s in evaluations)
    if len(evaluations) < 2 or not steps or seconds < EVALUATION_SHARE * (seconds + steps_s):
        return tuple(verdicts)
    took = f"{len(evaluations)} evaluations took {format_duration(seconds)}, {steps} steps {format_duration(steps_s)}"
    found = RunVerdict(
        cause="evaluation",
        since_step=evaluations[0][0],
        cost_s=seconds / steps,
        confidence=0.95,
        evidence=(f"{took}: {seconds / (seconds + steps_s):.0%} of both went into evaluation",),
        advice=ADVICE["evaluation"],
    )
    return heaviest_first([*verdicts, found])


def _conclude_own(evidence: RunEvidence) -> tuple[RunVerdict, ...]:
    """Return the verdicts on a command of the user's own, whose steps nobody has divided into parts."""
    warm = without_first(evidence, WARM_STEPS)
    verdicts = _hang(evidence)
    if len(warm.steps) >= LEAST_STEPS:
        verdicts += [*find_memory(warm), *find_slow_steps(warm)]
    return heaviest_first([replace(one, advice=OWN_ADVICE.get(one.cause, ADVICE[one.cause])) for one in verdicts])


def without_first(evidence: RunEvidence, steps: int) -> RunEvidence:
    """Return the evidence without its first steps."""
    return replace(
        evidence,
        steps=evidence.steps[steps:],
        parts_s={name: series[steps:] for name, series in evidence.parts_s.items()},
        counters={name: series[steps:] for name, series in evidence.counters.items()},
        connections=tuple(
            replace(one, **{name: series[steps:] for name, series in vars(one).items() if name != "ranks"})
            for one in evidence.connections
        ),
    )


def _hang(evidence: RunEvidence) -> list[RunVerdict]:
    """Return the ranks that the others wait for, in a step that takes far longer than usual."""
    if not evidence.stalls:
        return []
    late, why = _late_of(evidence)
    longest = max(evidence.stalls.values(), key=lambda stall: stall.waited_s)
    waits_in = next((one.waits_in for rank, one in evidence.stalls.items() if rank not in late and one.waits_in), None)
    text = f"step {longest.step} has taken {longest.waited_s:.3g} s, and {longest.usual_s:.3g} s are the most it took"
    others = (f"the others wait in {waits_in}",) if waits_in else ()
    found = RunVerdict(
        cause="hang", since_step=longest.step, cost_s=longest.waited_s, confidence=0.5, evidence=(text, why, *others)
    )
    return [
        replace(found, rank=rank, confidence=0.95, evidence=(*found.evidence, *_stack(evidence, rank))) for rank in late
    ] or [found]


def _late_of(evidence: RunEvidence) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and why.

    Of a command of the user's own the ranks were judged when the hang was found, with more than the events hold: a rank
    that was named is not `waiting`, though it may stand in a collective too.
    """
    if evidence.parts_are_known:
        places = {rank: Whereabouts(stall.waiting, stall.collectives) for rank, stall in evidence.stalls.items()}
        return find_late(places, evidence.ranks)
    late = sorted(rank for rank, stall in evidence.stalls.items() if not stall.waiting)
    if not late:  # only a rank that has ended writes no event
        return [rank for rank in range(evidence.ranks) if rank not in evidence.stalls], "it has ended"
    where = sorted({evidence.stalls[rank].waits_in or "" for rank in late})
    stands = " and in ".join(place for place in where if place)
    if len(late) < len(evidence.stalls) or len(late) == 1:
        return late, f"it stands in {stands}" if stands else "it shows no Python stack"
    return [], f"all ranks stand in {stands}" if stands else "no rank stands out"


def _stack(evidence: RunEvidence, rank: int) -> tuple[str, ...]:
    stall = evidence.stalls.get(rank)
    return (f"rank {rank} is at\n{stall.stack}",) if stall else (f"rank {rank} gives no sign of life",)


def _explained(verdicts: list[RunVerdict]) -> list[RunVerdict]:
    """Leave out what another verdict explains: load of the machine is no news where its cause is named, nor a rank that
    had the longest samples for some steps where all ranks' samples are uneven."""
    all_uneven = any(one.cause == "uneven_lengths" and one.rank is None for one in verdicts)
    named = [
        one
        for one in verdicts
        if one.cause != "noise" and not (all_uneven and one.cause == "uneven_lengths" and one.rank is not None)
    ]
    common = [one for one in verdicts if one.cause == "noise"]
    return named + [one for one in common if not any(_overlaps(one, other) for other in named)]


def _overlaps(one: RunVerdict, other: RunVerdict) -> bool:
    return (one.until_step is None or one.until_step >= other.since_step) and (
        other.until_step is None or other.until_step >= one.since_step
    )


def _joined(verdicts: list[RunVerdict]) -> list[RunVerdict]:
    """Join verdicts of one cause and place: it came back."""
    joined: dict[tuple[object, ...], RunVerdict] = {}
    for one in sorted(verdicts, key=lambda one: one.since_step):
        known = joined.get(one.place)
        if known is None:
            joined[one.place] = one
        else:
            heavier = max(known, one, key=lambda each: each.cost_s)
            joined[one.place] = replace(heavier, since_step=known.since_step, until_step=one.until_step)
    return list(joined.values())
