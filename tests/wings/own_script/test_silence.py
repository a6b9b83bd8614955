"""Which processes work, judged from outside."""

from __future__ import annotations

import pytest

from trainspec_cli.wings.own_script.watches import Reading, working

ASLEEP, STOPPED = Reading(), Reading(stopped=True)
SPINS = Reading(busy_cores=1.0, in_library=True)
COMPUTES = Reading(busy_cores=1.0)
ON_GPU = Reading(busy_cores=1.0, on_gpu=True)
MOVES = Reading(stack_changed=True)


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([ASLEEP], ()),
        ([COMPUTES], (0,)),
        ([SPINS], (0,)),
        ([MOVES, ASLEEP], (0,)),
        ([Reading(moved_bytes=2**20), ASLEEP], (0,)),
        ([Reading(moved_bytes=100), ASLEEP], ()),
        ([Reading(child_cores=1.0), ASLEEP], (0,)),
        ([SPINS, STOPPED], ()),
        ([ON_GPU, ASLEEP], ()),
        ([COMPUTES, ASLEEP], (0,)),
        ([SPINS, SPINS], (0, 1)),
        ([Reading(busy_cores=1.0, in_library=True, has_stack=False), ASLEEP], (0,)),
    ],
    ids=str,
)
def test_idle_processes_do_not_work_nor_those_that_spin_for_them(
    readings: list[Reading], expected: tuple[int, ...]
) -> None:
    assert working(dict(enumerate(readings))) == expected
