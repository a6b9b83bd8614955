"""Derive verdicts on a run: the causes of slowdowns, most expensive first, or what bounds the steps of an undisturbed
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from trainspec_cli.core.printable import format_duration, format_seconds
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.verdict import Cause, RunVerdict, WhatIf, heaviest_first
from trainspec_cli.reporter.diagnosis.evidence import COMPUTE_PARTS, Figures, RunEvidence
from trainspec_cli.reporter.diagnosis.links import find_retries, find_slow_links
from trainspec_cli.reporter.diagnosis.looks import with_look
from trainspec_cli.reporter.diagnosis.memory import find_memory
from trainspec_cli.reporter.diagnosis.ranks import (
    EXPLAINS,
    PAGES,
    RETRIES,
    OwnTimes,
    find_slow_ranks,
    lasts,
    work_explains,
)
from trainspec_cli.reporter.diagnosis.series import (
    CONFIRMING_STEPS,
    LEAST_SHARE,
    MOST_RANKS,
    STEADY,
    Episode,
    find_episodes,
    mean_known,
    means_known,
    milliseconds,
    usual,
    verdict_of,
)
from trainspec_cli.run.recovery.collectives import find_mismatch
from trainspec_cli.run.recovery.watch import Whereabouts, find_late, short_line

# Periods when all ranks are slower than usual, because of other tenants or a quota on the node.


COMMON_S = 8.0
"""All ranks must be slow for at least this many seconds, because other load on the machine comes and goes."""
SLOWER = 2.0
"""A user command's steps are reported only if they take at least this many times as long as usual, because a script may
vary its work per step by design."""
STEPS_BEFORE = 8
"""A user command must have completed this many steps before the slow ones, because the first steps include compilation
and fill caches."""


def find_common_slowness(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return verdicts on periods when all ranks compute for longer than usual, for example because of other tenants
    or a quota on the node."""
    ranks = evidence.ranks
    middle = (ranks - 1) // 2
    common_s = np.partition((times.own_s + times.queued_s) / evidence.shares, middle, axis=1)[:, middle]
    excess_s = common_s - usual(common_s)
    found = find_episodes(excess_s, times.limit(excess_s), times.step_s, COMMON_S)
    # Merge recurring verdicts into one per cause and location, with the earliest start and the mean cost.
    joined: dict[tuple[object, ...], RunVerdict] = {}
    for episode in found:
        if episode.steadiness >= STEADY and (one := _explain_common(evidence, episode, common_s)):
            known = joined.get(one.place)
            joined[one.place] = one if known is None else replace(known, until_step=one.until_step)
    return list(joined.values())


def _explain_common(evidence: RunEvidence, episode: Episode, common_s: Figures) -> RunVerdict | None:
    def rise(name: str, *, is_relative: bool = False) -> float:
        """Return by how much a counter's mean over the ranks exceeds its usual level, in absolute or relative terms."""
        series = means_known(evidence.counter(name).T)
        if len(series) != len(evidence.steps) or not np.isfinite(series).any():
            return float("nan")
        level = float(np.nanpercentile(series, 25))
        return (mean_known(series[episode.where]) - level) / (level or 1.0 if is_relative else 1.0)

    excess_s = episode.excess
    usual_s = float(usual(common_s))
    # If the ranks simply have more work, such as longer documents, the steps are not slow.
    where = np.zeros(len(common_s), bool)
    where[episode.where] = True
    for name in ("tokens", "attended"):
        work = means_known(evidence.counter(name).T)
        if work_explains(rise(name, is_relative=True), work, common_s, where, excess_s, usual_s):
            return None
    text = f"all ranks take {milliseconds(excess_s)} longer per step for their own work than at other times"
    found = verdict_of(evidence, episode, "noise", text)
    if rise("throttled_s") > EXPLAINS * excess_s:
        node = evidence.nodes[0] if len(set(evidence.nodes)) == 1 else None
        why = f"a quota throttles their control groups for {milliseconds(rise('throttled_s'))} per step"
        return replace(found, cause="slow_node", node=node, evidence=(*found.evidence, why))
    if rise("memory_stall_s") > EXPLAINS * excess_s or rise("major_faults") > PAGES:
        why = f"processes wait {milliseconds(rise('memory_stall_s'))} per step for memory"
        return replace(found, cause="memory_pressure", evidence=(*found.evidence, why))
    if rise("allocator_retries") >= RETRIES:
        why = f"allocators release their cache {rise('allocator_retries'):.1f} more times per step"
        return replace(found, cause="memory_pressure", evidence=(*found.evidence, why))
    if rise("queued_s") + np.nan_to_num(rise("steal_s")) > EXPLAINS * excess_s:
        why = f"they wait {milliseconds(rise('queued_s'))} longer per step for processors that other processes use"
        return replace(found, evidence=(*found.evidence, why))
    return replace(found, confidence=round(found.confidence / 2, 2))


