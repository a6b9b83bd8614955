"""When a warning about a step that may hang is due."""

from __future__ import annotations

import math

import pytest

from trainspec_cli.run.recovery.watch import stall_after_s


@pytest.mark.parametrize(
    ("recent_s", "deadline_s", "expected_s"),
    [
        ([1.0, 1.0], 1800.0, math.inf),
        ([1.0, 1.0, 4.0], 300.0, 10.0),
        ([0.1, 0.1, 0.1], 300.0, 2.0),
        ([0.1, 0.1, 0.1], 3.0, 1.5),
    ],
)
def test_a_step_far_longer_than_the_recent_ones_is_told_of_before_the_deadline(recent_s, deadline_s, expected_s):
    assert stall_after_s(recent_s, deadline_s) == expected_s
