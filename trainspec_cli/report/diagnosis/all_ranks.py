"""All ranks together, where they are slower than at other times: other tenants, or a quota of the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.report.diagnosis.episodes import Episode, find_episodes, usual
from trainspec_cli.report.diagnosis.evidence import RunEvidence
from trainspec_cli.report.diagnosis.ranks import (
    EXPLAINS,
    PAGES,
    STEADY,
    OwnTimes,
    confidence,
    mean_known,
    means_known,
    milliseconds,
    until,
)

COMMON_S = 8.0
"""All ranks are slow for so long at least: other work of the machine comes and goes."""
SLOWER = 2.0
"""Steps of a command of the user's own take this many times as long as usual before they are reported: what a script
does in a step is not known, and may change a little by design."""
STEPS_BEFORE = 8
"""A command makes this many steps before those that are slow; the first ones compile and fill caches."""


def find_common_slowness(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return why all ranks compute longer than at other times, where they do: other tenants, a quota of the node."""
    ranks = evidence.ranks
    middle = (ranks - 1) // 2
    common_s = np.partition((times.own_s + times.queued_s) / evidence.shares, middle, axis=1)[:, middle]
    excess_s = common_s - usual(common_s)
    found = find_episodes(excess_s, times.limit(excess_s), times.step_s, COMMON_S)
    verdicts = [_explain_common(evidence, one) for one in found if one.steadiness >= STEADY]
    return _as_one([one for one in verdicts if one is not None])


def _explain_common(evidence: RunEvidence, episode: Episode) -> RunVerdict | None:
    def rise(name: str) -> float:
        """Return by how much a counter's mean over the ranks is above its usual level."""
        series = means_known(evidence.counter(name).T)
        if len(series) != len(evidence.steps) or not np.isfinite(series).any():
            return float("nan")
        return mean_known(series[episode.where]) - float(np.nanpercentile(series, 25))

    excess_s = episode.excess
    if rise("tokens") > 0 or rise("attended") > 0:
        return None
    found = RunVerdict(
        cause="noise",
        since_step=int(evidence.steps[episode.first]),
        until_step=until(evidence, episode),
        cost_s=excess_s,
        confidence=confidence(episode),
        evidence=(f"all ranks take {milliseconds(excess_s)} longer for their parts of a step than at other times",),
    )
    if rise("throttled_s") > EXPLAINS * excess_s:
        node = evidence.nodes[0] if len(set(evidence.nodes)) == 1 else None
        why = f"a quota holds their control groups back for {milliseconds(rise('throttled_s'))} a step"
        return replace(found, cause="slow_node", node=node, evidence=(*found.evidence, why))
    if rise("memory_stall_s") > EXPLAINS * excess_s or rise("major_faults") > PAGES:
        why = f"processes wait {milliseconds(rise('memory_stall_s'))} a step for memory"
        return replace(found, cause="memory_pressure", evidence=(*found.evidence, why))
    if rise("queued_s") + np.nan_to_num(rise("steal_s")) > EXPLAINS * excess_s:
        why = (
            f"they wait {milliseconds(rise('queued_s'))} more of each step for a processor, which other processes have"
        )
        return replace(found, evidence=(*found.evidence, why))
    return replace(found, confidence=round(found.confidence / 2, 2))


def find_slow_steps(evidence: RunEvidence) -> list[RunVerdict]:
    """Return where the steps of a command of the user's own have become far slower: of each rank, or of the run where
    all ranks have. Why is not known: nobody has divided these steps into parts."""
    of_rank: list[RunVerdict] = []
    for rank, step_s in enumerate(evidence.part(*evidence.parts_s).T):
        usual_s = float(usual(step_s))
        limit = np.full(len(step_s), (SLOWER - 1) * usual_s)
        found = find_episodes(step_s - usual_s, limit, step_s, COMMON_S)
        lasting = [one for one in found if one.first >= STEPS_BEFORE and one.steadiness >= STEADY]
        if not lasting:
            continue
        # One verdict per rank: the episode that cost most.
        episode = max(lasting, key=lambda one: one.excess * one.steps)
        text = f"{1 / (usual_s + episode.excess):.3g} steps a second, {1 / usual_s:.3g} usually"
        of_rank.append(
            RunVerdict(
                cause="slow_steps",
                rank=rank,
                since_step=int(evidence.steps[episode.first]),
                until_step=until(evidence, episode),
                cost_s=episode.excess,
                confidence=confidence(episode),
                evidence=(text,),
            )
        )
    if len(of_rank) < evidence.ranks or evidence.ranks == 1:
        return of_rank
    # Ranks that exchange gradients wait for one another: which of them is slow does not show.
    return [replace(max(of_rank, key=lambda one: one.cost_s), rank=None)]


def _as_one(verdicts: Sequence[RunVerdict]) -> list[RunVerdict]:
    """Join what comes and goes: one verdict a cause and place, since it came first, at its mean price."""
    joined: dict[tuple[object, ...], RunVerdict] = {}
    for one in verdicts:
        known = joined.get(one.place)
        joined[one.place] = one if known is None else replace(known, until_step=one.until_step)
    return list(joined.values())
