import pytest

from trainspec_cli.policy.hang import FIRST_S, Whereabouts, find_late, step_deadline_s


@pytest.mark.parametrize(
    ("recent_s", "floor_s", "deadline_s"),
    [
        ([], 60, FIRST_S),
        ([1.0, 1.0], 60, FIRST_S),
        ([1.0, 1.0, 1.0], 60, 60),
        ([1.0, 30.0, 1.0], 60, 150),
    ],
    ids=["nothing known", "too little known", "quick steps", "slow steps"],
)
def test_the_deadline_is_learned_and_has_a_floor(recent_s, floor_s, deadline_s):
    assert step_deadline_s(recent_s, floor_s) == deadline_s


WAITS, WORKS = Whereabouts(True, {"world": 5}), Whereabouts(False, {"world": 4})


@pytest.mark.parametrize(
    ("found", "late", "why"),
    [
        ({0: WAITS, 2: WAITS}, [1], "no sign of life"),
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
