"""The meeting of the sites: who is part of a round, whose work is merged, and which samples everybody takes until the
next one. It decides on plain numbers; `now_s` is any clock that does not go back.

| a site | what follows |
|---|---|
| contributes within the grace time | its work is merged |
| is connected, but late | it stays a member: what it has learned comes with its next contribution |
| is late twice in a row, or not connected | it is lost: the others take the samples that were not merged |
| comes back | it follows the rounds without training, and is a member again from the next one on |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainspec_cli.wings.sites.decisions.outer import site_weights
from trainspec_cli.wings.sites.decisions.round import Contribution, RoundRecord, SitePieces
from trainspec_cli.wings.sites.decisions.samples import Piece, paced_batches, plan_pieces
from trainspec_cli.wings.sites.decisions.schedule import BEGINNING, SiteSchedule

LOST_AFTER = 2
"""A site that is connected and late so many rounds in a row is lost."""


@dataclass(frozen=True)
class MeetingRules:
    sites: int
    """Sites that the run begins with."""
    quorum: int
    """The least number of sites whose work makes a round."""
    grace_s: float
    """A round that has its quorum waits so long for sites that are connected."""
    return_s: float
    """A meeting that begins again waits so long for its members to connect, and not for those that leave it later."""
    change: float
    """Sites whose steps differ by no more than this fraction are equally fast."""


@dataclass(frozen=True)
class MeetingState:
    """All that a meeting needs to begin again where it ended."""

    round: int = -1
    """The newest one that was decided."""
    position: int = 0
    """The next sample that nobody has been given."""
    left: tuple[Piece, ...] = ()
    """Samples that lost sites have left."""
    records: tuple[RoundRecord, ...] = ()
    """The newest ones."""
    merged_at: tuple[tuple[int, int], ...] = ()
    """(site, step up to which its samples are in work that was merged)"""
    misses: tuple[tuple[int, int], ...] = ()
    """(site, rounds in a row for which it was late)"""


@dataclass
class Meeting:
    rules: MeetingRules
    schedule: SiteSchedule
    state: MeetingState = field(default_factory=MeetingState)
    connected: dict[int, int] = field(default_factory=dict)
    """Samples of a step, by site."""
    seen: set[int] = field(default_factory=set)
    """Sites that have been connected since the meeting began, or began again."""
    ready: dict[int, int] = field(default_factory=dict)
    """The round up to which a site that comes back has followed."""
    came: dict[int, Contribution] = field(default_factory=dict)
    """The contributions to the next round."""
    opened_s: float | None = None
    quorum_since_s: float | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self.state.records[-1].members if self.state.records else ()

    @property
    def is_over(self) -> bool:
        return bool(self.state.records) and self.state.records[-1].following is None

    @property
    def oldest_round(self) -> int:
        """Return the oldest round whose record is still known."""
        return self.state.records[0].round if self.state.records else 0

    # What happens

    def connect(self, site: int, batch: int) -> bool:
        """Note that a site is there; return whether it goes on as a member. Else it has to follow, and to be ready."""
        self.connected[site] = batch
        self.seen.add(site)
        return site in self.members or self.state.round < 0

    def disconnect(self, site: int) -> None:
        self.connected.pop(site, None)
        self.ready.pop(site, None)

    def contribute(self, site: int, number: int, contribution: Contribution) -> bool:
        """Return whether the contribution counts: it is for the next round, and by a member."""
        counts = number == self.state.round + 1 and site in self.members
        if counts:
            self.came[site] = contribution
        return counts

    def follow(self, site: int, number: int) -> None:
        """A site that is no member has applied all rounds up to `number`."""
        if site not in self.members:
            self.ready[site] = number

    # What is decided

    def decide(self, now_s: float) -> RoundRecord | None:
        """Return the record of the next round, where it is time for it."""
        self.opened_s = now_s if self.opened_s is None else self.opened_s
        if self.is_over or not self._is_time(now_s):
            return None
        number = self.state.round + 1
        record = self._begin() if number == 0 else self._merge()
        self.came, self.quorum_since_s = {}, None
        return record

    def _is_time(self, now_s: float) -> bool:
        if self.state.round < 0:
            return len(self.connected) >= self.rules.sites
        if len(self.came) < self._least:
            self.quorum_since_s = None
            return False
        if self.quorum_since_s is None:
            self.quorum_since_s = now_s
        missing = set(self.members) - self.came.keys()
        assert self.opened_s is not None, "it is set above"
        returning = now_s < self.opened_s + self.rules.return_s
        if returning and missing - self.seen:
            return False
        return not missing & self.connected.keys() or now_s >= self.quorum_since_s + self.rules.grace_s

    @property
    def _least(self) -> int:
        return min(self.rules.quorum, len(self.members))

    def _begin(self) -> RoundRecord:
        record = RoundRecord(BEGINNING, self.schedule.after(BEGINNING))
        return self._record(record, dict(self.connected), {})

    def _merge(self) -> RoundRecord:
        exchange = self.state.records[-1].following
        assert exchange is not None, "the meeting is not over"
        included = tuple(sorted(self.came))
        work = [self.came[site] for site in included]
        misses = {site: dict(self.state.misses).get(site, 0) + 1 for site in self.members if site not in included}
        lost = {site for site, count in misses.items() if site not in self.connected or count >= LOST_AFTER}
        joined = {site for site, at in self.ready.items() if at == self.state.round and site in self.connected}
        for site in joined:
            del self.ready[site]
        batches = {site: self._batch(site) for site in {*self.members, *joined} - lost}
        record = RoundRecord(
            exchange,
            self.schedule.after(exchange),
            included,
            site_weights([one.tokens for one in work], [one.steps for one in work]),
            lost=tuple(sorted(lost)),
            joined=tuple(sorted(joined)),
            diverged=_differing({site: self.came[site].digests for site in included}),
        )
        return self._record(record, batches, misses)

    def _batch(self, site: int) -> int:
        """Return what a site takes at most; one that has left since it contributed is found lost in the next round."""
        return self.connected.get(site) or max(samples for _, samples in self.state.records[-1].pieces(site))

    def _record(self, record: RoundRecord, batches: Mapping[int, int], misses: Mapping[int, int]) -> RoundRecord:
        """Plan the window after a round, and note the round as decided."""
        state, window = self.state, record.window
        merged_at = {**dict.fromkeys((*batches, *record.joined), 0), **dict(state.merged_at)}
        merged_at |= dict.fromkeys(record.included, record.exchange.sent_at)
        left = [*state.left, *(piece for site in record.lost for piece in self._unmerged(site, merged_at[site]))]
        rates = {site: one.rate for site, one in self.came.items()}
        paced = paced_batches(batches, rates, self.rules.change)
        pieces, position, rest = plan_pieces(len(window), paced, state.position, left)
        merged_at |= dict.fromkeys(record.joined, window.start)
        record = replace(record, windows=tuple(SitePieces(site, own) for site, own in sorted(pieces.items())))
        self.state = replace(
            state,
            round=record.round,
            position=position,
            left=rest,
            records=(*state.records, record),
            merged_at=tuple(sorted(merged_at.items())),
            misses=tuple((site, count) for site, count in sorted(misses.items()) if site in batches),
        )
        return record

    def _unmerged(self, site: int, merged_at: int) -> Iterable[Piece]:
        """Return what a site was given for the steps after `merged_at`."""
        for record in self.state.records:
            if site in record.members:
                pieces = zip(record.window, record.pieces(site), strict=True)
                yield from (piece for step, piece in pieces if step >= merged_at)

    def forget(self, before: int) -> None:
        """Forget the records of rounds before `before`, but for those whose samples are not merged yet."""
        needed = min((at for site, at in self.state.merged_at if site in self.members), default=0)
        kept = tuple(
            record
            for record in self.state.records
            if record.round >= min(before, self.state.round) or record.window.stop > needed
        )
        self.state = replace(self.state, records=kept)


def _differing(digests: Mapping[int, Sequence[str]]) -> tuple[int, ...]:
    """Return the sites that differ from the majority; where there is none (of two sites), all of them."""
    usual = Counter(tuple(own) for own in digests.values()).most_common(2)
    if len(usual) < 2:
        return ()
    (most, count), (_, others) = usual
    return tuple(sorted(site for site, own in digests.items() if tuple(own) != most or count == others))