def find_slow_steps(evidence: RunEvidence) -> list[RunVerdict]:
    """Return verdicts, per rank or for the entire run, if a user command's steps became much slower. The cause is
    unknown, because these steps are not divided into parts."""
    of_rank: list[RunVerdict] = []
    for rank, step_s in enumerate(evidence.part(*evidence.parts_s).T):
        usual_s = float(usual(step_s))
        limit = np.full(len(step_s), (SLOWER - 1) * usual_s)
        found = find_episodes(step_s - usual_s, limit, step_s, COMMON_S)
        lasting = [one for one in found if one.first >= STEPS_BEFORE and one.steadiness >= STEADY]
        if not lasting:
            continue
        # Keep one verdict per rank, on its most expensive episode.
        episode = max(lasting, key=lambda one: one.excess * one.steps)
        text = f"{1 / (usual_s + episode.excess):.3g} steps per second, {1 / usual_s:.3g} usually"
        of_rank.append(verdict_of(evidence, episode, "slow_steps", text, rank=rank))
    if len(of_rank) < evidence.ranks or evidence.ranks == 1:
        return of_rank
    # Ranks that exchange gradients wait for each other, so the slow one cannot be identified.
    return [replace(max(of_rank, key=lambda one: one.cost_s), rank=None)]


# Avoidable time: waiting for data, garbage collection, recompilation, writing checkpoints, and uneven work (across
# pipeline stages, or across ranks because of unequal sample lengths).


AVERAGED_STEPS = 17
"""Costs that occur only every few steps, such as garbage collection, are averaged over this many steps."""
WARM_STEPS_OF_WASTE = 5
"""In this many steps at the start of a run, compilation is expected."""
UNEVEN = 0.2
"""A stage has too much work if its work exceeds the mean by this fraction."""
UNEVEN_LENGTHS = 0.1
"""Sample lengths are uneven if the work of the rank with the longest samples exceeds the mean by this fraction. The
threshold is low because, with two ranks, the excess over the mean is only half the excess over the other rank."""
TOGETHER = 0.6
"""If the correlation of times and work is above this value, the work explains the times."""
UNEVEN_SHARE = 0.05
"""Uneven lengths that cost less than this fraction of a step are not reported. The threshold is below `LEAST_SHARE`,
because the correlation rules out chance."""


def _of_part(evidence: RunEvidence, times: OwnTimes, cause: Cause, series: Figures, what: str) -> list[RunVerdict]:
    """Return verdicts on the ranks that spend too much time on this part of a step, or one verdict for the run if most
    ranks do."""
    limit = times.limit()
    found: list[tuple[int, Episode]] = []
    for rank in np.flatnonzero((series > limit[:, None]).sum(axis=0) >= CONFIRMING_STEPS).tolist():
        episodes = find_episodes(series[:, rank], limit, times.step_s)
        found += [(rank, one) for one in episodes if not _is_of_device(evidence, times, rank, one)]
    found = [(rank, one) for rank, one in found if lasts(evidence, times, rank, [e for r, e in found if r == rank])]
    verdicts: list[RunVerdict] = []
    for rank, episode in found:
        text = f"rank {rank} {what} for {milliseconds(episode.excess)} per step"
        verdicts.append(verdict_of(evidence, episode, cause, text, rank=rank))
    # If most ranks waste time in the same way, report it only once: a list of all ranks would hide other verdicts.
    if len({rank for rank, _ in found}) > max(1, MOST_RANKS * evidence.ranks):
        worst = max(verdicts, key=lambda one: one.cost_s)
        text = f"{len(verdicts)} of {evidence.ranks} ranks: {worst.evidence[0]}"
        return [replace(worst, rank=None, since_step=min(one.since_step for one in verdicts), evidence=(text,))]
    return verdicts


