"""Find ranks, or entire nodes, that take longer than expected for their own work in a step.

All ranks finish a step together, so the step time does not show which rank is slow. Therefore the time of each rank's
own work is compared with that of ranks doing the same work or, if there are none, with the rank's past. The kernel's
counters show the reason: a quota, other processes on the rank's processor, memory, or more work. If none of these
applies, the cause is the device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainspec_cli.recipe.results.verdict import Cause, RunVerdict
from trainspec_cli.reporter.diagnosis.evidence import OWN_PARTS, Figures, RunEvidence
from trainspec_cli.reporter.diagnosis.series import (
    CONFIRMING_S,
    CONFIRMING_STEPS,
    GAP_STEPS,
    LEAST_SHARE,
    NOISE_FACTOR,
    STEADY,
    Episode,
    confidence,
    deviation,
    find_episodes,
    mean_known,
    means_known,
    milliseconds,
    smoothed,
    until,
    usual,
    verdict_of,
)

STOLEN_S = 8.0
"""Other processes are reported only if they occupy a rank's processor for at least this many seconds, because such load
comes and goes."""
STOLEN_ALONE_S, OF_STOLEN = 3.0, 0.5
"""This many seconds suffice if the peers wait for a processor for at most this fraction of the rank's excess wait."""
RELIEVED = 0.97
"""If a rank has less than this fraction of its peers' samples, the scheduler has assigned it fewer."""
LEFT_S = 60.0
"""Other load that ends within this many seconds is classified as noise."""
LASTING_STEPS = 8
"""An episode is not reported if it lasts fewer steps than this and no counter shows a reason. (Because series are
smoothed, load during 5 steps can appear in as many as 7.)"""
STEADILY = 0.8
"""An episode with at least this fraction of slow steps is a single disturbance, as opposed to several in succession."""
UNCOUNTED_STEPS = 6
"""Number of slow steps that confirm a cause without a matching counter."""
OF_PEERS = 0.4
"""If the peers' wait for a processor rises by at least this fraction of a rank's excess, the entire machine is loaded,
unless that rank is always last."""
LOADED = 0.05
"""The machine is loaded if ranks wait for a processor for this fraction of a step."""
EXPLAINS = 0.4
"""A counter explains a rank's excess time if it accounts for at least this fraction of that time."""
PAGES = 20.0
"""Memory is considered short if a step reads this many pages back from disk."""
RETRIES = 0.5
"""Memory is considered short if an allocator releases its cache this many times per step. Each time, it waits for the
device, and new memory has to be mapped."""
AS_SLOW = 0.5
"""A peer is considered equally slow if it has at least this fraction of the rank's excess."""
MORE_WORK = 0.5
"""More work explains a slow rank if the relative increase in work is at least this fraction of the relative increase in
time."""
FITTED_STEPS = 8
"""A series is fitted to the work of at least this many steps."""
EXTRAPOLATED = 4.0
"""The fit is extrapolated to work that exceeds the mean by at most this many standard deviations."""


CHANCE = 1e-5
"""A rank is considered to be consistently last if the probability of this happening by chance is below this value
(Hoeffding, 1963)."""


@dataclass(frozen=True)
class Slow:
    """A rank that is slow during an episode, with the cause that its counters show."""

    rank: int
    episode: Episode
    cause: Cause
    why: str
    is_counted: bool = False
    """True if a kernel counter shows the cause, which rules out other load on the machine."""


