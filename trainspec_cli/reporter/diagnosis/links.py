"""Find links with low bandwidth, links that lose or delay segments, and exchanges that time out and recover.

A late rank makes the others wait, but does not wait itself, so the rank that waits least in a step shows how long the
transfer takes. The small exchange that ends each step shows the latency, independent of the bandwidth. Retransmitted
segments, round-trip times and the rate of each connection reveal the cause and the location.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainspec_cli.recipe.results.verdict import Cause, RunVerdict
from trainspec_cli.reporter.diagnosis.evidence import COMPUTE_PARTS, Figures, RunEvidence
from trainspec_cli.reporter.diagnosis.series import (
    LEAST_SHARE,
    NOISE_FACTOR,
    QUEUED_S,
    STEADY,
    Episode,
    Pair,
    Path,
    deviation,
    find_episodes,
    over_all_ranks,
    paths_of,
    rise,
    smoothed,
    usual,
    verdict_of,
)
from trainspec_cli.run.folder.event_types.events import LinkEvent

LOST = 1e-3
"""A connection with more than this fraction of retransmitted segments is lossy."""
LOST_SEGMENTS = 5
RECENT_STEPS = 16
TIMEOUTS = 0.5
"""If the ratio of timeouts to retransmitted segments is at least this, a path has outages; otherwise it loses single
segments."""
LATER_S, LATER = 5e-4, 1.0
"""The latency has grown if it exceeds the usual latency by at least this many seconds and by at least this fraction. A
link with a delay delays the small exchange by at least half a round trip, whereas the queue of a narrow link has
drained before that exchange."""
OF_LARGE = 1 / 3
"""If a delay lengthens the large exchanges by some factor, it lengthens the small exchange by at least this fraction of
that factor. The factors differ because the usual time of the small exchange also contains waits for other ranks."""
DELAY_SHARE = 0.05
"""Delays that cost less than this fraction of a step are not reported. This may be less than the noise of the
transfers, because the small exchange shows a delay in every step."""
LOADED, OF_RTT = 0.2, 0.3
"""An increase in latency is attributed to a link if the increase in round-trip time accounts for at least `OF_RTT` of
it. If ranks wait for a processor for at most `LOADED` of a step, the increase in round-trip time is first multiplied by
the exchange's number of round trips. Behind a relay, round-trip times show nothing; it is then enough that ranks do not
wait for a processor longer than that."""
OF_NOISE = 0.5
"""If waiting for processors accounts for at least this fraction of a transfer's excess time, no link is blamed."""
HELD_QUEUED_S = 1e-2
"""A rank throttled by a quota reads from its sockets late, which lengthens round trips to it by a few milliseconds."""
LONG_STEPS_S = 3.0
"""Transfers must take too long for this many seconds of a run before a link is blamed, unless the link's connections
confirm it."""

OUTAGES = 2
"""A link is blamed for outages only if its connections time out on this many separate occasions in a run."""
MOST_STEPS, AT_OUTAGES = 0.5, 0.8
"""Outages are temporary: fewer than this fraction of the steps contain one, and these steps contain at least this
fraction of the retransmissions."""


