"""Descriptions of disturbances: what they hold, what chance draws, and what is refused."""

from typing import Any

import pytest
from lab.recorded import Recorded

from trainspec_cli.balance.disturbance import (
    Disturbance,
    Leave,
    NarrowLink,
    SlowDevice,
    SlowNode,
    build_disturbance,
    check_cluster,
)
from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.keys.resilience import RecoveryMode, ResilienceSpec
from trainspec_cli.run.recovery.nodes import groups_of_node

CHANCE = {"count": 400, "shortest_s": 10, "longest_s": 1000, "least_factor": 1.2, "most_factor": 2.0}


def problems_of(content: dict[str, Any]) -> list[Problem]:
    return build_disturbance(content, "disturb")[1]


def checked(content: dict[str, Any], groups: int = 1, min_groups: int = 1) -> list[Problem]:
    draft, problems = build_disturbance(content, "disturb")
    assert problems == []
    mode: RecoveryMode = "elastic" if groups > 1 else "none"
    return list(check_cluster(draft, "disturb", 4, 8, groups, ResilienceSpec(mode=mode, min_groups=min_groups)))


def test_an_event_holds_from_its_first_step_for_as_many_as_it_says() -> None:
    event = SlowDevice(device=0, factor=2, from_step=5, steps=3)
    assert [step for step in range(1, 12) if event.holds(step)] == [5, 6, 7]
    assert SlowDevice(device=0, factor=2, from_step=5).holds(10**6)


@pytest.mark.parametrize(
    ("content", "path", "words"),
    [
        ({"slow_devices": [{"factor": 2}]}, "disturb.slow_devices.0.device", "has no value"),
        ({"slow_devices": [{"device": 1}]}, "disturb.slow_devices.0.factor", "has no value"),
        ({"slow_devices": [{"device": 1, "factor": 1}]}, "disturb.slow_devices.0.factor", "more than 1"),
        ({"slow_devices": [{"device": -1, "factor": 2}]}, "disturb.slow_devices.0.device", "at least 0"),
        ({"slow_nodes": [{"node": 1, "factor": 2, "from_step": 0}]}, "disturb.slow_nodes.0.from_step", "at least 1"),
        ({"narrow_links": [{"factor": 2, "tier": "wan"}]}, "disturb.narrow_links.0.tier", "scaleup or network"),
        ({"leaves": [{"node": "1"}]}, "disturb.leaves.0.node", "a whole number"),
        ({"slow_device": [{"device": 1, "factor": 2}]}, "disturb.slow_device", "unknown key"),
        ({"leaves": {"node": 1}}, "disturb.leaves", "a list"),
        ({"steps": 10**6}, "disturb.steps", "at most 100000"),
        ({"noise": 2}, "disturb.noise", "at most 0.5"),
        ({"by_chance": CHANCE | {"least_factor": 3.0}}, "disturb.by_chance.least_factor", "`most_factor` is 2"),
        ({"by_chance": CHANCE | {"shortest_s": 0}}, "disturb.by_chance.shortest_s", "more than 0"),
    ],
)
def test_a_mistake_is_named_with_its_path(content: dict[str, Any], path: str, words: str) -> None:
    (problem,) = problems_of(content)
    assert problem.path == path and words in problem.message


@pytest.mark.parametrize(
    ("content", "path", "words"),
    [
        ({"slow_devices": [{"device": 32, "factor": 2}]}, "disturb.slow_devices.0.device", "32 devices"),
        ({"slow_nodes": [{"node": 4, "factor": 2}]}, "disturb.slow_nodes.0.node", "4 nodes"),
        ({"narrow_links": [{"factor": 2, "from_step": 301}]}, "disturb.narrow_links.0.from_step", "step 300"),
        ({"leaves": [{"node": 1}]}, "disturb.leaves", "`resilience.mode`"),
    ],
)
def test_what_the_cluster_has_not_is_refused(content: dict[str, Any], path: str, words: str) -> None:
    (problem,) = checked(content)
    assert problem.path == path and words in problem.message


def test_what_the_cluster_has_is_accepted() -> None:
    assert checked({"slow_devices": [{"device": 31, "factor": 2}], "narrow_links": [{"factor": 2}]}) == []


def test_too_few_groups_at_once_are_refused() -> None:
    leaves = [{"node": 0, "from_step": 1, "steps": 20}, {"node": 1, "from_step": 10}]
    (problem,) = checked({"leaves": leaves}, groups=4, min_groups=3)
    assert problem.path == "disturb.leaves.1" and "2 of 4 replica groups" in problem.message
    assert problem.message.count("step 10") == 1
    assert checked({"leaves": leaves}, groups=4, min_groups=2) == []
    assert checked({"leaves": [leaves[0], leaves[1] | {"from_step": 21}]}, groups=4, min_groups=3) == []


@pytest.mark.parametrize(("node", "nodes", "groups", "there"), [(5, 32, 8, [1]), (1, 2, 4, [2, 3]), (3, 4, 4, [3])])
def test_groups_of_a_node(node: int, nodes: int, groups: int, there: list[int]) -> None:
    assert list(groups_of_node(node, nodes, groups)) == there


