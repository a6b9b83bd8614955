"""Decisions about rounds: which sites take part, whose work is merged, and which samples each site takes until the next
round. The decisions use only plain numbers; `now_s` is the time of any monotonic clock.

| a site | consequence |
|---|---|
| contributes within the grace time | its work is merged |
| is connected, but late | it stays a member, and its work is merged with its next contribution |
| is late twice in a row, or not connected | it is lost: the others take the samples that were not merged |
| returns | it follows the rounds without training, and is a member again from the next one on |

A round is one exchange plus the decision that holds until the next one. Its record plans the steps until then: for each
step and site, it contains one contiguous range of data positions, so all sites together take every position once.

Each exchange sends one fragment of the model, in turn (Streaming DiLoCo, arXiv:2501.18512, section 2). Steps count
updates: an exchange sent at step 50 sends the weights after update 50. Each exchange is derived from the previous one,
so it is the same at every site.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainspec_cli.recipe.records import canonical_json, to_plain
from trainspec_cli.recipe.results.plan import Plan


@dataclass(frozen=True)
class SiteExchange:
    """One exchange between the sites."""

    round: int
    """1, 2, ... Round 0 exchanges nothing and starts the run."""
    fragments: tuple[int, ...]
    sent_at: int
    """Number of updates after which the outer gradients are sent."""
    applied_at: int
    """Number of updates after which their sum is applied."""


BEGINNING = SiteExchange(0, (), 0, 0)


@dataclass(frozen=True)
class SiteSchedule:
    """The exchanges of a run. The last exchange, after the last step, contains all fragments and is applied
    immediately, so all sites end with the same weights."""

    total_steps: int
    interval_steps: int
    """Number of steps between two exchanges of a fragment (H); a multiple of the number of fragments."""
    fragments: int
    delay_steps: int
    """Number of steps between sending outer gradients and applying their sum (tau). At most the number of steps between
    two exchanges."""

    def after(self, exchange: SiteExchange) -> SiteExchange | None:
        """Return the exchange after `exchange`; None after the last one. `exchange` must be applied before the next one
        is sent."""
        if exchange.sent_at == self.total_steps:
            return None
        number = exchange.round + 1
        sent_at = max(exchange.sent_at + self.interval_steps // self.fragments, exchange.applied_at)
        if sent_at >= self.total_steps:
            return SiteExchange(number, tuple(range(self.fragments)), self.total_steps, self.total_steps)
        applied_at = min(sent_at + self.delay_steps, self.total_steps)
        return SiteExchange(number, (exchange.round % self.fragments,), sent_at, applied_at)


def newest_applied(applied: Iterable[SiteExchange], step: int) -> int:
    """Return the newest applied round that a checkpoint of `step` is certain to contain. A round applied exactly at
    this step may be missing, so it does not count."""
    return max((exchange.round for exchange in applied if exchange.applied_at < step), default=0)


Piece = tuple[int, int]
"""A contiguous range of samples: (first position, number of samples)"""


def plan_pieces(
    steps: int, batches: Mapping[int, int], position: int, left: Sequence[Piece]
) -> tuple[dict[int, tuple[Piece, ...]], int, tuple[Piece, ...]]:
    """Plan `steps` steps for sites with these batch sizes. Return (pieces by site, next position, remaining pieces).

    Pieces in `left` are taken first. If such a piece is smaller than the site's batch, the step is smaller too."""
    waiting = list(left)
    pieces: dict[int, list[Piece]] = {site: [] for site in batches}
    for _ in range(steps):
        for site, samples in sorted(batches.items()):
            if waiting:
                start, rest = waiting.pop(0)
                taken = min(samples, rest)
                if rest > taken:
                    waiting.insert(0, (start + taken, rest - taken))
            else:
                start = position
                taken = samples
                position += samples
            pieces[site].append((start, taken))
    return {site: tuple(own) for site, own in pieces.items()}, position, tuple(waiting)


def paced_batches(batches: Mapping[int, int], rates: Mapping[int, float], change: float) -> dict[int, int]:
    """Return the batch sizes that make all sites take the same time for a step.

    `batches`: largest batch of each site. `rates`: samples per second, 0 if unknown. A site gets a smaller batch, of at
    least one sample, if its step takes more than 1 + `change` times as long as the fastest site's step."""
    takes_s = {site: batches[site] / rates[site] for site in batches if rates.get(site, 0.0) > 0}
    fastest_s = min(takes_s.values(), default=0.0)
    slow = {site for site, step_s in takes_s.items() if step_s > fastest_s * (1 + change)}
    return {site: max(1, int(rates[site] * fastest_s)) if site in slow else size for site, size in batches.items()}


