"""The plot of predicted against measured, of groups whose names come from a table."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from trainspec_cli.reporter.backtest import render_scatter

DOT = r'<circle cx="([\d.]+)" cy="([\d.]+)" r="2.2"'


def test_names_are_text_alone() -> None:
    hostile = "<script>alert(1)</script>\"'&\x1b]0;owned\x07\u202e"
    drawn = render_scatter([(1.0, 1.1, hostile), (2.0, 2.1, "plain")])
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert "<script>alert(1)</script>\"'&\\x1b]0;owned\\x07\\u202e" in texts
    assert "<script" not in drawn


def test_dots_lie_on_logarithmic_axes_of_whole_decades() -> None:
    """560 wide with margins of 56: from 1 s to 100 s a decade is 224 wide, and up is less."""
    drawn = render_scatter([(1.0, 10.0, "b"), (10.0, 100.0, "a")])
    assert re.findall(DOT, drawn) == [("56.0", "280.0"), ("280.0", "56.0")]
    labels = re.findall(r'text-anchor="(middle|end)">([\d.]+ s)<', drawn)
    assert labels == [(place, text) for text in ("1 s", "10 s", "100 s") for place in ("middle", "end")]
    assert 'x1="56.0" y1="504.0" x2="504.0" y2="56.0" stroke="#99a"' in drawn, "the line of no error is the diagonal"


def test_points_of_one_size_have_a_decade_around_them() -> None:
    assert re.findall(DOT, render_scatter([(1.0, 1.0, "a")])) == [("56.0", "504.0")]


def test_each_group_has_a_colour_of_its_own() -> None:
    drawn = render_scatter([(1.0, 1.0, "b"), (1.0, 2.0, "a"), (1.0, 3.0, "b")])
    fills = re.findall(r'<circle [^>]*fill="(#\w+)"[^>]*fill-opacity', drawn)
    assert len(fills) == 3 and fills[0] == fills[2] != fills[1]


def test_each_decades_figure_stands_beside_its_line() -> None:
    drawn = render_scatter([(1.0, 10.0, "b"), (10.0, 100.0, "a")])
    below = re.findall(r'<text x="([\d.]+)" y="(\d+)" text-anchor="middle">[\d.]+ s<', drawn)
    left = re.findall(r'<text x="(\d+)" y="([\d.]+)" text-anchor="end">[\d.]+ s<', drawn)
    assert below == [("56.0", "520"), ("280.0", "520"), ("504.0", "520")], "16 below the frame"
    assert left == [("50", "508.0"), ("50", "284.0"), ("50", "60.0")], "6 left of it, its middle at the line"


def test_the_axes_reach_to_the_smallest_and_largest_of_both_times() -> None:
    drawn = render_scatter([(0.05, 30.0, "a"), (200.0, 20.0, "b")])
    labels = re.findall(r'text-anchor="middle">([\d.]+) s<', drawn)
    assert labels == ["0.01", "0.1", "1", "10", "100", "1000"]
    (low_x, low_y), (high_x, high_y) = ((float(x), float(y)) for x, y in re.findall(DOT, drawn))
    assert low_x == round(56 + 0.69897 / 5 * 448, 1) and high_x == round(56 + 4.30103 / 5 * 448, 1)
    assert low_y == round(504 - 3.477121 / 5 * 448, 1) and low_y < high_y
    names = re.findall(r'<circle cx="68" cy="(\d+)"[^>]*/>\n<text x="77" y="(\d+)">(\w)<', drawn)
    assert names == [("64", "68", "a"), ("79", "83", "b")]