class OwnTimes:
    """The time of each rank's own work in the steps, and its expected value."""

    def __init__(self, evidence: RunEvidence):
        self.evidence = evidence
        # Garbage collection and time without a processor have separate verdicts. If they were included here, they would
        # look like a slow device.
        gc_s = np.nan_to_num(evidence.counter("gc_s"))
        parts = [name for name in OWN_PARTS if name not in ("data_wait", "checkpoint")]
        throttled_s = np.nan_to_num(evidence.counter("throttled_s"))
        self.queued_s: Figures = np.maximum(0.0, np.nan_to_num(evidence.counter("queued_s")) - throttled_s)
        """(T, R): time during which a rank waited because other processes had the processor, excluding throttling by a
        quota."""
        self.own_s: Figures = np.maximum(0.0, evidence.part(*parts) - gc_s - self.queued_s)
        """(T, R): time of the ranks' own work. It excludes waits for data or a processor, checkpoints and garbage
        collection, which have separate verdicts."""
        self.step_s: Figures = np.median(evidence.part(*evidence.parts_s), axis=1)
        """(T,)"""
        self.usual_step_s = float(usual(self.step_s))
        self.knows_load = bool(np.isfinite(evidence.counter("queued_s")).any())
        """True if the system counts the time that a rank waits for a processor."""
        self.load_s = smoothed(np.median(self.queued_s, axis=1))
        """(T,): the ranks' median wait for a processor. Programs that share processors also share caches and cores.
        Computation therefore takes longer by about the same amount, on different ranks at different times."""
        # If all ranks of a kind are on one node, a slow node makes all of them equally slow. A comparison within the
        # kind would miss that, so these ranks are also compared with their kind's usual level.
        expected = self.expect(self.own_s)
        shares = self.evidence.shares
        if (shares > 1).any():  # a rank that the scheduler assigned more samples may take proportionally longer
            with_share_s = self.expect(self.own_s / shares) * shares
            expected = np.where(shares > 1, np.maximum(expected, with_share_s), expected)
        kinds = np.array(self.evidence.kinds)
        nodes = np.array(self.evidence.nodes)
        if len(np.unique(nodes)) > 1:
            for kind in np.unique(kinds):
                of_kind = np.flatnonzero(kinds == kind)
                if len(np.unique(nodes[of_kind])) == 1:
                    expected[:, of_kind] = np.minimum(expected[:, of_kind], usual(expected[:, of_kind]))
        self.expected_s = expected
        """(T, R)"""

    def expect(self, series: Figures) -> Figures:
        """Return each rank's expected values: the median over the ranks that do the same work (of two ranks, the lower
        value) or, for a rank without peers, its own usual level."""
        kinds = np.array(self.evidence.kinds)
        expected = np.empty_like(series)
        for kind in np.unique(kinds):
            of_kind = np.flatnonzero(kinds == kind)
            times = series[:, of_kind]
            if len(of_kind) > 1:
                # With two ranks, the faster one is the reference, because the median of both would hide the slow one.
                middle = (len(of_kind) - 1) // 2
                expected[:, of_kind] = np.partition(times, middle, axis=1)[:, middle : middle + 1]
            else:
                expected[:, of_kind] = usual(times)
        return expected

    def expect_queued(self) -> Figures:
        """Return each rank's expected wait for a processor. On a busy machine, this wait is proportional to the rank's
        computation, with the same ratio as for its peers. A rank with more computation therefore waits longer even if
        no other process is bound to its processor."""
        processor_s = self.evidence.counter("cpu_s")
        of_peers_s = self.expect(np.nan_to_num(processor_s))
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where((of_peers_s > 0) & np.isfinite(processor_s), processor_s / of_peers_s, 1.0)
        expected: Figures = self.expect(self.queued_s) * np.maximum(1.0, more)
        return expected

    def is_loaded(self, episode: Episode) -> bool:
        """Return whether other programs or virtual machines used the ranks' processors during an episode."""
        stolen_s = np.nan_to_num(self.evidence.counter("steal_s"))[episode.where]
        loaded_s = np.median(self.load_s[episode.where]) + np.median(stolen_s)
        return bool(loaded_s > LOADED * np.median(self.step_s[episode.where]))

    def limit(self, series: Figures | None = None) -> Figures:
        """Return the limit (T,) above which a time is considered high: a fraction of the duration of the surrounding
        steps, and at least the noise of single steps."""
        noise = 0.0 if series is None else NOISE_FACTOR * float(deviation(series))
        return np.maximum(LEAST_SHARE * np.maximum(self.usual_step_s, smoothed(self.step_s)), noise)