def site_weights(tokens: Sequence[int], steps: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each site's outer gradient; the weights sum to 1.

    The weight is tokens^2 / steps (Decoupled DiLoCo, arXiv:2604.21428): with equal numbers of steps, a site is weighted
    by the square of its batch size. A site that has not trained since it last contributed has weight 0. If no site has
    trained, all weights are equal."""
    worth = [seen * seen / made if made else 0.0 for seen, made in zip(tokens, steps, strict=True)]
    total = sum(worth)
    return tuple(one / total for one in worth) if total else (1 / len(worth),) * len(worth)


@dataclass(frozen=True)
class Contribution:
    """A site's description of the outer gradient that it sends."""

    tokens: int
    """Number of tokens that the site has trained on since its work on the same fragments was last merged."""
    steps: int
    rate: float
    """Training speed in samples per second; 0 if the batch size should not depend on the speed."""
    digests: tuple[str, ...]
    """Digests of the shared weights after the previous round, for each rank of the site."""
    saved_round: int
    """The newest round in the site's newest checkpoint. After a restart, the site requests later rounds."""


@dataclass(frozen=True)
class SitePieces:
    site: int
    pieces: tuple[Piece, ...]
    """The samples of each step, as (first position, number of samples)."""


@dataclass(frozen=True)
class RoundRecord:
    """A round's decision, which is the same for all sites."""

    exchange: SiteExchange
    """The exchange that this round decides on."""
    following: SiteExchange | None
    """The next exchange; None after the last one."""
    included: tuple[int, ...] = ()
    """The sites whose work is merged."""
    weights: tuple[float, ...] = ()
    """The weight of each included site's outer gradient."""
    windows: tuple[SitePieces, ...] = ()
    """Each member's samples for the steps of `window`."""
    lost: tuple[int, ...] = ()
    """Sites that cease to be members with this round."""
    joined: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()
    """Sites whose shared weights differ from those of the other sites. If there are any, the run ends."""

    @property
    def round(self) -> int:
        return self.exchange.round

    @property
    def window(self) -> range:
        """The steps that this round plans, from its application to the application of the next round."""
        begin = self.exchange.applied_at
        return range(begin, self.following.applied_at if self.following else begin)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(window.site for window in self.windows)

    def pieces(self, site: int) -> tuple[Piece, ...]:
        return next(window.pieces for window in self.windows if window.site == site)


LOST_AFTER = 2
"""A connected site is treated as lost after this many consecutive late rounds."""


@dataclass(frozen=True)
class MeetingRules:
    sites: int
    """Number of sites at the start of the run."""
    quorum: int
    """Minimum number of contributing sites needed to complete a round."""
    grace_s: float
    """How many seconds a round that has a quorum waits for connected sites."""
    return_s: float
    """How many seconds a restarted meeting waits for its members to connect."""
    change: float
    """Maximum relative difference between the step times of sites that are treated as equally fast."""


@dataclass(frozen=True)
class MeetingState:
    """The state that a restarted meeting continues from."""

    round: int = -1
    """The newest decided round; -1 before the first decision."""
    position: int = 0
    """The first sample position that has not been assigned to a site yet."""
    left: tuple[Piece, ...] = ()
    """Samples of lost sites that the other sites still have to train on."""
    records: tuple[RoundRecord, ...] = ()
    """Records of the newest rounds."""
    merged_at: tuple[tuple[int, int], ...] = ()
    """(site, step up to which the work on the site's samples was merged)"""
    misses: tuple[tuple[int, int], ...] = ()
    """(site, number of consecutive rounds for which the site was late)"""


@dataclass
class Meeting:
    rules: MeetingRules
    schedule: SiteSchedule
    state: MeetingState = field(default_factory=MeetingState)
    connected: dict[int, int] = field(default_factory=dict)
    """Batch sizes of the connected sites."""
    seen: set[int] = field(default_factory=set)
    """Sites that have connected since the meeting was started or restarted."""
    ready: dict[int, int] = field(default_factory=dict)
    """Returning site -> the newest round that it has applied."""
    came: dict[int, Contribution] = field(default_factory=dict)
    """The contributions that have arrived for the next round, by site."""
    opened_s: float | None = None
    quorum_since_s: float | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self.state.records[-1].members if self.state.records else ()

    @property
    def is_over(self) -> bool:
        return bool(self.state.records) and self.state.records[-1].following is None

    # Events

    def connect(self, site: int, batch: int) -> bool:
        """Record a connected site. Return whether it continues as a member; otherwise it must first follow the
        rounds."""
        self.connected[site] = batch
        self.seen.add(site)
        return site in self.members or self.state.round < 0

    def disconnect(self, site: int) -> None:
        self.connected.pop(site, None)
        self.ready.pop(site, None)

    def contribute(self, site: int, number: int, contribution: Contribution) -> bool:
        """Record a contribution. Return whether it counts: it must be for the next round and from a member."""
        counts = number == self.state.round + 1 and site in self.members
        if counts:
            self.came[site] = contribution
        return counts

    def follow(self, site: int, number: int) -> None:
        """Record that a site that is not a member has applied all rounds up to `number`."""
        if site not in self.members:
            self.ready[site] = number

    # Decisions

    def decide(self, now_s: float) -> RoundRecord | None:
        """Return the record of the next round if it is due."""
        self.opened_s = now_s if self.opened_s is None else self.opened_s
        if self.is_over:
            return None
        if self.state.round < 0:
            if len(self.connected) < self.rules.sites:
                return None
            record = self._record(RoundRecord(BEGINNING, self.schedule.after(BEGINNING)), dict(self.connected), {})
        else:
            if len(self.came) < min(self.rules.quorum, len(self.members)):
                self.quorum_since_s = None
                return None
            if self.quorum_since_s is None:
                self.quorum_since_s = now_s
            missing = set(self.members) - self.came.keys()
            if missing - self.seen and now_s < self.opened_s + self.rules.return_s:
                return None  # the restarted meeting still waits for members to return
            if missing & self.connected.keys() and now_s < self.quorum_since_s + self.rules.grace_s:
                return None
            newest = self.state.records[-1]
            exchange = newest.following
            assert exchange is not None, "the meeting is not over"
            included = tuple(sorted(self.came))
            work = [self.came[site] for site in included]
            misses = {site: dict(self.state.misses).get(site, 0) + 1 for site in self.members if site not in included}
            lost = {site for site, count in misses.items() if site not in self.connected or count >= LOST_AFTER}
            joined = {site for site, at in self.ready.items() if at == self.state.round and site in self.connected}
            for site in joined:
                del self.ready[site]
            batches = {}
            for site in {*self.members, *joined} - lost:
                # A member that left after contributing keeps its samples. The next round declares it lost.
                batches[site] = self.connected.get(site) or max(samples for _, samples in newest.pieces(site))
            # Find the sites whose shared weights differ from those of the majority. Without a majority, all sites count
            # as different.
            digests = {site: self.came[site].digests for site in included}
            usual = Counter(digests.values()).most_common(2)
            differing: tuple[int, ...] = ()
            if len(usual) == 2:
                (most, count), (_, others) = usual
                differing = tuple(site for site, own in digests.items() if own != most or count == others)
            record = RoundRecord(
                exchange,
                self.schedule.after(exchange),
                included,
                site_weights([one.tokens for one in work], [one.steps for one in work]),
                lost=tuple(sorted(lost)),
                joined=tuple(sorted(joined)),
                diverged=differing,
            )
            record = self._record(record, batches, misses)
        self.came = {}
        self.quorum_since_s = None
        return record

    def _record(self, record: RoundRecord, batches: Mapping[int, int], misses: Mapping[int, int]) -> RoundRecord:
        """Plan the window after a round, and record the round as decided."""
        state = self.state
        window = record.window
        merged_at = {**dict.fromkeys((*batches, *record.joined), 0), **dict(state.merged_at)}
        merged_at |= dict.fromkeys(record.included, record.exchange.sent_at)
        left = [*state.left]
        for site in record.lost:
            # Collect the lost site's samples for steps whose work was not merged.
            for earlier in state.records:
                if site in earlier.members:
                    pieces_of_site = zip(earlier.window, earlier.pieces(site), strict=True)
                    left += [piece for step, piece in pieces_of_site if step >= merged_at[site]]
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

    def forget(self, before: int) -> None:
        """Delete the records of rounds before `before`, except for records whose samples have not been merged yet."""
        needed = min((at for site, at in self.state.merged_at if site in self.members), default=0)
        kept = tuple(
            record
            for record in self.state.records
            if record.round >= min(before, self.state.round) or record.window.stop > needed
        )
        self.state = replace(self.state, records=kept)


def agreement_of(plan: Plan) -> str:
    """Return a digest of everything that all sites must agree on: the model, the data, the layout, the steps, the
    optimizers and the exchange. Batch sizes, machines and folders may differ."""
    spec = plan.spec
    shared = replace(spec.resilience.sites, site=None, endpoint=None, listen=None, secret=None)
    sites = replace(shared, link_gbit_s=None, link_delay_s=0.0)
    agreed = {
        "model": to_plain(spec.model),
        "seq_len": spec.data.seq_len,
        "lora": to_plain(spec.lora),
        "layout": to_plain(plan.layout),
        "optim": to_plain(spec.optim),
        "steps": plan.total_steps,
        "seed": spec.train.seed,
        "sites": to_plain(sites),
    }
    return hashlib.sha256(canonical_json(agreed).encode()).hexdigest()