def find_slow_links(evidence: RunEvidence) -> list[RunVerdict]:
    if evidence.ranks < 2:
        return []
    # Take the minimum over the ranks: the last rank to arrive waits for no other, so its time is the time of the
    # transfer.
    exposed_s = evidence.parts_s["exposed_comm"]
    step_s: Figures = np.median(evidence.part(*evidence.parts_s), axis=1)
    transfer_s = exposed_s.min(axis=1)
    excess_s = transfer_s - usual(transfer_s)
    stages = len(set(evidence.kinds))
    if stages > 1:
        # In a pipeline, a rank also waits while the other stages compute. If one stage takes longer, the others wait
        # longer, and that stage waits less. By contrast, a slow link lengthens the waits of all ranks, compared with
        # each rank's usual wait.
        excess_s = np.minimum(excess_s, (exposed_s - usual(exposed_s)).min(axis=1))
        computed_s = evidence.part(*COMPUTE_PARTS)
        longer_s: Figures = np.maximum(0.0, computed_s - usual(computed_s)).max(axis=1)
        excess_s = excess_s - (stages - 1) * longer_s
    least_s = LEAST_SHARE * np.maximum(usual(step_s), smoothed(step_s))
    limit = np.maximum(least_s, NOISE_FACTOR * deviation(transfer_s))
    found = []
    for one in find_episodes(excess_s, limit, step_s):
        # A short episode is attributed to a link only if its connections show queued data.
        lasts = float(step_s[one.where].sum()) >= LONG_STEPS_S
        if one.steadiness >= STEADY and (lasts or _is_queued_in_transit(evidence, paths_of(evidence.connections, one))):
            verdict = _explain(evidence, one)
            found += [verdict] if verdict is not None else []
    # The first matching kind is reported, because outages also show retransmissions, and losses also increase latency.
    return (
        _outages(evidence, step_s)
        or found
        or _always_lossy(evidence, transfer_s, step_s)
        or _delays(evidence, transfer_s, step_s)
    )


def _is_queued_in_transit(evidence: RunEvidence, paths: Sequence[Path], least_s: float = QUEUED_S) -> bool:
    """Return whether data is delayed on its way between nodes. Round-trip times show this even while a rank waits for a
    processor, because the kernel sends the acknowledgements."""
    return any(path.has_queue(least_s) and len(set(_ends(evidence, path))) > 1 for path in paths)


def _outages(evidence: RunEvidence, step_s: Figures) -> list[RunVerdict]:
    """Return a verdict on a link with outages: its connections timed out in a few long steps, but almost nothing was
    retransmitted in the other steps (unlike with packet loss)."""
    waited = np.sum([np.nan_to_num(one.timeouts) for one in evidence.connections], axis=0) > 0
    where = np.flatnonzero(waited)
    bouts = int((np.diff(where) > 1).sum()) + 1 if where.size else 0
    if bouts < OUTAGES or where.size > MOST_STEPS * (len(step_s) - where[0]):
        return []
    first = int(where[0])
    last = int(where[-1])
    span = Episode(first, last, 0.0, 1.0)
    longer_s = np.maximum(0.0, step_s - usual(step_s))
    cost_s = float(longer_s[where].sum()) / span.steps
    resent = _resent(evidence)
    if cost_s < LEAST_SHARE * float(usual(step_s)) or resent[waited].sum() < AT_OUTAGES * resent.sum():
        return []
    paths = paths_of(evidence.connections, span)
    worst = max(paths, key=lambda path: path.timeouts)
    # More outages may follow, unless more than twice the mean interval has passed since the last one.
    goes_on = len(step_s) - 1 - last <= 2 * span.steps / (bouts - 1)
    text = (
        f"{sum(path.timeouts for path in paths):.0f} connection timeouts on {bouts} occasions, most of them "
        f"between ranks {_names(worst.ranks)}; no losses between those occasions"
    )
    return [
        RunVerdict(
            cause="network_timeouts",
            node=_node_of(evidence, paths, lambda path: path.timeouts),
            link=worst.ranks,
            since_step=int(evidence.steps[first]),
            until_step=None if goes_on else int(evidence.steps[last]),
            cost_s=cost_s,
            confidence=0.9,
            evidence=(text, f"these steps take {float(np.median(longer_s[where])):.3g} s longer"),
        )
    ]


