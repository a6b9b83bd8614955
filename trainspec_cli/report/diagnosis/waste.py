"""Time that no step needs: waiting for data, garbage collection, compiling again, writing checkpoints; and work that is
divided unevenly over a pipeline's stages, or over ranks by the lengths of their samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trainspec_cli.recipe.results.verdict import Cause, RunVerdict
from trainspec_cli.report.diagnosis.episodes import CONFIRMING_STEPS, Episode, find_episodes, usual
from trainspec_cli.report.diagnosis.evidence import Figures, RunEvidence
from trainspec_cli.report.diagnosis.ranks import LEAST_SHARE, OwnTimes, confidence, lasts, until

AVERAGED_STEPS = 17
"""Costs that come every few steps (a collection of garbage) are averaged over so many."""
MOST_RANKS = 0.5
"""Where more than this fraction of the ranks show it, it is of the whole run."""
WARM_STEPS = 5
"""The first steps of a run compile."""
UNEVEN = 0.2
"""A stage, or a rank's work, above the mean by this fraction is uneven."""
TOGETHER = 0.6
"""Correlation of times with work from which on the work explains the times."""
UNEVEN_SHARE = 0.05
"""Uneven lengths that cost less than this part of a step are not reported. It is less than `LEAST_SHARE`, since the
correlation shows that it is no chance."""


def find_waste(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    return [
        *_of_part(evidence, times, "slow_loader", evidence.parts_s["data_wait"], "waits for its batches"),
        *_of_part(evidence, times, "garbage_collection", _averaged_counter(evidence, "gc_s"), "collects garbage"),
        *_recompilation(evidence, times),
        *_checkpoints(evidence, times),
        *_stages(evidence, times),
        *_lengths(evidence, times),
    ]


def _averaged_counter(evidence: RunEvidence, name: str) -> Figures:
    """Return a counter, NaN as 0, averaged over `AVERAGED_STEPS`."""
    series = np.nan_to_num(evidence.counter(name))
    width = min(AVERAGED_STEPS, len(series))
    sums = np.cumsum(np.concatenate([np.zeros((1, evidence.ranks)), series]), axis=0)
    first = np.clip(np.arange(len(series)) - width // 2, 0, len(series) - width)
    averaged: Figures = (sums[first + width] - sums[first]) / width
    return averaged


def _of_part(evidence: RunEvidence, times: OwnTimes, cause: Cause, series: Figures, what: str) -> list[RunVerdict]:
    """Return the ranks that spend a part of their steps so, as one verdict where most do."""
    limit = times.limit()
    found: list[tuple[int, Episode]] = []
    for rank in np.flatnonzero((series > limit[:, None]).sum(axis=0) >= CONFIRMING_STEPS).tolist():
        episodes = find_episodes(series[:, rank], limit, times.step_s)
        found += [(rank, one) for one in episodes if not _is_of_device(evidence, times, rank, one)]
    found = [(rank, one) for rank, one in found if lasts(evidence, times, rank, [e for r, e in found if r == rank])]
    verdicts = [
        RunVerdict(
            cause=cause,
            rank=rank,
            since_step=int(evidence.steps[episode.first]),
            until_step=until(evidence, episode),
            cost_s=episode.excess,
            confidence=confidence(episode),
            evidence=(f"rank {rank} {what} for {episode.excess * 1e3:.3g} ms of a step",),
        )
        for rank, episode in found
    ]
    # The same waste on most ranks is one cause of the run, and a list of all would hide other verdicts.
    if len({rank for rank, _ in found}) > max(1, MOST_RANKS * evidence.ranks):
        worst = max(verdicts, key=lambda one: one.cost_s)
        text = f"{len(verdicts)} of {evidence.ranks} ranks: {worst.evidence[0]}"
        return [replace(worst, rank=None, since_step=min(one.since_step for one in verdicts), evidence=(text,))]
    return verdicts


def _is_of_device(evidence: RunEvidence, times: OwnTimes, rank: int, episode: Episode) -> bool:
    """Return whether the rank's own computing is slowed as much: its loader then shares what its device suffers."""
    inside = episode.where
    excess_s = float(np.median(times.own_s[inside, rank] - times.expected_s[inside, rank]))
    throttled_s = float(np.nanmean(evidence.counter("throttled_s")[inside, rank])) if evidence.counters else 0.0
    return excess_s > episode.excess or throttled_s > episode.excess


def _recompilation(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    compiles = np.nan_to_num(evidence.counter("compiles"))
    late = np.array(compiles)
    late[: WARM_STEPS + int(np.argmax(evidence.steps > WARM_STEPS))] = 0.0
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
            evidence=(f"{len(writes)} checkpoints held the steps up for {each_s:.3g} s each",),
        )
    ]


def _stages(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return the stage of a pipeline that has more work than the others, where the plan gave it that."""
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
                f"stage {every[slowest]} (rank {', '.join(map(str, ranks[:8]))}) computes {level_s[slowest] * 1e3:.3g} "
                f"ms a step, the others {others_s * 1e3:.3g} ms on average",
            ),
        )
    ]


def _lengths(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return whether steps wait for whichever rank has the longest samples, another one each time."""
    attended, kinds = evidence.counter("attended"), np.array(evidence.kinds)
    if evidence.ranks < 2 or not np.isfinite(attended).any():
        return []
    known = np.isfinite(attended).all(axis=1)
    shares = evidence.shares[known]  # more samples are no longer ones
    work, own_s = attended[known] / shares, times.own_s[known] / shares
    mean = _mean_of_kind(work, kinds)
    if not len(work) or not (mean > 0).all():
        return []
    uneven = work / mean - 1
    late_s = own_s - _mean_of_kind(own_s, kinds)
    cost_s = float(late_s.max(axis=1).mean())
    if uneven.max(axis=1).mean() < UNEVEN or cost_s < UNEVEN_SHARE * times.usual_step_s or uneven.std() == 0:
        return []
    if np.corrcoef(uneven.ravel(), late_s.ravel())[0, 1] < TOGETHER:
        return []
    longest = uneven.argmax(axis=1)[uneven.max(axis=1) > UNEVEN / 2]
    if np.bincount(longest).max() > 0.8 * len(longest):
        return []  # always the same rank, which is named by itself
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
    """Return at each rank of a series (T, R) the mean of the ranks of its kind."""
    means = np.empty_like(series)
    for kind in np.unique(kinds):
        of_kind = np.flatnonzero(kinds == kind)
        means[:, of_kind] = series[:, of_kind].mean(axis=1, keepdims=True)
    return means
