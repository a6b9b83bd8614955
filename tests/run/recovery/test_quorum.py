"""Which groups make a step together, on plain numbers; random histories keep the rules that no history may break."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.run.recovery.reliability import ConnectedGroup, QuorumRules, choose_members, plan_healing

RULES = QuorumRules(silence_s=1.0, patience_s=10.0)
NOW = 100.0


def asks(since_s: float = 0.0, heard_s: float = 0.0) -> ConnectedGroup:
    return ConnectedGroup(NOW - heard_s, NOW - since_s)


def computes(heard_s: float = 0.0) -> ConnectedGroup:
    return ConnectedGroup(NOW - heard_s)


def test_all_that_live_go_at_once() -> None:
    assert choose_members({"b": asks(), "a": asks()}, [], NOW, RULES) == ["a", "b"]


def test_one_that_lives_and_does_not_ask_is_waited_for() -> None:
    groups = {"a": asks(), "b": asks(), "c": computes()}
    assert choose_members(groups, [], NOW, RULES) == []
    assert choose_members({**groups, "a": asks(since_s=10.0)}, [], NOW, RULES) == ["a", "b"]


def test_one_that_is_silent_is_not_waited_for() -> None:
    assert choose_members({"a": asks(), "b": asks(), "c": computes(heard_s=1.5)}, [], NOW, RULES) == ["a", "b"]


def test_one_that_asked_and_fell_silent_takes_no_part() -> None:
    assert choose_members({"a": asks(), "b": asks(heard_s=1.5)}, [], NOW, RULES) == ["a"]


def test_the_members_of_the_last_quorum_do_not_wait_for_a_newcomer() -> None:
    groups = {"a": asks(), "b": asks(), "c": computes()}
    assert choose_members(groups, ["a", "b"], NOW, RULES) == ["a", "b"]
    assert choose_members({**groups, "c": asks()}, ["a", "b"], NOW, RULES) == ["a", "b", "c"]
    assert choose_members({**groups, "d": computes(), "e": computes()}, ["a", "b"], NOW, RULES) == ["a", "b"]


def test_half_of_those_that_live_are_not_enough() -> None:
    assert choose_members({"a": asks(since_s=99.0), "b": computes()}, [], NOW, RULES) == []


def test_nobody_asks() -> None:
    assert choose_members({"a": computes()}, ["a"], NOW, RULES) == []
    assert choose_members({}, [], NOW, RULES) == []


group = st.builds(
    ConnectedGroup,
    heard_at_s=st.floats(NOW - 3, NOW),
    asked_at_s=st.one_of(st.just(math.inf), st.floats(NOW - 20, NOW)),
)
groups = st.dictionaries(st.sampled_from("abcdef"), group)


@settings(max_examples=150, derandomize=True)
@given(groups, st.lists(st.sampled_from("abcdef"), unique=True))
def test_members_live_ask_and_are_the_last_quorum_or_more_than_half(
    groups: dict[str, ConnectedGroup], previous: list[str]
) -> None:
    members = choose_members(groups, previous, NOW, RULES)
    living = [name for name, each in groups.items() if NOW - each.heard_at_s <= RULES.silence_s]
    assert set(members) <= set(living)
    assert all(groups[name].asks for name in members)
    went_on = previous and set(previous) <= set(members)
    assert not members or went_on or 2 * len(members) > len(living)
    assert members == sorted(members)


@settings(max_examples=150, derandomize=True)
@given(groups)
def test_whoever_asks_for_long_enough_goes(groups: dict[str, ConnectedGroup]) -> None:
    """Once more than half ask and one of them has waited long enough, no other member can delay them."""
    living = {name: each for name, each in groups.items() if NOW - each.heard_at_s <= RULES.silence_s}
    asking = {name: each for name, each in living.items() if each.asks}
    waited = any(NOW - each.asked_at_s >= RULES.patience_s for each in asking.values())
    if 2 * len(asking) > len(living) and waited:
        assert choose_members(groups, [], NOW, RULES) == sorted(asking)


@settings(max_examples=150, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 3))
def test_everyone_behind_heals_once_from_one_in_front(steps: list[int], rank: int) -> None:
    plans = [plan_healing(steps, place, rank) for place in range(len(steps))]
    for place, plan in enumerate(plans):
        if steps[place] == max(steps):
            assert plan.takes_from is None
        else:
            assert plan.takes_from is not None
            assert steps[plan.takes_from] == max(steps)
            assert place in plans[plan.takes_from].gives_to
            assert plan.gives_to == ()
    assert sum(len(plan.gives_to) for plan in plans) == sum(step < max(steps) for step in steps)


def test_the_ranks_of_a_group_heal_from_different_ones() -> None:
    assert [plan_healing([5, 5, 3], 2, rank).takes_from for rank in (0, 1)] == [0, 1]
