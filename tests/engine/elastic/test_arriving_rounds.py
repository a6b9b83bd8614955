"""A round is whole when every outer gradient is there that was merged, and no other one in its place."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.engine.elastic.arriving_rounds import HELD_ROUNDS, ArrivingRounds
from trainspec_cli.wings.sites.decisions.round import RoundRecord
from trainspec_cli.wings.sites.decisions.schedule import SiteExchange

OWN = 0


def decided(number: int, *sites: int) -> RoundRecord:
    exchange = SiteExchange(number, (0,), sent_at=number, applied_at=number)
    return RoundRecord(exchange, None, included=sites, weights=(1.0,) * len(sites))


def digests(*contents: bytes) -> tuple[str, ...]:
    return tuple(hashlib.sha256(content).hexdigest() for content in contents)


def test_what_came_before_the_decision_is_taken_with_it() -> None:
    rounds = ArrivingRounds(OWN, 0)
    rounds.hold(1, OWN, b"own")
    rounds.hold(1, 2, b"two")
    assert not rounds.has(1) and rounds.lacking() == {}
    rounds.decide(decided(1, 0, 1, 2), digests(b"own", b"one", b"two"), {1: b"one"})
    assert rounds.has(1)
    assert rounds.take(1)[1] == {1: b"one", 2: b"two"}, "its own is held by the training"


def test_another_gradient_of_the_same_round_does_not_take_its_place() -> None:
    rounds = ArrivingRounds(OWN, 0)
    rounds.hold(1, 1, b"of its first start")
    rounds.hold(1, OWN, b"of this start")
    rounds.decide(decided(1, 0, 1), digests(b"of the start before", b"of its second start"), {})
    assert rounds.lacking() == {1: (0, 1)}
    rounds.hold(1, 1, b"of its second start")
    assert rounds.lacking() == {1: (0,)}
    rounds.decide(decided(1, 0, 1), (), {0: b"of the start before"})
    assert rounds.take(1)[1] == {0: b"of the start before", 1: b"of its second start"}


def test_rounds_that_were_taken_or_are_far_ahead_are_not_held() -> None:
    rounds = ArrivingRounds(OWN, 5)
    for number in (5, 6 + HELD_ROUNDS):
        rounds.hold(number, 1, b"x")
        rounds.decide(decided(number, 1), digests(b"x"), {})
        assert not rounds.has(number)


@given(st.permutations(["early 1", "early 2", "decision", "asked"]))
def test_whatever_comes_first_the_same_bytes_are_taken(order: list[str]) -> None:
    rounds = ArrivingRounds(3, 0)
    for what in order:
        if what == "decision":
            rounds.decide(decided(1, 1, 2), digests(b"one", b"two"), {})
        elif what == "asked":
            rounds.decide(decided(1, 1, 2), digests(b"one", b"two"), {2: b"two"})
        else:
            rounds.hold(1, int(what[-1]), b"one" if what == "early 1" else b"damaged")
    assert rounds.take(1)[1] == {1: b"one", 2: b"two"}