def find_slow_ranks(evidence: RunEvidence, times: OwnTimes) -> list[RunVerdict]:
    """Return verdicts on ranks that are slower than others with the same work, or on the node if all of its ranks are
    slow."""
    slow = []
    # Without load counters, we cannot rule out that a rank is slow because of other load on its machine. Such load
    # comes and goes, so confirmation takes longer.
    confirming_s = CONFIRMING_S if times.knows_load else STOLEN_S
    for rank, episode in _suspects(times, times.own_s - times.expected_s, confirming_s, times.load_s):
        found = explain(evidence, times, rank, episode)
        # No long confirmation is needed if a counter shows the reason, or for a slow device on an idle machine.
        at_once = found.is_counted or (found.cause == "slow_device" and not times.is_loaded(episode))
        if at_once or (episode.steadiness >= STEADY and episode.steps >= UNCOUNTED_STEPS):
            slow.append(found)
    slow = [
        one
        for one in slow
        if one.is_counted or lasts(evidence, times, one.rank, [o.episode for o in slow if o.rank == one.rank])
    ]
    # On a loaded machine, other programs temporarily share caches and memory with a rank. A short slowdown for which no
    # counter shows a reason is due to such load, not to a slow device.
    unexplained = [one for one in slow if not one.is_counted and one.cause in ("slow_device", "host_bound")]
    visits = []
    for rank in {one.rank for one in unexplained}:
        of_rank = [one for one in unexplained if one.rank == rank]
        episodes = [one.episode for one in of_rank]
        loaded = sum(times.is_loaded(episode) for episode in episodes)
        # A slowdown is permanent if the rank is still slow, or has been slow for a long time and for most of the time
        # since the first episode.
        newest = episodes[-1]
        span_s = times.step_s[episodes[0].first : newest.last + 1].sum()
        slow_s = sum(times.step_s[episode.where].sum() for episode in episodes)
        came_to_stay = until(evidence, newest) is None or bool(slow_s >= max(LEFT_S, span_s / 2))
        if loaded > len(episodes) / 2 and not came_to_stay:
            visits += of_rank
    slow = [replace(one, cause="noise") if one in visits else one for one in slow]
    # Find ranks whose processors are used by other processes. The cause is `noise` if this lasted only a short time.
    stolen = []
    of_all_peers_s = times.expect_queued()
    occupied: list[tuple[int, Episode]] = []
    for rank, episode in _suspects(times, times.queued_s - of_all_peers_s, STOLEN_ALONE_S):
        of_peers_s = of_all_peers_s[:, rank]
        level_s = float(np.median(of_peers_s[episode.where]))
        is_long = level_s <= OF_STOLEN * episode.excess or times.step_s[episode.where].sum() >= STOLEN_S
        # If the peers also wait longer, the load is machine-wide, and no single rank is to blame. The exception is a
        # rank that is last far more often than by chance, because machine-wide load affects different ranks at
        # different times.
        of_kind = np.flatnonzero(np.array(times.evidence.kinds) == times.evidence.kinds[rank])
        took_s = (times.own_s + times.queued_s)[episode.where][:, of_kind]
        more_often = float((of_kind[took_s.argmax(axis=1)] == rank).mean()) - 1 / len(of_kind)
        is_alone = level_s - usual(of_peers_s) < OF_PEERS * episode.excess or (
            more_often > 0 and math.exp(-2 * episode.steps * more_often**2) < CHANCE
        )
        if episode.steadiness >= STEADY and is_long and is_alone:
            occupied.append((rank, episode))
    last = dict(occupied)  # the last episode of each rank
    for rank, episode in occupied:
        why = (
            f"other processes occupy its processor {milliseconds(episode.excess)} longer per step than those of its "
            "peers"
        )
        span = slice(episode.first, last[rank].last + 1)
        has_stayed = until(evidence, last[rank]) is None or times.step_s[span].sum() >= LEFT_S
        stolen.append(Slow(rank, episode, "stolen_cores" if has_stayed else "noise", why))
    return _verdicts(evidence, times, slow + stolen)


