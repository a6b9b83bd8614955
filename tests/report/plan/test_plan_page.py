"""The page: whole, well-formed, self-contained, and true to the numbers."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.printable import is_printable
from trainspec_cli.report.plan.labels import LOST_PARTS, MEMORY_PARTS, TIME_PARTS
from trainspec_cli.report.plan.page import STYLE, render_plan_page, render_sweep_page


class Balance(HTMLParser):
    """Raises where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_whole(page: str) -> None:
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


def widths(page: str, kind: str) -> list[float]:
    return [float(width) for width in re.findall(rf'class="segment {kind}"[^>]* width="([\d.]+)%"', page)]


@pytest.mark.parametrize("which", ["plan", "infeasible", "sweep"])
def test_the_page_is_whole_and_needs_no_network(which: str, request: pytest.FixtureRequest) -> None:
    drawn = request.getfixturevalue(which)
    page = render_sweep_page(drawn) if which == "sweep" else render_plan_page(drawn)
    assert_whole(page)
    assert not re.search(r"https?://|src=|@import|<script|<link", page)
    assert page.startswith("<!doctype html>")


def test_bars_are_as_long_as_what_they_show(plan: dict[str, Any]) -> None:
    page = render_plan_page(plan)
    matmul, bubble = widths(page, "c-matmul_s"), widths(page, "c-bubble_s")
    assert matmul[0] / bubble[0] == pytest.approx(8, rel=0.01)
    assert len(widths(page, "c-parameters_bytes")) == 2  # one for each stage
    lost, elastic = widths(page, "c-restart")[0], widths(page, "c-stall")[0]
    assert lost / elastic == pytest.approx(2, rel=0.01)


def test_a_cut_that_is_not_even_is_told(plan: dict[str, Any]) -> None:
    assert "pipeline stages" not in render_plan_page(plan)
    plan["best"]["layout"]["stage_layers"] = [17, 15]
    assert "Layers of its pipeline stages: 17, 15." in render_plan_page(plan)


def test_text_from_a_recipe_is_escaped(plan: dict[str, Any]) -> None:
    plan["model"]["name"] = "<b>llama</b>"
    page = render_plan_page(plan)
    assert "<b>llama</b>" not in page and "&lt;b&gt;llama&lt;/b&gt;" in page
    assert "a survey &lt;2024&gt;" in page


HOSTILE = "<script>alert(1)</script>'\"><img onerror=x>&\x1b]0;owned\x07\u202e"


@pytest.mark.parametrize("which", ["plan", "infeasible", "sweep"])
def test_no_text_of_a_plan_is_more_than_text(which: str, request: pytest.FixtureRequest) -> None:
    """Every text by itself, but for words that the page looks up."""
    drawn, shown = request.getfixturevalue(which), 0
    for holder, key in text_places(drawn):
        kept, holder[key] = holder[key], HOSTILE
        try:
            page = render_sweep_page(drawn) if which == "sweep" else render_plan_page(drawn)
        except (KeyError, StopIteration):  # a word that is looked up
            continue
        finally:
            holder[key] = kept
        assert_whole(page)
        assert "<script" not in page and "<img" not in page and is_printable(page), key
        shown += "&lt;script&gt;" in page
    assert shown > 5


def text_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(a dict or list, the key of a text in it)"""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        if isinstance(item, str):
            yield value, key
        elif isinstance(item, dict | list):
            yield from text_places(item)


def test_what_was_not_checked_is_flagged(plan: dict[str, Any]) -> None:
    assert render_plan_page(plan).count('class="flag"') == 1


def test_a_page_of_what_does_not_fit_says_what_would(infeasible: dict[str, Any]) -> None:
    page = render_plan_page(infeasible)
    assert "No layout fits" in page and "<li>recompute=full</li>" in page
    assert "time to train" not in page


def test_a_sweep_has_its_chart_and_the_last_plan_that_fits(sweep: dict[str, Any]) -> None:
    page = render_sweep_page(sweep)
    assert page.count("<polyline") == 2
    assert page.count("<circle") == 2
    assert "cluster.num_nodes=4" in page
    assert "nothing fits: recompute=full" in page


def test_a_sweep_of_which_nothing_fits_shows_the_last_point(sweep: dict[str, Any]) -> None:
    for value, point in zip(("1", "2", "8"), sweep["points"], strict=True):
        point["values"], point["plan"] = {"cluster.num_nodes": value}, sweep["points"][0]["plan"]
    assert "In detail: <code>cluster.num_nodes=8</code>" in render_sweep_page(sweep)


def test_a_sweep_shows_the_last_point_that_fits(sweep: dict[str, Any]) -> None:
    sweep["points"].reverse()
    for value, point in zip(("4", "2", "1"), sweep["points"], strict=True):
        point["values"] = {"cluster.num_nodes": value}
    assert "In detail: <code>cluster.num_nodes=2</code>" in render_sweep_page(sweep)


def test_a_model_without_a_name_is_called_by_its_family(plan: dict[str, Any]) -> None:
    plan["model"]["name"] = ""
    assert "<title>decoder on " in render_plan_page(plan)


def test_every_part_has_a_colour() -> None:
    style = STYLE.read_text()
    missing = [key for key in (*MEMORY_PARTS, *TIME_PARTS, *LOST_PARTS) if f".c-{key}" not in style]
    assert missing == []


EXPECTED = Path(__file__).parent / "expected"
"""The pages' texts and shapes, read through once by a person; each figure follows from those of conftest.py."""
PLACES = ("x", "y", "x1", "x2", "y1", "y2", "width", "height", "cx", "cy", "points")
SHAPES = ("rect", "line", "circle", "polyline", "text")
MARKED = ("best", "number", "meter", "flag", "refusal")


class Seen(HTMLParser):
    """Lists the texts of a page, the classes and places of its shapes, and what is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._in_style = tag == "style"
        kind = given.get("class") or ""
        if tag in SHAPES:
            places = [f"{name}={given[name]}" for name in PLACES if name in given]
            self.lines.append(" ".join([f"[{tag}", kind, *places]) + "]")
        elif kind in MARKED:
            self.lines.append(f"[{kind}]")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._in_style:
            self.lines.append(data.strip())


def seen(page: str) -> str:
    reader = Seen()
    reader.feed(page)
    return "\n".join(reader.lines) + "\n"


@pytest.mark.parametrize("which", ["plan", "infeasible", "sweep"])
def test_a_page_shows_each_figure_in_its_place(which: str, request: pytest.FixtureRequest) -> None:
    drawn = request.getfixturevalue(which)
    page = render_sweep_page(drawn) if which == "sweep" else render_plan_page(drawn)
    assert seen(page) == (EXPECTED / f"{which}_page.txt").read_text()
