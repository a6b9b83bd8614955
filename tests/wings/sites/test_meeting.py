"""The meeting of the sites under random histories: samples are taken once, and no round waits for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.wings.sites.meeting import (
    Contribution,
    Meeting,
    MeetingRules,
    MeetingState,
    RoundRecord,
    SiteSchedule,
    paced_batches,
    plan_pieces,
    site_weights,
)

batches_of_sites = st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1)


def positions(pieces: list[tuple[int, int]]) -> list[int]:
    return [position for start, samples in pieces for position in range(start, start + samples)]


@given(batches_of_sites, st.integers(0, 12), st.lists(st.integers(1, 30), max_size=4))
def test_positions_are_given_once_and_left_ones_first(batches: dict[int, int], steps: int, sizes: list[int]) -> None:
    left = [(1000 * number, size) for number, size in enumerate(sizes)]
    pieces, position, rest = plan_pieces(steps, batches, 10**6, left)
    taken = positions([piece for own in pieces.values() for piece in own])
    assert sorted([*taken, *positions(list(rest))]) == sorted([*positions(left), *range(10**6, position)])
    assert all(len(own) == steps for own in pieces.values())
    assert all(1 <= samples <= batches[site] for site, own in pieces.items() for _, samples in own)


def test_a_site_with_half_the_speed_takes_half_the_samples() -> None:
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 50.0}, 0.2) == {0: 8, 1: 4}
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 90.0}, 0.2) == {0: 8, 1: 8}, "as good as equal"
    assert paced_batches({0: 8, 1: 16}, {0: 100.0, 1: 200.0}, 0.2) == {0: 8, 1: 16}, "a larger site"
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 0.0}, 0.2) == {0: 8, 1: 8}, "not known"
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 1.0}, 0.2) == {0: 8, 1: 1}


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**4)), min_size=1, max_size=8))
def test_weights_of_sites_sum_to_one(work: list[tuple[int, int]]) -> None:
    weights = site_weights([tokens for tokens, _ in work], [steps for _, steps in work])
    assert sum(weights) == pytest.approx(1) and min(weights) >= 0


def test_sites_are_weighted_by_tokens_and_steps() -> None:
    assert site_weights([100, 100], [10, 10]) == (0.5, 0.5)
    assert site_weights([200, 100], [10, 10]) == (0.8, 0.2)
    assert site_weights([100, 100], [10, 20]) == pytest.approx((2 / 3, 1 / 3))
    assert site_weights([100, 0], [10, 0]) == (1.0, 0.0)


SITES, BATCH, GRACE_S, RETURN_S = 3, 4, 5.0, 60.0
SCHEDULE = SiteSchedule(total_steps=60, interval_steps=8, fragments=2, delay_steps=2)
LONG = SiteSchedule(total_steps=240, interval_steps=8, fragments=2, delay_steps=2)
RULES = MeetingRules(SITES, quorum=1, grace_s=GRACE_S, return_s=RETURN_S, change=0.2)


def work(digest: str = "same", tokens: int = 100, rate: float = 0.0) -> Contribution:
    return Contribution(tokens, steps=4, rate=rate, digests=(digest,), saved_round=0)


def begun(sites: int = SITES, rules: MeetingRules = RULES, schedule: SiteSchedule = SCHEDULE) -> Meeting:
    meeting = Meeting(rules, schedule)
    for site in range(sites):
        meeting.connect(site, BATCH)
    assert meeting.decide(0.0) is not None
    return meeting


def test_a_meeting_begins_when_all_sites_are_connected() -> None:
    meeting = Meeting(RULES, SCHEDULE)
    meeting.connect(0, BATCH)
    assert meeting.decide(1000.0) is None
    meeting.connect(1, BATCH)
    meeting.connect(2, BATCH)
    record = meeting.decide(1000.0)
    assert record is not None and record.members == (0, 1, 2)
    assert record.pieces(1)[0] == (BATCH, BATCH)


def test_a_round_waits_for_connected_sites_during_its_grace_time() -> None:
    meeting = begun()
    meeting.contribute(0, 1, work())
    meeting.contribute(1, 1, work())
    assert meeting.decide(100.0) is None
    assert meeting.decide(100.0 + GRACE_S / 2) is None
    record = meeting.decide(100.0 + GRACE_S)
    assert record is not None and record.included == (0, 1) and record.members == (0, 1, 2)


def test_a_lost_site_is_not_waited_for_and_the_others_take_its_samples() -> None:
    meeting = begun()
    meeting.disconnect(2)
    meeting.contribute(0, 1, work())
    meeting.contribute(1, 1, work())
    record = meeting.decide(1.0)
    assert record is not None and record.lost == (2,) and record.members == (0, 1), "not even just after the start"
    assert record.pieces(0)[0] == (2 * BATCH, BATCH), "the samples of site 2 in the first step"


def test_a_restarted_meeting_waits_for_its_members() -> None:
    meeting = begun()
    again = Meeting(RULES, SCHEDULE, from_plain(MeetingState, to_plain(meeting.state)))
    again.connect(0, BATCH)
    again.contribute(0, 1, work())
    assert again.decide(0.0) is None
    assert again.decide(RETURN_S / 2) is None
    assert again.decide(RETURN_S) is not None


def test_a_returning_site_follows_first() -> None:
    meeting = begun(2, MeetingRules(2, 1, GRACE_S, RETURN_S, 0.2))
    meeting.disconnect(1)
    meeting.contribute(0, 1, work())
    assert meeting.decide(RETURN_S + 1) is not None
    assert not meeting.connect(1, BATCH)
    meeting.contribute(0, 2, work())
    record = meeting.decide(RETURN_S + 2)
    assert record is not None and record.members == (0,), "it has not followed yet"
    meeting.follow(1, 2)
    meeting.contribute(0, 3, work())
    record = meeting.decide(RETURN_S + 3)
    assert record is not None and record.joined == (1,) and record.members == (0, 1)


def test_a_round_waits_for_its_quorum() -> None:
    meeting = begun(3, MeetingRules(3, 2, GRACE_S, RETURN_S, 0.2))
    meeting.disconnect(1)
    meeting.disconnect(2)
    meeting.contribute(0, 1, work())
    assert meeting.decide(10 * RETURN_S) is None


def test_a_site_with_different_shared_weights_is_named() -> None:
    meeting = begun()
    for site, digest in enumerate(("a", "b", "a")):
        meeting.contribute(site, 1, work(digest))
    record = meeting.decide(0.0)
    assert record is not None and record.diverged == (1,)


def test_a_slow_site_takes_fewer_samples() -> None:
    meeting = begun(2, MeetingRules(2, 1, GRACE_S, RETURN_S, 0.2))
    meeting.contribute(0, 1, work(rate=100.0))
    meeting.contribute(1, 1, work(rate=50.0))
    record = meeting.decide(0.0)
    assert record is not None and record.pieces(0)[0][1] == BATCH and record.pieces(1)[0][1] == BATCH // 2


def test_a_restarted_meeting_decides_like_an_uninterrupted_one() -> None:
    rules = MeetingRules(2, 1, GRACE_S, RETURN_S, 0.2)
    whole = begun(2, rules)
    again = begun(2, rules)
    for number in range(1, 7):
        again = Meeting(rules, SCHEDULE, from_plain(MeetingState, to_plain(again.state)))
        for site in range(2):
            again.connect(site, BATCH)
            again.contribute(site, number, work(rate=10.0 * (site + 1)))
            whole.contribute(site, number, work(rate=10.0 * (site + 1)))
        decided = again.decide(0.0)
        assert decided is not None and decided == whole.decide(0.0)


class Histories(RuleBasedStateMachine):
    """Sites connect, leave, are late and return, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = begun(schedule=LONG)
        self.now_s = RETURN_S + 1
        self.records = [self.meeting.state.records[0]]
        self.merged: dict[int, int] = {}

    @rule(site=st.integers(0, SITES - 1))
    def goes(self, site: int) -> None:
        if len(self.meeting.connected) > 1:
            self.meeting.disconnect(site)

    @rule(site=st.integers(0, SITES - 1))
    def comes(self, site: int) -> None:
        if not self.meeting.connect(site, BATCH):
            self.meeting.follow(site, self.meeting.state.round)

    @rule(site=st.integers(0, SITES - 1))
    def contributes(self, site: int) -> None:
        if site in self.meeting.connected:
            self.meeting.contribute(site, self.meeting.state.round + 1, work())

    @rule()
    def time_passes(self) -> None:
        self.now_s += GRACE_S
        self.decided(self.meeting.decide(self.now_s))

    @precondition(lambda self: not self.meeting.is_over)
    @rule()
    def all_that_are_there_contribute(self) -> None:
        for site in self.meeting.connected:
            self.meeting.contribute(site, self.meeting.state.round + 1, work())
        record = self.meeting.decide(self.now_s)
        if self.meeting.came or record:
            assert record is not None, "no site is missing"
        self.decided(record)

    @precondition(lambda self: not self.meeting.is_over)
    @rule()
    def all_exchange_for_a_while(self) -> None:
        for site in range(SITES):
            self.comes(site)
        for _ in range(5):
            if not self.meeting.is_over:
                self.all_that_are_there_contribute()

    def decided(self, record: RoundRecord | None) -> None:
        if record:
            self.records.append(record)

    @invariant()
    def every_position_is_taken_once(self) -> None:
        """The pieces of lost sites after their last merged step are planned again."""
        taken: list[int] = []
        for record in self.records:
            for site in record.members:
                until = self.lost_at(site, record.round)
                for step, (start, samples) in zip(record.window, record.pieces(site), strict=True):
                    if step < until:
                        taken.extend(range(start, start + samples))
        left = [p for start, samples in self.meeting.state.left for p in range(start, start + samples)]
        assert sorted([*taken, *left]) == list(range(self.meeting.state.position))

    @invariant()
    def every_step_is_planned_once(self) -> None:
        steps = [step for record in self.records for step in record.window]
        assert steps == list(range(self.records[-1].window.stop))

    def lost_at(self, site: int, since: int) -> int:
        """Return the step up to which the work of a site, a member since then, was merged when it was next lost."""
        merged = self.records[self.joined_at(site, since)].window.start
        for record in self.records[self.joined_at(site, since) + 1 :]:
            if site in record.included:
                merged = record.exchange.sent_at
            if site in record.lost:
                return merged
        return LONG.total_steps

    def joined_at(self, site: int, until: int) -> int:
        return max((r.round for r in self.records[: until + 1] if site in r.joined), default=0)


TestHistories = pytest.mark.slow(Histories.TestCase)
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
