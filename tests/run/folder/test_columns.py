from __future__ import annotations

import math
from array import array

from trainspec_cli.run.folder.files import StepColumns, StepCurve


def columns_of(*steps: int) -> StepColumns:
    columns = StepColumns("x", "y")
    for step in steps:
        columns.add(step, step / 2, -step)
    return columns


def test_rows_are_kept_forgotten_and_put_anew() -> None:
    columns = columns_of(1, 2, 3, 4, 5)
    columns.forget_beyond(4)
    columns.forget_before(2)
    assert (list(columns.steps), list(columns["x"]), list(columns["y"])) == ([2, 3, 4], [1.0, 1.5, 2.0], [-2, -3, -4])
    columns.put(3, 7.0, 8.0)
    columns.put(6, 9.0, 9.0)
    assert (list(columns.steps), list(columns["x"])) == ([2, 4, 3, 6], [1.0, 2.0, 7.0, 9.0])
    assert len(columns) == 4


def test_a_curve_is_a_sequence_in_which_nothing_is_infinite() -> None:
    curve = StepCurve(array("q", [1, 2, 3]), array("d", [0.5, math.nan, math.inf]))
    assert curve == ((1, 0.5), (2, None), (3, None))
    assert (curve[0], curve[-1], curve[1:]) == ((1, 0.5), (3, None), ((2, None), (3, None)))
    assert curve != ((1, 0.5),) and curve != "abc" and not StepCurve(array("q"), array("d"))
