"""Charts."""

import re

import pytest

from trainspec_cli.reporter.page.svg import (
    LineSeries,
    Segment,
    even_ticks,
    nice_ticks,
    render_bar,
    render_curves,
    render_legend,
    render_lines,
    thin,
)

DOT = r'class="dot c-a" cx="([\d.]+)" cy="([\d.]+)"'
PARTS = [Segment("c-a", "first", 3.0, "3 s"), Segment("c-b", "second", 1.0, "1 s")]


def test_segments_follow_one_another() -> None:
    bar = render_bar(PARTS, scale=8)
    places = re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', bar)
    assert [(float(x), float(width)) for x, width in places] == [(0, 37.5), (37.5, 12.5)]


def test_a_limit_is_drawn_where_it_is() -> None:
    assert 'x1="75.000%"' in render_bar(PARTS, scale=8, limit=6)
    assert "limit" not in render_bar(PARTS, scale=8)


def test_a_bar_can_be_read_aloud() -> None:
    label = "; ".join(f"{part.label} {part.shown}" for part in PARTS)
    assert f'aria-label="{label}"' in render_bar(PARTS, scale=8)


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


def test_a_chart_lies_within_its_margins() -> None:
    """760 x 320 with margins: 64 at the left, 24 at the right, 34 above and 44 below; y from 10/1.15 to 1150."""
    chart = render_lines(
        [LineSeries("c-a", "rate", [(1, 10), (10, 1000)])], "devices", "rate", [(1, "one"), (10, "ten")]
    )
    assert re.findall(DOT, chart) == [("64.0", "269.1"), ("736.0", "40.9")]
    assert re.findall(r'y="294" text-anchor="middle">(\w+)', chart) == ["one", "ten"]
    assert re.findall(r'text-anchor="end">([\w.]+)', chart) == ["10", "100", "1k"]
    assert re.findall(r"<title>([^<]+)", chart) == ["rate: 10 at 1", "rate: 1k at 10"]


def test_a_chart_of_one_point_has_it_in_the_middle() -> None:
    chart = render_lines([LineSeries("c-a", "rate", [(8, 100)])], "devices", "rate", [(8, "8")])
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart) == [("400.0", "155.0")]


def test_a_line_without_marks_has_no_dots() -> None:
    chart = render_lines([LineSeries("c-a", "rate", [(1, 10), (2, 20)], marked=False)], "devices", "rate", [])
    assert "<circle" not in chart and "<polyline" in chart


def test_a_legend_without_values() -> None:
    assert "<b>3 s</b>" in render_legend(PARTS)
    assert "<b>" not in render_legend(PARTS, with_values=False)


@pytest.mark.parametrize(("value", "shown"), [(2e12, "2T"), (1e9, "1G"), (1.5e6, "1.5M"), (1e3, "1k"), (999.0, "999")])
def test_large_numbers_are_short(value: float, shown: str) -> None:
    chart = render_lines([LineSeries("c-a", "rate", [(1, value), (2, value)])], "devices", "rate", [])
    assert f"<title>rate: {shown} at 1</title>" in chart


def test_even_axes_keep_distances_and_signs() -> None:
    """y from -2 to 2 has a margin of 0.2, within 34 to 276: 55 a unit; x from 0 to 4, within 64 to 736."""
    chart = render_curves([LineSeries("c-a", "loss", [(0, -2), (1, 0), (4, 2)])], "step", "loss")
    places = re.findall(DOT, chart)
    assert places == [("64.0", "265.0"), ("232.0", "155.0"), ("736.0", "45.0")]
    assert re.findall(r'text-anchor="end">([-\w.]+)', chart) == ["-2", "-1", "0", "1", "2"]
    assert re.findall(r'y="294" text-anchor="middle">(\w+)', chart) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 200_000, [50_000, 100_000, 150_000, 200_000]),
        (2.001, 2.004, [2.001, 2.002, 2.003, 2.004]),
        (7, 7, [7]),
        (1e30, 1e30 * (1 + 1e-15), [1e30]),
        (-1e30, 1e30, [-1e30, -5e29, 0, 5e29, 1e30]),
    ],
)
def test_even_ticks_are_round_and_few(low: float, high: float, ticks: list[float]) -> None:
    assert even_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (2.001, 2.004, ["2.001", "2.002", "2.003", "2.004"]),
        (10.0, 10.4, ["10.0", "10.1", "10.2", "10.3", "10.4"]),
        (0.0, 60_000.0, ["0", "20,000", "40,000", "60,000"]),
        (0.0, 3e9, ["0", "1G", "2G", "3G"]),
        (0.0, 3e-9, ["0", "1e-09", "2e-09", "3e-09"]),
    ],
)
def test_even_ticks_have_as_many_digits_as_tell_them_apart(low: float, high: float, shown: list[str]) -> None:
    chart = render_curves([LineSeries("c-a", "loss", [(0, low), (1, high)])], "step", "loss")
    assert re.findall(r'text-anchor="end">([^<]+)', chart) == shown


def test_a_thinned_line_keeps_its_ends_and_the_extremes_of_each_stretch() -> None:
    line = [(float(x), {0: 0.1, 17: 9.0, 42: -9.0, 99: 0.8}.get(x, x / 100)) for x in range(100)]
    assert thin(line, 50) == line
    thinned = thin(line, 4)
    assert len(thinned) <= 4 * 2 + 2
    assert {(0.0, 0.1), (17.0, 9.0), (42.0, -9.0), (99.0, 0.8)} <= set(thinned)
    assert thinned == sorted(thinned)
    assert thin([], 4) == []
