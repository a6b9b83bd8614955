"""A job on several planes lives while one of them carries nothing, and takes it up again by itself."""

from __future__ import annotations

import pytest
from lab.planes import Job, Planes, lacking, open_job

pytestmark = pytest.mark.slow
PLANES, CUT = 4, 2
SUMS = 6
NOTHING = 1e-4
"""The share of the bytes that a port sends to find its neighbours."""
AT_MOST = 40
"""Sums until a plane that has healed carries its part: it is tried again each second, and a sum takes 0.2 s or more."""


def shares_of(job: Job, planes: Planes, sums: int) -> list[float]:
    """Return the part of the bytes of the next sums that each plane carries."""
    before = planes.carried_bytes()
    for _ in range(sums):
        job.next_end_s()
    carried = [now - then for now, then in zip(planes.carried_bytes(), before, strict=True)]
    return [size / sum(carried) for size in carried]


def test_a_job_goes_on_while_a_plane_is_cut_and_takes_it_up_again() -> None:
    """The worker ends the job where a sum is wrong. The cut of the plane shows nowhere: its links stay up."""
    if why := lacking():
        pytest.skip(why)
    with open_job(2, PLANES, 40.0, 2**22) as (planes, job):
        job.next_end_s()
        assert min(shares_of(job, planes, SUMS)) > 0.5 / PLANES, "every plane carries its part"
        planes.cut(CUT)
        job.next_end_s()
        *others, none = sorted(shares_of(job, planes, SUMS), reverse=True)
        assert none < NOTHING and min(others) > 0.5 / (PLANES - 1)
        planes.heal(CUT)
        healed = (shares_of(job, planes, 1)[CUT] for _ in range(AT_MOST))
        assert any(share > 0.5 / PLANES for share in healed)
