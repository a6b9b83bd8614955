"""What the connections between two ranks show in an episode, and by how much counters of all ranks rise in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainspec_cli.report.diagnosis.episodes import Episode
from trainspec_cli.report.diagnosis.evidence import Connection, Figures

OVERFLOW, QUEUED_S, QUEUED = 0.05, 2e-3, 4.0
"""A queue before a narrow link drops what it cannot hold: no larger part of the segments, while round trips take so
much longer and so many times as long as usual. A link that loses segments has no queue."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Path:
    """The connections between two ranks, both ways, in an episode."""

    ranks: Pair
    resent: float
    resent_later: float
    """Of them those of the episode's later half."""
    segments: float
    segments_later: float
    timeouts: float
    rate: float
    """Bytes a second while anything was under way; 0 where it is not known."""
    usual_rate: float
    """The same at other times."""
    rtt_s: float
    usual_rtt_s: float

    def has_queue(self, least_s: float = QUEUED_S) -> bool:
        """Return whether what is sent waits on its way: round trips take far longer than at other times, and `least_s`
        longer."""
        return self.rtt_s > max(self.usual_rtt_s + least_s, QUEUED * self.usual_rtt_s)

    @property
    def overflows(self) -> bool:
        """Whether what was sent again was dropped by a queue that is full: TCP fills it to find the link's rate, and
        fills it most while the link has just become narrow."""
        of_later = self.resent_later <= OVERFLOW * self.segments_later
        return self.has_queue() and (of_later or self.resent <= OVERFLOW * self.segments)


def paths_of(connections: Sequence[Connection], episode: Episode) -> list[Path]:
    of_pair: dict[Pair, list[Connection]] = defaultdict(list)
    for connection in connections:
        first, second = sorted(connection.ranks)
        of_pair[first, second].append(connection)
    return [_path(ranks, of_pair[ranks], episode) for ranks in sorted(of_pair)]


def _path(ranks: Pair, connections: Sequence[Connection], episode: Episode) -> Path:
    inside = np.zeros(len(connections[0].sent_bytes), dtype=bool)
    inside[episode.where] = True
    later = inside.copy()
    # A narrow link drops most while TCP still looks for its rate; a lossy one goes on losing.
    later[: episode.first + episode.steps // 2] = False

    def total(name: str, where: Figures | np.ndarray = inside) -> float:
        return float(sum(np.nansum(getattr(one, name)[where]) for one in connections))

    def median_rtt_s(where: np.ndarray) -> float:
        seen = np.concatenate([one.rtt_s[where] for one in connections])
        return float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0

    def rate(where: np.ndarray) -> float:
        busy_s = total("busy_s", where)
        return total("sent_bytes", where) / busy_s if busy_s > 0 else 0.0

    return Path(
        ranks,
        total("resent"),
        total("resent", later),
        max(1.0, total("segments")),
        max(1.0, total("segments", later)),
        total("timeouts"),
        rate(inside),
        rate(~inside),
        median_rtt_s(inside),
        median_rtt_s(~inside),
    )


def rise(series: Figures, episode: Episode, over_ranks: Callable[..., Figures]) -> float:
    """Return by how much a counter of all ranks is above its usual level in an episode; 0 where it is not known."""
    whole = over_all_ranks(series, over_ranks)
    inside = whole[episode.where]
    if not np.isfinite(inside).any():
        return 0.0
    return float(np.nanmedian(inside) - np.nanpercentile(whole, 25))


def over_all_ranks(series: Figures, over_ranks: Callable[..., Figures]) -> Figures:
    """Return a counter (T,) over all ranks; NaN where a rank's is not known, 0 throughout where none is."""
    if not np.isfinite(series).any():
        return np.zeros(len(series))
    whole = np.full(len(series), np.nan)
    known = np.isfinite(series).any(axis=1)
    whole[known] = over_ranks(series[known], axis=1)
    return whole