def lasts(evidence: RunEvidence, times: OwnTimes, rank: int, of_rank: Sequence[Episode]) -> bool:
    """Return whether a rank is still slow, was slow for some time, or is slow repeatedly. Shorter episodes for which no
    counter shows a reason are attributed to other load on the machine, which a user cannot change. A rank is still slow
    if the scheduler has assigned it fewer samples, even though no other rank waits for it any more."""
    slow = np.zeros(len(evidence.steps))
    """For each step, the fraction of it that counts as slow."""
    is_relieved = evidence.shares[:, rank] < RELIEVED
    may_be_load = not times.knows_load or any(times.is_loaded(episode) for episode in of_rank)
    for episode in of_rank:
        if until(evidence, episode) is None:
            return True
        # On an idle machine, a rank that is slow in some of the steps will be slow again.
        unsteady = 0.0 if may_be_load else episode.steadiness
        slow[episode.where] = 1.0 if episode.steadiness >= STEADILY else unsteady
        # A rank that is relieved (has fewer samples) no longer looks slow, so the steps where it is relieved extend the
        # episode.
        later = is_relieved[episode.last + 1 :]
        begun = int(np.argmax(later)) if later[: GAP_STEPS + 1].any() else len(later)
        ended = begun + int(np.argmin(np.append(later[begun:], False)))
        if begun < len(later):
            slow[episode.last + 1 : episode.last + 1 + ended] = 1.0
    if not slow.any():
        return False
    least_s = STOLEN_S if may_be_load else STOLEN_ALONE_S
    # In `edges`, the entries at even positions are starts of runs of slow steps, and those at odd positions are ends.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], slow == 1.0, [False]]).astype(np.int8)))
    if len(edges):
        longest = edges[::2][np.argmax(edges[1::2] - edges[::2])]
        in_a_row = slice(longest, longest + np.max(edges[1::2] - edges[::2]))
        if in_a_row.stop - in_a_row.start >= LASTING_STEPS and times.step_s[in_a_row].sum() >= least_s:
            return True
    where = np.flatnonzero(slow)
    least_steps = LASTING_STEPS * (2 if may_be_load else 1)
    comes_back = slow[where[0] : where[-1] + 1].mean() >= 0.5 and slow.sum() >= least_steps
    return bool(comes_back and (times.step_s * slow).sum() >= 2 * least_s)


def _suspects(
    times: OwnTimes, excess_s: Figures, confirming_s: float, least_s: Figures | float = 0.0
) -> Iterator[tuple[int, Episode]]:
    """Yield (rank, episode) for the episodes where the rank's series in (T, R) is above its limit and above
    `least_s`."""
    # The more ranks there are, the more often noise exceeds the limit on one of them by chance.
    confirming_steps = CONFIRMING_STEPS + int(math.log10(excess_s.shape[1]) / 2)
    above = (excess_s > LEAST_SHARE * times.usual_step_s).sum(axis=0)
    for rank in np.flatnonzero(above >= confirming_steps).tolist():
        series = excess_s[:, rank]
        for episode in find_episodes(series, np.maximum(times.limit(series), least_s), times.step_s, confirming_s):
            if episode.steps >= confirming_steps:
                yield rank, episode


