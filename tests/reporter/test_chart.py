from __future__ import annotations

import math

from trainspec_cli.reporter.chart import render_chart, render_overlay


def test_a_falling_line_runs_from_corner_to_corner() -> None:
    lines = render_chart([(0.0, 8.0), (8.0, 0.0)], width=4, height=2).splitlines()
    assert lines == [
        "8 ┤⠑⢄",
        "0 ┤⠀⠀⠑⢄",
        "  └────",
        "   0  8",
    ]


def test_a_flat_curve_is_drawn_in_the_middle() -> None:
    lines = render_chart([(1.0, 5.0), (9.0, 5.0)], width=4, height=3).splitlines()
    drawn = [line for line in lines[:3] if line.partition("┤")[2]]
    assert drawn == [lines[1]]


def test_many_points_on_a_dot_are_drawn_as_their_mean() -> None:
    noisy = [(float(x), 4.0 + (-1.0) ** x) for x in range(1000)]
    highest = render_chart(noisy, width=5, height=8).splitlines()[0]
    assert float(highest.split("┤")[0]) < 4.1


def test_points_that_are_not_finite_are_passed_over() -> None:
    assert render_chart([(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)]) == render_chart([(0.0, 1.0), (2.0, 3.0)])
    assert render_chart([(0.0, math.nan)]) == ""
    assert render_chart([]) == ""


def test_the_order_of_the_points_does_not_matter() -> None:
    points = [(0.0, 1.0), (5.0, 2.0), (9.0, 3.0)]
    assert render_chart([points[1], points[2], points[0]]) == render_chart(points)


def test_the_title_stands_above_and_labels_are_aligned() -> None:
    lines = render_chart([(1.0, 10.5), (400.0, 2.25)], title="loss", width=20, height=10).splitlines()
    assert lines[0] == "loss"
    assert [lines[1][:5], lines[10][:5]] == ["10.5 ", "2.25 "]
    assert len({line.index("┤") for line in lines[1:11]}) == 1
    assert lines[-1].split() == ["1", "400"]


def test_a_flat_curve_below_zero_keeps_the_larger_number_on_top() -> None:
    labels = [line.partition("┤")[0].strip() for line in render_chart([(0, -2.0), (1, -2.0)], height=3).splitlines()]
    assert labels[:3] == ["-1.8", "-2", "-2.2"]


def test_three_labels_for_the_top_the_middle_and_the_bottom() -> None:
    lines = render_chart([(0.0, 0.0), (1.0, 8.0)], width=4, height=5).splitlines()
    assert [line.partition("┤")[0].strip() for line in lines[:5]] == ["8", "", "4", "", "0"]


def test_a_gap_is_crossed_by_a_straight_line() -> None:
    """Ten dots wide and four high: from the lower left to the upper right."""
    (row, *_) = render_chart([(0.0, 0.0), (9.0, 3.0)], width=5, height=1).splitlines()
    dots = [(2 * cell + column, line) for cell, sign in enumerate(row.partition("┤")[2]) for column in (0, 1)
            for line in range(4) if ord(sign) - 0x2800 & ((1, 2, 4, 64), (8, 16, 32, 128))[column][line]]  # fmt: skip
    assert dots == [(x, 3 - round(x / 3)) for x in range(10)]


def test_a_flat_curve_at_zero() -> None:
    assert [line.partition("┤")[0] for line in render_chart([(0, 0.0), (1, 0.0)], height=3).splitlines()[:3]] == [
        " 1 ",
        " 0 ",
        "-1 ",
    ]


def test_curves_on_the_same_axes_are_told_apart_by_their_letters() -> None:
    curves = {"A": [(0.0, 4.0), (4.0, 0.0)], "B": [(0.0, 0.0), (4.0, 0.0)], "C": []}
    assert render_overlay(curves, width=5, height=3, title="loss").splitlines() == [
        "loss",
        "4 ┤A",
        "2 ┤",
        "0 ┤B   *",
        "  └─────",
        "   0   4",
    ]
    assert render_overlay({"A": [(1.0, math.nan)]}) == ""
