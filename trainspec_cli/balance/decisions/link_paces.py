"""How many times as long as usual exchanges take over each rank's links, inside scale-up domains and between them.

A narrow link is taken to be a rank's own way to the others, which its exchanges along all axes share: an exchange is
as slow as the narrowest of its ranks' ways, and a rank is not narrow that also takes part in one as fast as usual. What
is usual is learnt as for computing (`paces.py`): once for each layout, from the links of an axis in one pipeline stage
together, with what was known of the ranks before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from trainspec_cli.balance.decisions.links import LARGE, OTHER_SIZE
from trainspec_cli.balance.decisions.speeds import NOISE_FACTOR
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.links import MeasuredLink


@dataclass(frozen=True)
class LinkPaces:
    """How many times as long as usual exchanges take in which each global rank takes part; 1 for what is usual, and
    what is not known."""

    scaleup: tuple[float, ...]
    """Paces of exchanges inside a scale-up domain."""
    network: tuple[float, ...]
    """Paces of exchanges between domains."""

    @property
    def is_usual(self) -> bool:
        return set(self.scaleup) | set(self.network) == {1.0}


class LinkPaceTracker:
    def __init__(self, change: float, domain_ranks: int):
        """`change`: a link that is slower than usual by no more than this fraction is as fast as usual.
        `domain_ranks`: so many neighbouring ranks share a scale-up domain."""
        self._change, self._domain_ranks = change, domain_ranks
        self._layout: Layout | None = None
        self._usual: dict[tuple[str, int], Usual] = {}
        """The usual speed of the links of an axis in a pipeline stage."""
        self._paces: dict[tuple[bool, int], float] = {}
        """Paces by whether an exchange is between domains, and by rank."""

    def note(self, layout: Layout, links: Sequence[MeasuredLink]) -> LinkPaces:
        """Take in how fast links are; ranks none of whose links are among them have those that they had."""
        if layout != self._layout:
            self._layout, self._usual = layout, {}
        kinds: defaultdict[tuple[str, int], list[MeasuredLink]] = defaultdict(list)
        for link in links:
            kinds[link.axis, link.ranks[0] * layout.pp // layout.world_size].append(link)
        shown: defaultdict[tuple[bool, int], list[tuple[float, float]]] = defaultdict(list)
        for kind, alike in kinds.items():
            usual = self._usual_of(kind, alike)
            for link in filter(usual.is_comparable, alike):
                for rank in link.ranks:
                    shown[self._is_between(link), rank].append((link.sent_bytes, self._pace(link, usual)))
        for place, of_rank in shown.items():
            # A rank's own pace is the least, since in its other exchanges another rank may be the narrow one. Small
            # exchanges show the latency more than the bandwidth.
            largest_bytes = max(sent_bytes for sent_bytes, _ in of_rank)
            self._paces[place] = min(pace for sent_bytes, pace in of_rank if sent_bytes >= LARGE * largest_bytes)
        scaleup, network = (
            tuple(self._paces.get((between, rank), 1.0) for rank in range(layout.world_size))
            for between in (False, True)
        )
        return LinkPaces(scaleup, network)

    def _usual_of(self, kind: tuple[str, int], links: Sequence[MeasuredLink]) -> Usual:
        """Return how fast links of a kind usually are, learnt when they are seen for the first time, or with exchanges
        of another size."""
        usual, middle = self._usual.get(kind), sorted(links, key=lambda link: link.sent_bytes)[len(links) // 2]
        if usual is None or not usual.is_comparable(middle):
            alike = filter(Usual(0.0, middle.sent_bytes).is_comparable, links)
            # A link known to be narrow counts at the speed that it would have if it were not.
            known = (
                (link, max(self._paces.get((self._is_between(link), rank), 1.0) for rank in link.ranks))
                for link in alike
            )
            rate = median_high(link.bytes_per_s * pace for link, pace in known)
            usual = self._usual[kind] = Usual(rate, middle.sent_bytes)
        return usual

    def _pace(self, link: MeasuredLink, usual: Usual) -> float:
        pace = usual.bytes_per_s / link.bytes_per_s
        return pace if pace - 1 > max(self._change, NOISE_FACTOR * link.noise) else 1.0

    def _is_between(self, link: MeasuredLink) -> bool:
        return len({rank // self._domain_ranks for rank in link.ranks}) > 1


@dataclass(frozen=True)
class Usual:
    bytes_per_s: float
    sent_bytes: float

    def is_comparable(self, link: MeasuredLink) -> bool:
        """Return whether a link's exchanges are as large: smaller ones, of ranks with fewer samples, are slower."""
        return abs(link.sent_bytes - self.sent_bytes) <= OTHER_SIZE * self.sent_bytes