def explain(evidence: RunEvidence, times: OwnTimes, rank: int, episode: Episode) -> Slow:
    """Return why a rank is slow in an episode, from the difference between its counters and those of its peers."""
    excess_s = episode.excess
    # Ignore peers that are just as slow, because they would hide the difference.
    peers = _peers(evidence, times, rank, episode)

    def more(name: str) -> float:
        return _difference(evidence.counter(name), rank, peers, episode)

    if more("throttled_s") > EXPLAINS * excess_s:
        why = f"a quota throttles its control group for {milliseconds(more('throttled_s'))} per step"
        return Slow(rank, episode, "slow_device", why, is_counted=True)
    if more("major_faults") > PAGES or more("memory_stall_s") > EXPLAINS * excess_s:
        why = f"it reads {more('major_faults'):.0f} more pages per step back from disk than its peers"
        return Slow(rank, episode, "memory_pressure", why, is_counted=True)
    if more("allocator_retries") >= RETRIES:
        # This is checked before `starved_s`, because the host queues nothing while the allocator frees memory.
        why = f"its allocator releases its cache {more('allocator_retries'):.1f} more times per step than its peers'"
        return Slow(rank, episode, "memory_pressure", why, is_counted=True)
    if (work := _more_work(evidence, times, rank, peers, episode)) is not None:
        return Slow(
            rank, episode, "uneven_lengths", f"its samples require {work:.0%} more work than those of its peers"
        )
    if _difference(evidence.parts_s["other"], rank, peers, episode) > 0.5 * excess_s:
        return Slow(rank, episode, "host_bound", "the time is spent between the passes, in Python")
    waited_s = more("host_queued_s")
    if np.isfinite(waited_s) and waited_s > EXPLAINS * excess_s:
        why = f"other processes occupy its host thread's processor for {milliseconds(waited_s)} more per step"
        return Slow(rank, episode, "stolen_cores", why, is_counted=True)
    starved_s = more("starved_s")
    if np.isfinite(starved_s) and starved_s > EXPLAINS * excess_s:
        why = f"its device waits for the host to queue work {milliseconds(starved_s)} longer per step"
        return Slow(rank, episode, "host_bound", why)
    busy_s = more("cpu_s")
    if np.isfinite(busy_s) and busy_s > EXPLAINS * excess_s:
        why = f"the same work takes {milliseconds(busy_s)} more processor time per step than on its peers"
        return Slow(rank, episode, "slow_device", why)
    return Slow(rank, episode, "slow_device", "it computes longer than its peers, and no system counter shows a reason")


def _peers(evidence: RunEvidence, times: OwnTimes, rank: int, episode: Episode) -> list[int]:
    """Return the ranks that do the same work. Those that are just as slow are left out, because they do not show the
    usual level."""
    inside = episode.where
    excess_s = np.median(times.own_s[inside] - times.expected_s[inside], axis=0)
    of_kind = (other for other in range(evidence.ranks) if evidence.kinds[other] == evidence.kinds[rank])
    return [other for other in of_kind if other != rank and excess_s[other] < AS_SLOW * episode.excess]


def _more_work(
    evidence: RunEvidence, times: OwnTimes, rank: int, peers: Sequence[int], episode: Episode
) -> float | None:
    """Return how much more work a rank has than its peers in the slow steps of an episode, as a fraction, if this
    explains the rank's time."""
    if not peers:
        return None
    excess_s = (times.own_s - times.expected_s)[:, rank]
    is_late = np.zeros(len(excess_s), bool)
    is_late[episode.where] = excess_s[episode.where] > AS_SLOW * episode.excess
    expected_s = float(np.median(times.expected_s[episode.where, rank]))
    for name in ("tokens", "attended"):
        work = evidence.counter(name) / evidence.shares
        of_peers = np.median(work[:, list(peers)], axis=1)
        own = mean_known(work[is_late, rank])
        others = mean_known(of_peers[is_late])
        more = own / others - 1 if others > 0 else 0.0
        if work_explains(more, work[:, rank] - of_peers, excess_s, is_late, episode.excess, expected_s):
            return more
    return None


