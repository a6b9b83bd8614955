"""Nodes are numbered so that those of one switch stand together, and the supervisor's is the first."""

from __future__ import annotations

import random

from trainspec_cli.run.slurm.commands import arrange, has_switches

MIXED = {
    "a1": "top.leaf1.a1",
    "b1": "top.leaf2.b1",
    "a2": "top.leaf1.a2",
    "c1": "top.leaf0.c1",
    "b2": "top.leaf2.b2",
    "c2": "top.leaf0.c2",
}


def test_each_switch_is_left_once_and_the_first_nodes_comes_first() -> None:
    assert arrange(MIXED, "b2", ()) == ["b2", "b1", "c1", "c2", "a1", "a2"]
    assert arrange(MIXED, "a1", ()) == ["a1", "a2", "c1", "c2", "b1", "b2"]


def test_nearer_switches_of_several_tiers_come_first() -> None:
    deep = {f"n{n}": f"top.row{n // 4}.leaf{n // 2}.n{n}" for n in range(8)}
    shuffled = dict(random.Random(3).sample(sorted(deep.items()), 8))
    found = arrange(shuffled, "n6", ())
    assert found[:2] == ["n6", "n7"] and set(found[2:4]) == {"n4", "n5"} and set(found[4:]) == {"n0", "n1", "n2", "n3"}
    assert {found[4], found[5]} in ({"n0", "n1"}, {"n2", "n3"})


def test_without_switches_slurms_own_order_stays() -> None:
    plain = {"z": "z", "y": "", "x": "x"}
    assert arrange(plain, "z", ()) == ["z", "y", "x"]
    assert arrange(plain, "x", ()) == ["x", "z", "y"]
    assert not has_switches(plain) and has_switches(MIXED)


def test_numbers_go_to_the_places_that_the_plan_gives_them() -> None:
    assert arrange(MIXED, "b2", (0, 2, 4, 1, 3, 5)) == ["b2", "c1", "a1", "b1", "c2", "a2"]


def test_a_nodes_name_may_hold_dots() -> None:
    assert arrange({"n.x": "top.l2.n.x", "m.x": "top.l1.m.x"}, "m.x", ()) == ["m.x", "n.x"]
