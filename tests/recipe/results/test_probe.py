"""A probe's curves: straight on logarithmic axes between its points, and in proportion beyond the last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.recipe.results.tools import Curve

CURVE = Curve((1.0, 100.0, 10_000.0), (1e-3, 4e-3, 1.0))


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (0.0, 1e-3),
        (1.0, 1e-3),
        (10.0, 2e-3),  # half the way to 100 on a logarithmic axis is half the way from 1 to 4 ms on the other
        (100.0, 4e-3),
        (1000.0, (4e-3 * 1.0) ** 0.5),
        (10_000.0, 1.0),
        (25_000.0, 2.5),
    ],
)
def test_a_curve_between_and_beyond_its_points(size: float, seconds: float) -> None:
    assert CURVE.at(size) == pytest.approx(seconds, rel=1e-12)


def test_what_a_size_costs_beyond_the_call() -> None:
    assert CURVE.beyond_call(10.0) == pytest.approx(1e-3)
    assert CURVE.beyond_call(1.0) == 0.0
    falling = Curve((1.0, 100.0), (4e-3, 1e-3))
    assert falling.beyond_call(100.0) == 0.0, "a call that was measured as slower than the work"


@given(st.floats(0.5, 1e6), st.floats(1.0, 10.0))
def test_a_rising_curve_never_falls(size: float, factor: float) -> None:
    assert CURVE.at(size * factor) >= CURVE.at(size) * (1 - 1e-12)
