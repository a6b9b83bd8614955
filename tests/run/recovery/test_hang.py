import pytest

from trainspec_cli.run.recovery.watch import Whereabouts, find_late, step_deadline_s


@pytest.mark.parametrize(
    ("recent_s", "floor_s", "deadline_s"),
    [
        ([], 60, 1800),
        ([1.0, 1.0], 60, 1800),
        ([1.0, 1.0, 1.0], 60, 60),
        ([1.0, 30.0, 1.0], 60, 150),
    ],
    ids=["nothing known", "too little known", "quick steps", "slow steps"],
)
def test_the_deadline_is_learned_and_has_a_floor(recent_s, floor_s, deadline_s):
    assert step_deadline_s(recent_s, floor_s, first_s=1800) == deadline_s


WAITS, WORKS = Whereabouts(True, {"world": 5}), Whereabouts(False, {"world": 4})


@pytest.mark.parametrize(
    ("found", "late", "why"),
    [
        ({0: WAITS, 2: WAITS}, [1], "does not respond"),
        ({0: WAITS, 1: WORKS, 2: WAITS}, [1], "in no collective"),
        ({0: WAITS, 1: Whereabouts(True, {"world": 4}), 2: WAITS}, [1], "fewer collectives"),
        ({0: WAITS, 1: WAITS, 2: WAITS}, [], "all ranks wait"),
        ({0: WORKS, 1: WORKS, 2: WORKS}, [], "no rank waits"),
    ],
    ids=["silent", "busy", "behind", "network", "slow"],
)
def test_who_is_late(found, late, why):
    ranks, words = find_late(found, world_size=3)
    assert ranks == late
    assert why in words


BEHIND_IN_TP = Whereabouts(True, {"world": 5, "tp": 8})
AHEAD = Whereabouts(True, {"world": 5, "tp": 9})


def test_a_rank_that_is_behind_in_one_of_its_process_groups_is_late() -> None:
    """The furthest number of a group counts, whichever rank tells it first; late ranks come in order."""
    assert find_late({0: AHEAD, 1: BEHIND_IN_TP, 2: AHEAD}, 3)[0] == [1]
    assert find_late({2: BEHIND_IN_TP, 1: AHEAD, 0: BEHIND_IN_TP}, 3)[0] == [0, 2]


def test_ranks_that_are_each_behind_in_another_group_wait_for_nobody_in_particular() -> None:
    found = {0: Whereabouts(True, {"world": 5, "tp": 8}), 1: Whereabouts(True, {"world": 4, "tp": 9})}
    assert find_late(found, 2)[0] == []


def test_several_late_ranks_come_in_order() -> None:
    assert find_late({2: WORKS, 0: WAITS, 1: WORKS}, 3)[0] == [1, 2]
    assert find_late({1: WAITS}, 4)[0] == [0, 2, 3]