def work_explains(
    more: float, work: Figures, seconds: Figures, where: npt.NDArray[np.bool_], excess_s: float, usual_s: float
) -> bool:
    """Return whether additional work, by the fraction `more`, explains why a series takes `excess_s` longer than
    `usual_s` in the steps `where` (T,). If the other steps show how the series of seconds (T,) depends on work (T,),
    the additional work must account for the excess."""
    if not more > MORE_WORK * excess_s / max(usual_s, 1e-9):
        return False
    known = np.isfinite(work) & np.isfinite(seconds)
    inside = known & where
    others = known & ~where
    if not inside.any() or others.sum() < FITTED_STEPS:
        return True
    added = float(work[inside].mean() - work[others].mean())
    spread = float(work[others].std())
    if spread == 0 or abs(added) > EXTRAPOLATED * spread:
        return True
    due_s = added * float(np.cov(work[others], seconds[others], bias=True)[0, 1]) / spread**2
    return due_s >= EXPLAINS * excess_s


def _difference(series: Figures, rank: int, peers: Sequence[int], episode: Episode) -> float:
    """Return by how much a rank's counter exceeds the median of its peers in an episode or, without peers, the rank's
    own level outside the episode; NaN if unknown."""
    inside = mean_known(series[episode.where, rank])
    if peers:
        others = means_known(series[episode.where][:, list(peers)])
        return inside - float(np.median(others[np.isfinite(others)])) if np.isfinite(others).any() else float("nan")
    outside = np.delete(series[:, rank], np.arange(episode.first, episode.last + 1))
    return inside - (mean_known(outside) if np.isfinite(outside).any() else 0.0)


# Verdicts on entire nodes


def _verdicts(evidence: RunEvidence, times: OwnTimes, slow: list[Slow]) -> list[RunVerdict]:
    """Return a verdict for each node whose ranks are all slow, and for each slow rank on the other nodes. If all nodes
    are slow, no node is blamed: `find_common_slowness` covers that."""
    verdicts = []
    of_nodes = list[Slow]()
    sizes = Counter(evidence.nodes)
    for node in sorted({evidence.nodes[one.rank] for one in slow}):
        of_node = [one for one in slow if evidence.nodes[one.rank] == node]
        longest = max(of_node, key=lambda one: one.episode.steps)
        shared = [one for one in of_node if one.episode.covers(longest.episode) > 0.5]
        # One healthy rank shows that its node is healthy. A single node, or a node with only one rank, cannot be
        # compared.
        if sizes[node] > 1 and len(sizes) > 1 and len({one.rank for one in shared}) == sizes[node]:
            of_nodes += shared
            # The verdict on a node is based on the episodes that all of its ranks share.
            causes = [one.cause for one in shared]
            often: Cause = max(sorted(set(causes)), key=causes.count)
            first = min(shared, key=lambda one: one.episode.first)
            last = max(shared, key=lambda one: one.episode.last)
            worst = max(shared, key=lambda one: one.episode.excess)
            verdicts.append(
                RunVerdict(
                    cause="slow_node" if often in ("slow_device", "stolen_cores", "host_bound") else often,
                    node=node,
                    since_step=int(evidence.steps[first.episode.first]),
                    until_step=until(evidence, last.episode),
                    cost_s=worst.episode.excess,
                    confidence=min(confidence(one.episode) for one in shared),
                    evidence=(f"all {len({one.rank for one in shared})} ranks of node {node} are slow: {worst.why}",),
                )
            )
    if len(verdicts) == len(sizes) > 1:
        verdicts = []
    for one in slow:
        if one not in of_nodes:
            where = one.episode.where
            own_s = float(np.median(times.own_s[where, one.rank] + times.queued_s[where, one.rank]))
            took = f"takes {milliseconds(own_s)} for its part of a step, its peers "
            text = f"rank {one.rank} (node {evidence.nodes[one.rank]}) {took}{milliseconds(own_s - one.episode.excess)}"
            rank = None if one.cause == "noise" else one.rank
            verdicts.append(verdict_of(evidence, one.episode, one.cause, text, one.why, rank=rank))
    return verdicts
