"""Parts of a report come back from a row as they were, whichever parts there are."""

from __future__ import annotations

from itertools import product

import pytest

from trainspec_cli.balance.decisions.links import Transfer
from trainspec_cli.engine.run.step_report import BucketFigures, LinkFigures, SpeedFigures, StepReport

SPEEDS = [SpeedFigures(*(start + place / 3 for place in range(9))) for start in (0.0, 10.0)]
LINKS = [
    LinkFigures(tuple(Transfer(start, start + 0.1, start + axis) for axis in range(2)), start + 0.2, start + 0.3)
    for start in (20.0, 30.0)
]
BUCKETS = [BucketFigures(*(start + place / 7 for place in range(5))) for start in (40.0, 50.0)]


@pytest.mark.parametrize(("speed", "links", "buckets"), [*product([False, True], repeat=3)])
def test_the_row_of_another_rank_is_read_by_the_parts_of_this_one(speed: bool, links: bool, buckets: bool) -> None:
    own, other = (
        StepReport(
            speed=SPEEDS[rank] if speed else None,
            links=LINKS[rank] if links else None,
            buckets=BUCKETS[rank] if buckets else None,
        )
        for rank in range(2)
    )
    assert own.like(other.row) == other
    assert len(own.row) == len(SpeedFigures._fields) * speed + 8 * links + len(BucketFigures._fields) * buckets