def _explain(evidence: RunEvidence, episode: Episode) -> RunVerdict | None:
    """Return a verdict that states why an episode's transfers take long; None if the cause is load on the machine or is
    unknown."""
    paths = paths_of(evidence.connections, episode)
    losing = _losing(paths)
    if losing is not None and not losing.overflows:
        resent = sum(path.resent for path in paths)
        timeouts = sum(path.timeouts for path in paths)
        if timeouts > TIMEOUTS * resent:
            text = f"connections timed out {timeouts:.0f} times, then continued"
            return _verdict(evidence, episode, "network_timeouts", losing, paths, lambda path: path.timeouts, text)
        share = resent / sum(path.segments for path in paths)
        text = f"{share:.2%} of segments were retransmitted, most of them between ranks {_names(losing.ranks)}"
        return _verdict(evidence, episode, "lossy_link", losing, paths, lambda path: path.resent, text)
    # Transfers may take long because ranks wait for a processor or are throttled. But if data is delayed on its way
    # between nodes, the link is the cause.
    # Take the maximum, because one throttled rank delays all others.
    throttled_s = rise(evidence.counter("throttled_s"), episode, np.nanmax)
    waiting_s = sum(rise(evidence.counter(name), episode, np.nanmean) for name in ("queued_s", "exposed_queued_s"))
    queued_s = HELD_QUEUED_S if throttled_s > OF_NOISE * episode.excess else QUEUED_S
    waits_no_longer = waiting_s + throttled_s <= OF_NOISE * episode.excess  # False if the value is unknown
    if not waits_no_longer and not _is_queued_in_transit(evidence, paths, queued_s):
        return None
    if losing is None and _answers_later(evidence, episode, paths):
        return _delayed(evidence, episode, paths)
    measured = [path for path in paths if path.rate > 0 and path.usual_rate > 0]
    worst = min(measured, key=lambda path: path.rate / path.usual_rate, default=None)
    if worst is None and not evidence.link_changes and not evidence.on_accelerator:
        return None
    text = f"exchanges take {episode.excess * 1e3:.3g} ms longer per step, even on the rank that waits least"

    def slowness(path: Path) -> float:
        return path.usual_rate / path.rate if path in measured else 0.0

    return _verdict(evidence, episode, "narrow_link", worst, paths, slowness, text)


def _losing(paths: Sequence[Path]) -> Path | None:
    """Return the path with the most retransmitted segments, preferring paths with two known ends; None if there are too
    few retransmissions."""
    resent = sum(path.resent for path in paths)
    segments = sum(path.segments for path in paths)
    is_lossy = resent >= LOST_SEGMENTS and resent > LOST * segments
    known = [path for path in paths if path.ranks[0] != path.ranks[1] and path.resent > 0]
    return max(known or paths, key=lambda path: path.resent) if is_lossy else None


def _delays(evidence: RunEvidence, transfer_s: Figures, step_s: Figures) -> list[RunVerdict]:
    """Return a verdict on a link whose delay is below the noise of the transfers. The small exchange at the end of each
    step shows the delay; its cost is the increase in the time of all transfers. Links within a node have no such delay.
    Ranks that are throttled by a quota also answer late, but not because of a link."""
    # Latencies within a node are caused by processors, not by links.
    if len(set(evidence.nodes)) == 1:
        return []
    agreed_s = over_all_ranks(evidence.counter("agreed_s"), np.nanmin)
    latency_s = np.where(np.isfinite(agreed_s), agreed_s, np.nanmedian(agreed_s))
    usual_s = float(usual(latency_s))
    usual_step_s = float(usual(step_s))
    least_s = max(LATER_S, LATER * usual_s, NOISE_FACTOR * float(deviation(latency_s)))
    limit = np.full(len(step_s), least_s)
    verdicts = []
    for episode in find_episodes(latency_s - usual_s, limit, step_s, LONG_STEPS_S):
        outside_s = np.delete(transfer_s, np.arange(episode.first, episode.last + 1))
        longer_s = float(np.median(transfer_s[episode.where]) - np.median(outside_s)) if len(outside_s) else 0.0
        priced = replace(episode, excess=max(longer_s, episode.excess))
        paths = paths_of(evidence.connections, episode)
        is_held = rise(evidence.counter("throttled_s"), episode, np.nanmax) > OF_NOISE * episode.excess
        is_felt = priced.excess > DELAY_SHARE * usual_step_s and episode.steadiness >= STEADY and not is_held
        if is_felt and _losing(paths) is None and _answers_later(evidence, episode, paths):
            verdicts.append(_delayed(evidence, priced, paths))
    return [one for one in verdicts if one is not None]


