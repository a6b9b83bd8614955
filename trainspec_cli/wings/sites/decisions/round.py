"""A round of the sites: what each of them says for it, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.wings.sites.decisions.samples import Piece
from trainspec_cli.wings.sites.decisions.schedule import SiteExchange


@dataclass(frozen=True)
class Contribution:
    """What a site says of the outer gradient that it sends."""

    tokens: int
    """Trained since its work on the same fragments was merged last."""
    steps: int
    rate: float
    """Samples that it computes a second; 0 where nothing is to follow from that."""
    digests: tuple[str, ...]
    """Of the shared weights on each of its ranks, after the round before."""
    saved_round: int
    """The newest round that its newest checkpoint has applied: a new start asks for those after it."""


@dataclass(frozen=True)
class SitePieces:
    site: int
    pieces: tuple[Piece, ...]
    """The samples of each step, as (first position, samples)."""


@dataclass(frozen=True)
class RoundRecord:
    """The decision of a round, the same for all sites."""

    exchange: SiteExchange
    """The one that it is about."""
    following: SiteExchange | None
    """The next one; None after the last."""
    included: tuple[int, ...] = ()
    """The sites whose work is merged."""
    weights: tuple[float, ...] = ()
    """Those of their outer gradients."""
    windows: tuple[SitePieces, ...] = ()
    """Of the members: what each takes in the steps of `window`."""
    lost: tuple[int, ...] = ()
    """Sites that are members no more."""
    joined: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()
    """Sites whose shared weights differ from the others'; the run ends."""

    @property
    def round(self) -> int:
        return self.exchange.round

    @property
    def window(self) -> range:
        """Return the steps between the application of this round and that of the next: those that it plans."""
        begin = self.exchange.applied_at
        return range(begin, self.following.applied_at if self.following else begin)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(window.site for window in self.windows)

    def pieces(self, site: int) -> tuple[Piece, ...]:
        return next(window.pieces for window in self.windows if window.site == site)