def _is_of_device(evidence: RunEvidence, times: OwnTimes, rank: int, episode: Episode) -> bool:
    """Return whether the rank's computation is slowed by more than the episode's excess, or whether a quota throttles
    the rank for longer than that. If so, the cause is the device, which also slows the loader."""
    inside = episode.where
    excess_s = float(np.median(times.own_s[inside, rank] - times.expected_s[inside, rank]))
    throttled_s = float(np.nanmean(evidence.counter("throttled_s")[inside, rank])) if evidence.counters else 0.0
    return excess_s > episode.excess or throttled_s > episode.excess


def _recompilation(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    compiles = np.nan_to_num(evidence.counter("compiles"))
    late = np.array(compiles)
    late[: WARM_STEPS_OF_WASTE + int(np.argmax(evidence.steps > WARM_STEPS_OF_WASTE))] = 0.0
    where = np.flatnonzero(late.max(axis=1) > 0)
    if len(where) < 2:
        return []
    slower_s = np.maximum(0.0, times.step_s - times.usual_step_s)
    cost_s = float(slower_s[where].sum()) / max(1, int(where[-1] - where[0]) + 1)
    if cost_s < LEAST_SHARE * times.usual_step_s:
        return []
    ranks = np.flatnonzero(late.max(axis=0) > 0).tolist()
    return [
        RunVerdict(
            cause="recompilation",
            rank=ranks[0] if len(ranks) == 1 and evidence.ranks > 1 else None,
            since_step=int(evidence.steps[where[0]]),
            # Recompilations recur every few steps, so the cause may persist after a recent one.
            until_step=None if where[-1] > len(evidence.steps) - 1 - AVERAGED_STEPS else int(evidence.steps[where[-1]]),
            cost_s=cost_s,
            confidence=0.9,
            evidence=(f"torch compiled {late.sum(axis=0).max():.0f} graphs again after the first steps",),
        )
    ]


def _checkpoints(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    waited_s = evidence.parts_s["checkpoint"].max(axis=1)
    writes = np.flatnonzero(waited_s > LEAST_SHARE * times.usual_step_s)
    if len(writes) < 2:
        return []
    # The cost of a write is spread over the steps until the next write, so the last write cannot be counted.
    span = int(writes[-1] - writes[0])
    cost_s = float(waited_s[writes[:-1]].sum()) / max(1, span)
    if cost_s < LEAST_SHARE * times.usual_step_s:
        return []
    each_s = float(np.median(waited_s[writes]))
    return [
        RunVerdict(
            cause="checkpoint_writing",
            since_step=int(evidence.steps[writes[0]]),
            cost_s=cost_s,
            confidence=0.95,
            evidence=(f"{len(writes)} checkpoints held up the steps for {each_s:.3g} s each",),
        )
    ]


def _stages(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return a verdict on a pipeline stage to which the plan assigned more work than to the others."""
    kinds = np.array(evidence.kinds)
    every = np.unique(kinds)
    if len(every) < 2:
        return []
    level_s = np.array([float(np.median(usual(times.own_s[:, kinds == kind]))) for kind in every])
    slowest = int(level_s.argmax())
    others_s = float(np.mean(np.delete(level_s, slowest)))
    excess_s = float(level_s[slowest] - level_s.mean())
    if excess_s < max(UNEVEN * level_s.mean(), LEAST_SHARE * times.usual_step_s):
        return []
    ranks = np.flatnonzero(kinds == every[slowest]).tolist()
    return [
        RunVerdict(
            cause="unbalanced_stage",
            rank=ranks[0],
            since_step=int(evidence.steps[0]),
            cost_s=excess_s,
            confidence=0.8,
            evidence=(
                f"stage {every[slowest]} (rank {', '.join(map(str, ranks[:8]))}) takes "
                f"{level_s[slowest] * 1e3:.3g} ms per step to compute, the others {others_s * 1e3:.3g} ms on average",
            ),
        )
    ]


def _lengths(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return a verdict if steps wait for the rank with the longest samples, and that rank differs from step to step."""
    attended = evidence.counter("attended")
    kinds = np.array(evidence.kinds)
    if evidence.ranks < 2 or not np.isfinite(attended).any():
        return []
    known = np.isfinite(attended).all(axis=1)
    shares = evidence.shares[known]  # compare work per sample, because some ranks have more samples
    work = attended[known] / shares
    own_s = times.own_s[known] / shares
    mean = _mean_of_kind(work, kinds)
    if not len(work) or not (mean > 0).all():
        return []
    uneven = work / mean - 1
    late_s = own_s - _mean_of_kind(own_s, kinds)
    cost_s = float(late_s.max(axis=1).mean())
    if uneven.max(axis=1).mean() < UNEVEN_LENGTHS or cost_s < UNEVEN_SHARE * times.usual_step_s or uneven.std() == 0:
        return []
    # Ranks can be late for other reasons. Only a correlation with the work shows that sample lengths are the cause.
    if np.corrcoef(uneven.ravel(), late_s.ravel())[0, 1] < TOGETHER:
        return []
    longest = uneven.argmax(axis=1)[uneven.max(axis=1) > UNEVEN_LENGTHS]
    if np.bincount(longest).max() > 0.8 * len(longest):
        return []  # if it is always the same rank, another verdict reports it
    return [
        RunVerdict(
            cause="uneven_lengths",
            since_step=int(evidence.steps[0]),
            cost_s=cost_s,
            confidence=0.8,
            evidence=(
                f"the rank with the longest samples has {uneven.max(axis=1).mean():.0%} more work than the mean",
            ),
        )
    ]


def _mean_of_kind(series: Figures, kinds: npt.NDArray[np.int64]) -> Figures:
    """Return, for each rank in a series (T, R), the mean over all ranks of the same kind."""
    means = np.empty_like(series)
    for kind in np.unique(kinds):
        of_kind = np.flatnonzero(kinds == kind)
        means[:, of_kind] = series[:, of_kind].mean(axis=1, keepdims=True)
    return means


# The planner's analysis of a run's steps: what bounds them, and how long they would take after one change.


WAITING = "waiting"
"""The part of exposed communication that is spent waiting for late ranks; `exposed_comm` is then only the transfer."""


@dataclass(frozen=True)
class PlannedChange:
    change: str
    factors: Mapping[str, float]
    """Factor applied to the time of each part of a step; parts that are not listed stay the same."""


@dataclass(frozen=True)
class Outlook:
    basis: str
    """The planner's name for the machine, or the reason why the planner cannot model it."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Fractions of the time in the passes and the optimizer step, by bottleneck; empty if the planner does not know
    them."""
    changes: tuple[PlannedChange, ...] = ()
    exposed: Mapping[str, float] = field(default_factory=lambda: {EXCHANGES: 1.0})
    """Fractions of the exposed communication, by bottleneck, excluding waits for late ranks."""

    @property
    def is_known(self) -> bool:
        return bool(self.shares)


# What bounds the steps of an undisturbed run, and which change would help most.


LEAST_SAVED = 0.02
"""Changes that save less than this fraction of a step are not reported."""
COMPUTING = "computing"
EXCHANGES = "exchanges between ranks"
FASTER = "twice the device's speed"
BOUNDS = {
    WAITING: "waiting for late ranks",
    "data_wait": "data",
    "checkpoint": "checkpoints",
    "other": "the host between the passes",
}
"""The names of the bounds for the other parts of a step (all except passes, optimizer and transfers)."""
ALWAYS = (
    PlannedChange("no waiting for data", {"data_wait": 0.0}),
    PlannedChange("ranks that are never late", {WAITING: 0.0}),
)
UNPLANNED = (
    PlannedChange(FASTER, dict.fromkeys((*COMPUTE_PARTS, WAITING), 0.5)),
    PlannedChange("exchanges in half the time", {"exposed_comm": 0.5}),
)
"""Changes whose effect follows from measured parts alone, which cannot distinguish bandwidth from latency."""


def as_planned(evidence: RunEvidence, outlook: Outlook) -> list[RunVerdict]:
    """Return what bounds the steps, and the step time after each possible change.

    A change scales the measured parts by the same factors as the planner's parts, so that errors common to both
    predictions cancel."""
    # The time of the rank that waits least in exchanges is the transfer time; the rest is waiting for late ranks. The
    # rank that waits longest for data delays the others, so part of their waiting time is also due to data.
    means = {name: float(np.mean(series)) for name, series in evidence.parts_s.items()}
    exposed_s = evidence.parts_s["exposed_comm"]
    data_s = evidence.parts_s["data_wait"]
    transfer_s = min(means["exposed_comm"], float(np.median(exposed_s.min(axis=1))))
    waiting_s = means["exposed_comm"] - transfer_s
    for_data_s = min(waiting_s, float(np.mean(data_s.max(axis=1))) - means["data_wait"])
    parts_s = means | {
        "exposed_comm": transfer_s,
        WAITING: waiting_s - for_data_s,
        "data_wait": means["data_wait"] + for_data_s,
    }
    step_s = sum(parts_s.values())
    if step_s <= 0:
        return []
    bounds = dict(_bounds(parts_s, outlook))
    bound = max(bounds, key=lambda name: bounds[name])
    planned_s = sum(evidence.planned_s.values())
    beside = f"; {format_seconds(planned_s)} were planned" if planned_s else ""
    shares = ", ".join(f"{seconds / step_s:.0%} {name}" for name, seconds in bounds.items() if seconds >= 0.01 * step_s)
    # Only the changes that save enough time, best first.
    changes = (*(outlook.changes if outlook.is_known else UNPLANNED), *ALWAYS)
    found = []
    for one in changes:
        changed_s = sum(seconds * one.factors.get(part, 1.0) for part, seconds in parts_s.items())
        if step_s - changed_s >= LEAST_SAVED * step_s:
            found.append(WhatIf(one.change, changed_s, step_s - changed_s))
    what_if = tuple(sorted(found, key=lambda one: -one.saved_s))
    return [
        RunVerdict(
            cause="as_planned",
            since_step=int(evidence.steps[0]),
            confidence=0.9,
            evidence=(f"a step takes {format_seconds(step_s)}{beside}; bound by {bound}: {shares}", outlook.basis),
            advice=f"{what_if[0].change} would help most" if what_if else "no change would save 2% of a step",
            what_if=what_if,
        )
    ]


def _bounds(parts_s: Mapping[str, float], outlook: Outlook) -> Iterator[tuple[str, float]]:
    """Yield (bound, seconds per step that this bound accounts for)."""
    computed_s = sum(parts_s[name] for name in COMPUTE_PARTS)
    shares = outlook.shares if outlook.is_known else {COMPUTING: 1.0}
    for name, share in shares.items():
        yield name, share * computed_s
    for name, share in outlook.exposed.items():
        yield name, share * parts_s["exposed_comm"]
    for part, name in BOUNDS.items():
        yield name, parts_s[part]


LEAST_STEPS = 8
"""With fewer steps than this, only a hang is reported."""
WARM_STEPS = 2
"""Number of steps at the start that are ignored, because they include compilation, connection set-up and allocation."""

EVALUATION_SHARE = 0.2
"""Evaluations that take less than this fraction of the combined time of steps and evaluations are not reported."""

ADVICE: dict[Cause, str] = {
    "slow_device": "run trainspec doctor; scheduler=auto gives the rank fewer samples",
    "stolen_cores": "stop other processes there; scheduler=auto gives the rank fewer samples",
    "slow_node": "run trainspec doctor on the node; scheduler=auto drops the node",
    "narrow_link": "run trainspec doctor; comm=int8 sends fewer bytes",
    "lossy_link": "check the cable and the port's error counters: ethtool -S",
    "delayed_link": "use another network path; a larger batching.global_batch_size means fewer exchanges",
    "unbalanced_stage": "scheduler=auto moves layers; or set layout.stage_layers",
    "uneven_lengths": "scheduler=auto gives late ranks fewer samples; put documents of similar length in a batch",
    "slow_loader": "use a faster or local disk, or more cores for reading",
    "garbage_collection": "find the code that creates reference cycles: gc.set_debug(gc.DEBUG_STATS)",
    "host_bound": "set compile=true, or use larger micro-batches",
    "recompilation": "keep shapes the same: TORCH_LOGS=recompiles shows which ones differ",
    "checkpoint_writing": "set checkpoint.mode=async, or a larger checkpoint.interval_steps",
    "evaluation": "set a larger train.eval_interval_steps, or a smaller data.heldout_fraction",
    "slow_steps": "run trainspec doctor; top and nvidia-smi show what else is running there, and how hot the GPUs are",
    "memory_leak": "before memory runs out, stop the run and continue it with trainspec resume",
    "memory_pressure": "set recompute=selective, or use smaller micro-batches",
    "hang": "the stack shows where it hangs; a smaller resilience.hang_floor_s ends the run sooner",
    "network_timeouts": "check whether the switch's links or ports flap",
    "noise": "run on a machine without other load",
}


OWN_ADVICE: dict[Cause, str] = {
    "memory_leak": "find what keeps growing: use tracemalloc, or look for lists of losses that still have their graphs",
    "memory_pressure": "use smaller batches or activation checkpointing",
    "hang": "the stack shows where it hangs; --hang-s sets how soon the run is ended",
}
"""Advice for user commands where it differs, because they have no recipe."""

NO_OUTLOOK = Outlook("the planner was not used: this is based on measured parts only")


def conclude(evidence: RunEvidence, look_ahead: Callable[[], Outlook] = lambda: NO_OUTLOOK) -> tuple[RunVerdict, ...]:
    """Return the verdicts on a run, most expensive first. For an undisturbed run, return what bounds it and what would
    help.

    `look_ahead` asks the planner, which may take as long as a search for layouts."""
    # Verdicts on a step that takes far longer than usual: the ranks that the others are waiting for.
    verdicts: list[RunVerdict] = []
    if any(not stall.early for stall in evidence.stalls.values()) or find_mismatch(
        {rank: stall.entered for rank, stall in evidence.stalls.items()}
    ):
        late, why = _late_of(evidence)
        longest = max(evidence.stalls.values(), key=lambda stall: stall.waited_s)
        waits_in = next(
            (one.waits_in for rank, one in evidence.stalls.items() if rank not in late and one.waits_in), None
        )
        text = f"step {longest.step} has taken {longest.waited_s:.3g} s"
        text += f"; the longest earlier step took {longest.usual_s:.3g} s" if longest.usual_s else ""
        others = (f"the others wait in {waits_in}",) if waits_in else ()
        found = RunVerdict(
            cause="hang",
            since_step=longest.step,
            cost_s=longest.waited_s,
            confidence=0.5,
            evidence=(text, why, *others),
        )
        verdicts = [
            replace(found, rank=rank, confidence=0.95, evidence=(*found.evidence, *_stack(evidence, rank)))
            for rank in late
        ] or [found]
    # The first steps include compilation, connection set-up and allocation, so they are ignored.
    warm = replace(
        evidence,
        steps=evidence.steps[WARM_STEPS:],
        parts_s={name: series[WARM_STEPS:] for name, series in evidence.parts_s.items()},
        counters={name: series[WARM_STEPS:] for name, series in evidence.counters.items()},
        connections=tuple(
            replace(one, **{name: series[WARM_STEPS:] for name, series in vars(one).items() if name != "ranks"})
            for one in evidence.connections
        ),
    )
    if not evidence.parts_are_known:
        # A user command's steps are not divided into parts.
        if len(warm.steps) >= LEAST_STEPS:
            verdicts += [*find_memory(warm), *find_slow_steps(warm)]
        return heaviest_first([replace(one, advice=OWN_ADVICE.get(one.cause, ADVICE[one.cause])) for one in verdicts])
    if len(warm.steps) >= LEAST_STEPS:
        steps_s = dict(zip(warm.steps.tolist(), warm.part(*warm.parts_s).max(axis=1).tolist(), strict=True))
        times = OwnTimes(warm)
        verdicts += _of_part(warm, times, "slow_loader", warm.parts_s["data_wait"], "waits for its batches")
        # Average a counter over `AVERAGED_STEPS`, counting NaN as 0.
        series = np.nan_to_num(warm.counter("gc_s"))
        width = min(AVERAGED_STEPS, len(series))
        sums = np.cumsum(np.concatenate([np.zeros((1, warm.ranks)), series]), axis=0)
        first = np.clip(np.arange(len(series)) - width // 2, 0, len(series) - width)
        averaged: Figures = (sums[first + width] - sums[first]) / width
        verdicts += _of_part(warm, times, "garbage_collection", averaged, "collects garbage")
        verdicts += _recompilation(warm, times) + _checkpoints(warm, times) + _stages(warm, times)
        verdicts += _lengths(warm, times) + find_slow_ranks(warm, times) + find_slow_links(warm)
        verdicts += find_retries(warm, steps_s) + find_memory(warm)
        verdicts = _explained(verdicts + find_common_slowness(warm, times))
        # The planner is asked only about an undisturbed run, because it assumes one, and because the search takes time.
        if all(one.cause == "noise" for one in verdicts):
            verdicts += as_planned(warm, look_ahead())
    advised = [replace(one, advice=one.advice or ADVICE.get(one.cause, "")) for one in verdicts]
    return heaviest_first([with_look(one, evidence.looks) for one in _joined(advised)])


def with_evaluations(
    verdicts: Sequence[RunVerdict], evaluations: Sequence[tuple[int, float]], steps: int, steps_s: float
) -> tuple[RunVerdict, ...]:
    """Return the verdicts, plus one on the evaluations between the steps if they take a large part of the time.
    `evaluations`: (step, seconds) of each. `steps` steps took `steps_s` in total. A single evaluation at the end of the
    run is necessary, so it is not reported."""
    seconds = sum(each_s for _, each_s in evaluations)
    if len(evaluations) < 2 or not steps or seconds < EVALUATION_SHARE * (seconds + steps_s):
        return tuple(verdicts)
    took = f"{len(evaluations)} evaluations took {format_duration(seconds)}, {steps} steps {format_duration(steps_s)}"
    found = RunVerdict(
        cause="evaluation",
        since_step=evaluations[0][0],
        cost_s=seconds / steps,
        confidence=0.95,
        evidence=(f"{took}: {seconds / (seconds + steps_s):.0%} of this time was spent on evaluation",),
        advice=ADVICE["evaluation"],
    )
    return heaviest_first([*verdicts, found])


def _late_of(evidence: RunEvidence) -> tuple[list[int], str]:
    """Return the ranks that the others are waiting for, and why they are late. For a user command, this was decided
    when the hang was detected, from more information than the events contain: the culprit is not marked as `waiting`,
    even if it is also in a collective."""
    if evidence.parts_are_known:
        return find_late(
            {
                rank: Whereabouts(stall.waiting, stall.collectives, stall.entered, short_line(stall.stack))
                for rank, stall in evidence.stalls.items()
            },
            evidence.ranks,
        )
    for stall in evidence.stalls.values():
        if not isinstance(stall.late, Absent) and not isinstance(stall.why, Absent):
            return ([] if len(stall.late) == evidence.ranks > 1 else list(stall.late)), stall.why
    late = sorted(rank for rank, stall in evidence.stalls.items() if not stall.waiting)
    if not late:  # a rank that no longer writes events has exited
        return [rank for rank in range(evidence.ranks) if rank not in evidence.stalls], "it has ended"
    where = sorted({evidence.stalls[rank].waits_in or "" for rank in late})
    stands = " and in ".join(place for place in where if place)
    if len(late) < len(evidence.stalls) or len(late) == 1:
        return late, f"it is in {stands}" if stands else "it shows no Python stack"
    return [], f"all ranks are in {stands}" if stands else "no rank stands out"


def _stack(evidence: RunEvidence, rank: int) -> tuple[str, ...]:
    stall = evidence.stalls.get(rank)
    return (f"rank {rank} is at\n{stall.stack}",) if stall else (f"rank {rank} does not respond",)


def _explained(verdicts: list[RunVerdict]) -> list[RunVerdict]:
    """Remove verdicts that another one explains: other load if its cause is known, the rank with the longest samples if
    samples are uneven on all ranks, and slow exchanges if memory pressure interrupts all ranks."""

    def overlaps(one: RunVerdict, other: RunVerdict) -> bool:
        ends = one.until_step is not None and one.until_step < other.since_step
        return not ends and (other.until_step is None or other.until_step >= one.since_step)

    all_uneven = any(one.cause == "uneven_lengths" and one.rank is None for one in verdicts)
    pressed = [one for one in verdicts if one.cause == "memory_pressure" and one.rank is None and one.node is None]

    def is_named(one: RunVerdict) -> bool:
        if one.cause == "uneven_lengths" and one.rank is not None:
            return not all_uneven
        if one.cause == "narrow_link" and one.link is None:
            # Ranks whose allocators release memory at different moments of a step wait for one another in exchanges.
            return not any(overlaps(one, other) for other in pressed)
        return one.cause != "noise"

    named = list(filter(is_named, verdicts))
    common = [one for one in verdicts if one.cause == "noise"]
    return named + [one for one in common if not any(overlaps(one, other) for other in named)]


def _joined(verdicts: list[RunVerdict]) -> list[RunVerdict]:
    """Merge recurring verdicts with the same cause and location."""
    joined: dict[tuple[object, ...], RunVerdict] = {}
    for one in sorted(verdicts, key=lambda one: one.since_step):
        known = joined.get(one.place)
        if known is None:
            joined[one.place] = one
        else:
            heavier = max(known, one, key=lambda each: each.cost_s)
            joined[one.place] = replace(heavier, since_step=known.since_step, until_step=one.until_step)
    return list(joined.values())
