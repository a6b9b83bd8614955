"""Charts."""

import re

import pytest

from trainspec_cli.report.svg import LineSeries, Segment, nice_ticks, render_bar, render_legend, render_lines

PARTS = [Segment("c-a", "first", 3.0, "3 s"), Segment("c-b", "second", 1.0, "1 s")]


def test_segments_follow_one_another() -> None:
    bar = render_bar(PARTS, scale=8)
    places = re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', bar)
    assert [(float(x), float(width)) for x, width in places] == [(0, 37.5), (37.5, 12.5)]


def test_a_limit_is_drawn_where_it_is() -> None:
    assert 'x1="75.000%"' in render_bar(PARTS, scale=8, limit=6)
    assert "limit" not in render_bar(PARTS, scale=8)


def test_a_bar_can_be_read_aloud() -> None:
    assert 'aria-label="first 3 s; second 1 s"' in render_bar(PARTS, scale=8)


def test_a_legend_names_all_parts() -> None:
    assert render_legend(PARTS).count("<li>") == 2


def test_even_scaling_is_a_straight_line() -> None:
    chart = render_lines([LineSeries("c-a", "even", [(8, 100), (64, 800), (512, 6400)])], "devices", "rate", [(8, "8")])
    points = re.search(r'points="([^"]+)"', chart)
    assert points
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in points[1].split())
    assert (y1 - y0) / (x1 - x0) == pytest.approx((y2 - y1) / (x2 - x1), abs=1e-3)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(300.0, 2500.0, [500, 1000, 2000]), (1.0, 1e6, [1, 10, 100, 1e3, 1e4, 1e5, 1e6])],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)
