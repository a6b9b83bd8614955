"""Rounds as they arrive at a rank: decisions by the meeting point, and outer gradients by whichever way they come.

A decision names each outer gradient by its digest, so that all sites merge the same bytes: a site that has started
again may have sent two for one round. What is held under another digest, or not at all, is lacking.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainspec_cli.wings.sites.decisions.round import RoundRecord

HELD_ROUNDS = 4
"""Outer gradients of so many rounds after the newest one that was taken are held before their decision comes."""


@dataclass
class _Arriving:
    record: RoundRecord | None = None
    digests: dict[int, str] = field(default_factory=dict)
    """Of the outer gradients that are merged, by site."""
    decided: dict[int, bytes] = field(default_factory=dict)
    """Outer gradients that have come with the decision, or after it by the meeting point."""
    early: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """Those that have come before it, or directly, with their digests."""

    def lacking(self) -> tuple[int, ...]:
        assert self.record is not None, "the round is decided"
        return tuple(site for site in self.record.included if not self._is_there(site))

    def _is_there(self, site: int) -> bool:
        return site in self.decided or (site in self.early and self.early[site][0] == self.digests.get(site))


class ArrivingRounds:
    """Its methods may be called by several threads."""

    def __init__(self, site: int, taken: int):
        """`site` is this one; `taken` the newest round that it has applied."""
        self._site, self._taken = site, taken
        self._rounds: dict[int, _Arriving] = {}
        self._lock = threading.Lock()

    def hold(self, number: int, site: int, content: bytes) -> None:
        """Hold an outer gradient that has come before its round is decided, or beside that."""
        digest = hashlib.sha256(content).hexdigest()
        with self._lock:
            if self._taken < number <= self._taken + HELD_ROUNDS:
                # this site's own are held by the training: their digest is enough
                self._at(number).early[site] = digest, b"" if site == self._site else content

    def decide(self, record: RoundRecord, digests: Sequence[str], parts: Mapping[int, bytes]) -> None:
        """Note a decision. `parts`: outer gradients that have come with it; `digests`: of all of the round."""
        with self._lock:
            if record.round <= self._taken:
                return
            arriving = self._at(record.round)
            if arriving.record is None:
                arriving.record, arriving.digests = record, dict(zip(record.included, digests, strict=False))
            arriving.decided |= parts

    def lacking(self) -> dict[int, tuple[int, ...]]:
        """Return the sites whose outer gradients are lacking, by round that is decided."""
        with self._lock:
            decided = {number: one.lacking() for number, one in self._rounds.items() if one.record}
            return {number: sites for number, sites in decided.items() if sites}

    def has(self, number: int) -> bool:
        """Return whether a round is decided, and nothing is lacking of it."""
        with self._lock:
            arriving = self._rounds.get(number)
            return arriving is not None and arriving.record is not None and not arriving.lacking()

    def take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, and the outer gradients by site; those before it are forgotten.

        That of this site is there where another one was merged than this start of it has sent.
        """
        with self._lock:
            found = self._rounds[number]
            assert found.record is not None, "the round is decided"
            self._taken = number
            self._rounds = {later: one for later, one in self._rounds.items() if later > number}
            early = {site: content for site, (_, content) in found.early.items() if site != self._site}
            parts = {**early, **found.decided}
            return found.record, {site: parts[site] for site in found.record.included if site in parts}

    def _at(self, number: int) -> _Arriving:
        return self._rounds.setdefault(number, _Arriving())