def test_chance_stays_within_its_bounds_and_repeats_itself() -> None:
    draft, _ = build_disturbance({"by_chance": CHANCE | {"network_share": 0.25}, "seed": 3}, "disturb")
    drawn = draft.drawn(1.0, 4, 8)
    assert drawn == draft.drawn(1.0, 4, 8) != Disturbance(by_chance=draft.by_chance, seed=4).drawn(1.0, 4, 8)
    assert len(drawn.events) == 400 and len(drawn.narrow_links) == pytest.approx(100, abs=30)
    assert all(1.2 <= event.factor <= 2 and 10 <= (event.steps or 0) <= 1000 for event in drawn.slow_devices)
    factors = [event.factor for event in drawn.slow_devices]
    assert min(factors) < 1.25 and max(factors) > 1.95 and sum(factors) / len(factors) == pytest.approx(1.6, abs=0.05)
    assert {event.device for event in drawn.slow_devices} == set(range(32))
    middle = sorted(event.steps or 0 for event in drawn.slow_devices)[len(drawn.slow_devices) // 2]
    assert 70 < middle < 140, "half of them are shorter than the bounds' geometric mean, 100 s"


def test_events_say_what_they_are(recorded: Recorded) -> None:
    events = (
        Leave(node=3, from_step=5, steps=2),
        SlowDevice(device=3, factor=1.5),
        SlowNode(node=1024, factor=2, from_step=3, steps=1),
        NarrowLink(factor=4),
        NarrowLink(node=0, tier="scaleup", factor=1.25, from_step=7),
    )
    recorded(*(event.describe() for event in events))


def test_events_come_in_the_order_of_their_kinds() -> None:
    kinds = SlowDevice(device=0, factor=2), SlowNode(node=0, factor=2), NarrowLink(factor=2), Leave(node=0)
    device, node, link, leave = kinds
    disturbance = Disturbance(slow_devices=(device,), slow_nodes=(node,), narrow_links=(link,), leaves=(leave,))
    assert disturbance.events == kinds
    assert disturbance.drawn(1.0, 4, 8) is disturbance, "there is nothing to draw"


def test_what_is_drawn_comes_beside_what_is_written_and_lasts_for_whole_steps() -> None:
    chance = CHANCE | {"count": 50, "shortest_s": 10, "longest_s": 10, "least_factor": 2, "most_factor": 2}
    written = {"slow_devices": [{"device": 1, "factor": 3}], "narrow_links": [{"factor": 4}]}
    draft, _ = build_disturbance(written | {"by_chance": chance | {"network_share": 0.5}}, "disturb")
    drawn = draft.drawn(6.0, 4, 8)
    assert drawn.by_chance is None
    assert (drawn.slow_devices[0], drawn.narrow_links[0]) == (draft.slow_devices[0], draft.narrow_links[0])
    found = [*drawn.slow_devices[1:], *drawn.narrow_links[1:]]
    assert len(found) == 50
    assert {event.steps for event in found} == {2}, "10 s are nearest to two steps of 6 s"
    assert {event.factor for event in found} == {2.0}
    assert all(1 <= event.from_step <= draft.steps for event in found)
    assert {link.node for link in drawn.narrow_links[1:]} == set(range(4))
    assert {link.tier for link in drawn.narrow_links[1:]} == {"network"}
    assert {event.steps for event in draft.drawn(1000.0, 4, 8).slow_devices[1:]} == {1}, "a step at least"


def test_no_network_is_narrowed_unless_a_part_of_the_faults_is_said_to_be() -> None:
    draft, _ = build_disturbance({"by_chance": CHANCE}, "disturb")
    assert draft.drawn(1.0, 4, 8).narrow_links == ()


def test_a_disturbance_by_default_lasts_300_steps_with_noise_and_no_events() -> None:
    plain = Disturbance()
    assert (plain.steps, plain.noise, plain.seed, plain.events, plain.by_chance) == (300, 0.02, 0, (), None)
    assert (SlowDevice(device=0, factor=2).from_step, NarrowLink(factor=2).tier) == (1, "network")


def test_bounds_may_be_equal_and_each_pair_of_them_is_checked() -> None:
    assert problems_of({"by_chance": CHANCE | {"least_factor": 2.0}}) == []
    (problem,) = problems_of({"by_chance": CHANCE | {"shortest_s": 2000}})
    assert problem.path == "disturb.by_chance.shortest_s" and "`longest_s` is 1000" in problem.message


def test_the_last_node_and_step_there_are_are_accepted() -> None:
    last = {"slow_nodes": [{"node": 3, "factor": 2, "from_step": 300}], "leaves": [{"node": 3, "from_step": 300}]}
    assert checked(last, groups=4) == []
    problems = checked({"slow_nodes": [{"node": 4, "factor": 2, "from_step": 301}]}, groups=4)
    assert [problem.path for problem in problems] == [
        "disturb.slow_nodes.0.node",
        "disturb.slow_nodes.0.from_step",
    ], "each mistake is reported"
    assert problems[0].hint.startswith("set disturb.slow_nodes.0.node=3 or less")
    assert problems[1].hint.startswith("set disturb.slow_nodes.0.from_step=300 ")