def _latency_s(evidence: RunEvidence, episode: Episode) -> tuple[float, float]:
    """Return (additional time in an episode, usual time) of the small exchange at the end of a step, measured on the
    rank that enters it last."""
    agreed_s = over_all_ranks(evidence.counter("agreed_s"), np.nanmin)
    return rise(evidence.counter("agreed_s"), episode, np.nanmin), float(np.nan_to_num(np.nanpercentile(agreed_s, 25)))


def _answers_later(evidence: RunEvidence, episode: Episode, paths: Sequence[Path]) -> bool:
    """Return whether the latency has grown by more than the queue of a narrow link could explain."""
    latency_s, usual_s = _latency_s(evidence, episode)
    # A delay lengthens the small exchange by at least half of the increase in round-trip time, whereas the queue of a
    # narrow link has drained before that exchange.
    one_way_s = max((path.rtt_s - path.usual_rtt_s for path in paths), default=0.0) / 2
    if not paths:
        # Without connections, compare with the large exchanges of the link samples: a delay lengthens the small
        # exchange by a larger factor than the large ones, and a narrow link does the opposite.
        factors = [one.before_bytes_per_s / one.now_bytes_per_s for one in _slowdowns(evidence, episode)]
        if latency_s + usual_s < OF_LARGE * usual_s * max(factors, default=0.0):
            return False
    return latency_s > max(LATER_S, LATER * usual_s, one_way_s)


def _delayed(evidence: RunEvidence, episode: Episode, paths: Sequence[Path]) -> RunVerdict | None:
    """Return a verdict on a link whose latency has grown; None if round-trip times do not confirm it."""
    latency_s, usual_s = _latency_s(evidence, episode)
    worst = max(paths, key=lambda path: path.rtt_s - path.usual_rtt_s, default=None)
    # Ranks that wait for a processor also delay exchanges. That time is not due to the link.
    names = ("queued_s", "exposed_queued_s")
    queued_s = sum(float(np.nan_to_num(evidence.counter(name)[episode.where]).mean()) for name in names)
    step_s = float(evidence.part(*evidence.parts_s)[episode.where].mean())
    is_loaded = queued_s > LOADED * step_s
    crosses = worst is not None and len(set(_ends(evidence, worst))) > 1
    round_trips = 2 * (evidence.ranks - 1) if crosses and not is_loaded else 1  # as in a ring's small all-reduce
    shows_rtt = worst is not None and round_trips * (worst.rtt_s - worst.usual_rtt_s) >= OF_RTT * latency_s
    # Round-trip times are no evidence if a relay sends the acknowledgements instead of the other end, or if
    # accelerators communicate over connections that are not counted.
    may_hide_rtt = any(len(set(path.ranks)) == 1 for path in paths) or (evidence.on_accelerator and not paths)
    if not shows_rtt and (is_loaded or not may_hide_rtt):
        return None
    now_s = latency_s + usual_s
    text = f"the small exchange that ends each step takes {now_s * 1e3:.3g} ms, {usual_s * 1e3:.3g} usually"
    return _verdict(evidence, episode, "delayed_link", worst, paths, lambda path: path.rtt_s - path.usual_rtt_s, text)


def _verdict(
    evidence: RunEvidence,
    episode: Episode,
    cause: Cause,
    worst: Path | None,
    paths: Sequence[Path],
    badness: Callable[[Path], float],
    text: str,
) -> RunVerdict:
    sentences = [text, f"since then the transfers of a step take {episode.excess * 1e3:.3g} ms longer"]
    link: tuple[int, ...] | None = None
    if worst is not None:
        link = worst.ranks
        if cause == "narrow_link":
            sentences.append(
                f"ranks {_names(worst.ranks)} exchange {worst.rate / 1e6:.3g} MB/s, "
                f"{worst.usual_rate / 1e6:.3g} at other times"
            )
        elif cause == "delayed_link":
            sentences.append(f"round trips between ranks {_names(worst.ranks)} take {worst.rtt_s * 1e3:.3g} ms")
    slowdowns = _slowdowns(evidence, episode)
    if slowdowns and link is None:
        slowest = max(slowdowns, key=lambda one: one.before_bytes_per_s / one.now_bytes_per_s)
        link = slowest.ranks
        sentences.append(f"the {slowest.axis} exchanges of ranks {_names(link)} have become slower")
    node = _node_of(evidence, paths, badness)
    found = verdict_of(evidence, episode, cause, *sentences, node=node, link=link)
    # Load on the machine may hide the cost of lost segments, so also check whether the newest steps still lose some.
    loses_still = cause == "lossy_link" and _resent(evidence)[-RECENT_STEPS:].sum() >= 1
    return replace(found, until_step=None) if loses_still else found


def _slowdowns(evidence: RunEvidence, episode: Episode) -> list[LinkEvent]:
    """Return the links that became slower in an episode or, if no link's change was measured then, at any time."""
    begun = int(evidence.steps[max(0, episode.first - 1)])
    until = int(evidence.steps[episode.last])
    changes = [one for one in evidence.link_changes if begun <= one.since_step <= until] or evidence.link_changes
    return [one for one in changes if one.now_bytes_per_s < one.before_bytes_per_s]


def _resent(evidence: RunEvidence) -> Figures:
    """Return the number of retransmitted segments, summed over all connections, (T,)."""
    whole: Figures = np.sum([np.nan_to_num(one.resent) for one in evidence.connections], axis=0)
    return whole


def _always_lossy(evidence: RunEvidence, transfer_s: Figures, step_s: Figures) -> list[RunVerdict]:
    """Return a verdict on a link that has been losing segments from the start, so that no change over time reveals
    it."""
    if not len(step_s):
        return []
    first = int(np.argmax(_resent(evidence) > 0)) if evidence.connections else 0
    whole = Episode(first, len(step_s) - 1, float(np.median(transfer_s[first:])), 1.0)
    paths = paths_of(evidence.connections, whole)
    worst = max(paths, key=lambda path: path.resent, default=None)
    is_costly = whole.excess > LEAST_SHARE * float(usual(step_s))
    if worst is None or not is_costly or worst.resent < 4 * max(LOST_SEGMENTS, LOST * worst.segments):
        return []
    text = f"{worst.resent / worst.segments:.2%} of segments between ranks {_names(worst.ranks)} were retransmitted"
    return [_verdict(evidence, whole, "lossy_link", worst, paths, lambda path: path.resent, text)]


def _node_of(evidence: RunEvidence, paths: Sequence[Path], badness: Callable[[Path], float]) -> int | None:
    """Return the node that all bad paths have in common, provided that paths between other nodes are good."""
    nodes = sorted(set(evidence.nodes))
    between = [path for path in paths if _ends(evidence, path)[0] != _ends(evidence, path)[1]]
    # With two nodes, every path between nodes involves both, so neither can be singled out.
    if len(nodes) < 3 or not between:
        return None
    with_node = {node: [badness(path) for path in between if node in _ends(evidence, path)] for node in nodes}
    without = {node: [badness(path) for path in between if node not in _ends(evidence, path)] for node in nodes}
    for node in nodes:
        if with_node[node] and without[node] and min(with_node[node]) > 2 * max(max(without[node]), 0.0):
            return node
    return None


def _ends(evidence: RunEvidence, path: Path) -> Pair:
    return evidence.nodes[path.ranks[0]], evidence.nodes[path.ranks[1]]


def _names(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))


def find_retries(evidence: RunEvidence, steps_s: Mapping[int, float]) -> list[RunVerdict]:
    """Return a verdict if exchanges between replica groups failed and were repeated. `steps_s`: durations of these
    steps."""
    if not evidence.retried_steps:
        return []
    first = min(evidence.retried_steps)
    last = max(evidence.retried_steps)
    lost_s = sum(steps_s.get(step, 0.0) for step in evidence.retried_steps)
    return [
        RunVerdict(
            cause="network_timeouts",
            since_step=first,
            until_step=last,
            cost_s=lost_s / (last - first + 1),
            confidence=0.9,
            evidence=(
                f"{len(evidence.retried_steps)} steps were repeated because an exchange had failed, although all "
                "replica groups were still present",
            ),
        )
    ]
