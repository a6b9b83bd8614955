"""The page of a run: whole, alone, harmless, and true to the figures of `report --json`."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from typing import Any

import pytest
from lab.events import ACHIEVED, DIRECTIVE, LEFT_OUT, LEFT_OUT_ACHIEVED, MEMORY, write_event
from lab.pages import HOSTILE, assert_alone, assert_harmless, seen, widths, with_one_text_replaced
from lab.recorded import Recorded

from trainspec_cli.recipe.results.plan import LocalPrediction
from trainspec_cli.recipe.results.verdict import RunVerdict, WhatIf
from trainspec_cli.reporter.collect import Report, collect
from trainspec_cli.reporter.page.parts import STYLE, PageOrigin
from trainspec_cli.reporter.run_page import MOST_LINES, PART_KINDS, render_run_page
from trainspec_cli.reporter.verdicts import MOST_VERDICTS, render_verdicts_page
from trainspec_cli.run.folder.accounting import WallTime
from trainspec_cli.run.folder.event_types.events import PARTS, EvalEvent, WarningEvent
from trainspec_cli.run.folder.files import write_json

SLOW = RunVerdict(
    cause="slow_device",
    rank=1,
    since_step=6,
    cost_s=0.035,
    confidence=0.93,
    evidence=("rank 1 computes for 60 ms", "Thread 1:\n  File a.py"),
    advice="look at its clock",
)
BOUND = RunVerdict(cause="as_planned", confidence=0.9, what_if=(WhatIf("a device twice as fast", 0.5, 0.4),))


@pytest.fixture
def report(fake_run: Any) -> Report:
    """A run with everything that a page shows: two ranks, a resume, a failure, changes, and a plan."""
    fake_run.about()
    write_json(fake_run.dir.plan_json, {"spec": {"train": {"max_steps": 20}, "run": {"name": "first"}}})
    for rank in (0, 1):
        fake_run.start(rank=rank)
        for step in range(1, 6):
            fake_run.step(step, rank, loss=10.0 - step)
        fake_run.start(step=5, rank=rank)
        for step in range(6, 21):
            parts = dict.fromkeys(PARTS, 0.1) | {"forward": 0.4 * (rank + 1), "checkpoint": 0.0}
            fake_run.step(step, rank, loss=10.0 - step / 4, skipped=step == 7, **parts)
    for step in (10, 20):
        fake_run.write("eval", step=step, heldout_loss=20.0 / step, heldout_bits_per_byte=2.5)
    fake_run.write("recovery", step=5, change="left", group=1, stall_s=1.26, lost_steps=1)
    fake_run.write("checkpoint", step=20, path="p", bytes=3 * 2**30, seconds=0.5, written_s=4.0)
    fake_run.write("warning", step=7, message="slow disk")
    fake_run.write("sample", step=20, prompt="def ", text="main(argv):\n    [return]")
    link = {"axis": "tp", "ranks": [2, 3], "before_bytes_per_s": 9.6e9, "now_bytes_per_s": 1.2e9, "since_step": 5}
    fake_run.write("link", step=9, **link)
    for event in (DIRECTIVE, ACHIEVED, MEMORY, LEFT_OUT, LEFT_OUT_ACHIEVED):
        write_event(fake_run.dir.directives, event)
    fake_run.result(status="stopped", exit_code=6, peak_memory_bytes=3 * 2**30, weights_sha256="ab12")
    return replace(
        collect(fake_run.dir.root),
        path="runs/tiny",
        elapsed_s=90.0,
        predicted=LocalPrediction({"forward": 0.5, "backward": 0.75}, {"parameters": 2.0**31}),
        time_s=WallTime(productive=90.0, checkpoint=6.0, idle=24.0),
        goodput=0.75,
        verdicts=(SLOW, BOUND),
    )


def part_of(page: str, title: str) -> str:
    """The section with this title."""
    (found,) = [part for part in page.split("<section>") if part.startswith(f"<h2>{title}</h2>")]
    return found.partition("</section>")[0]


def cells_of(page: str, title: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", part_of(page, title).partition("<tbody>")[2])
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_a_page_is_whole_and_says_where_it_comes_from(report: Report) -> None:
    origin = PageOrigin("2026-11-23", "0.4", "trainspec report last --html 'a<b>'")
    for page in (render_run_page(report, "a: 1", origin), render_verdicts_page(report, origin)):
        assert_alone(page)
        assert f"2026-11-23, trainspec 0.4: <code>{escape(origin.command)}</code>" in page
        assert "first: stopped" in page[: page.index("</title>")]


def test_a_page_shows_each_figure_in_its_place(report: Report, recorded: Recorded) -> None:
    """Each figure follows from those of `report`."""
    recorded.screen("run_page.txt", seen(render_run_page(report, "model:\n  name: tiny\n")))
    assert [kind for kind in PART_KINDS.values() if f".{kind} {{" not in STYLE.read_text()] == []


def test_of_many_changes_the_newest_are_drawn(report: Report) -> None:
    assert cells_of(render_run_page(report), "Recoveries") == [["5", "group 1 left", "1.26 s, 1 step lost"]]
    many = replace(report, directives=tuple(replace(DIRECTIVE, step=step) for step in range(1000, 2000)))
    rows = cells_of(render_run_page(many), "Scheduler")
    assert len(rows) == MOST_LINES and rows[-1][0] == "1,999"


def test_verdicts_have_their_evidence_and_advice_on_both_pages(report: Report, recorded: Recorded) -> None:
    page = render_verdicts_page(report)
    assert part_of(page, "Diagnosis") == part_of(render_run_page(report), "Diagnosis")
    assert "Loss" not in render_verdicts_page(report).partition("<body>")[2]
    many = replace(report, verdicts=(SLOW,) * (MOST_VERDICTS + 2))
    assert "2 less expensive ones" in render_verdicts_page(many)
    recorded(seen(page), seen(render_verdicts_page(replace(report, verdicts=()))))


def test_the_recipe_is_there_and_closed(report: Report) -> None:
    recipe = "model:\n  name: <b>tiny</b>\n"
    page = render_run_page(report, recipe)
    assert f"<summary>Recipe</summary><pre>{escape(recipe)}</pre></details>" in page
    assert "Recipe" not in render_run_page(report)


def test_no_text_of_a_run_is_more_than_text(report: Report) -> None:
    """Every text by itself, but for the name of a part of a step, which no run writes."""
    shown = 0
    for hostile in with_one_text_replaced(report):
        if hostile.speed and [part.name for part in hostile.speed.parts] != list(PARTS):
            continue
        for page in (render_run_page(hostile), render_verdicts_page(hostile)):
            assert_harmless(page)
            shown += "&lt;script&gt;" in page
    assert shown > 25
    assert_harmless(render_run_page(report, HOSTILE))


def curve_of(page: str, kind: str) -> list[tuple[float, ...]]:
    drawn = re.search(rf'<polyline class="line {kind}" points="([^"]+)"', page)
    assert drawn
    return [tuple(map(float, pair.split(","))) for pair in drawn[1].split()]


STEPS, SPIKE = 200_000, 123_457


def test_a_page_of_a_long_run_is_small_and_keeps_what_shows(report: Report) -> None:
    """First, last, and the one step that stands out, which lies at the top of the chart."""
    loss = tuple((step, 50.0 if step == SPIKE else 4.0 - step / STEPS) for step in range(1, STEPS + 1))
    long = replace(
        report,
        loss=loss,
        evaluations=tuple(EvalEvent(step=s, heldout_loss=3.0, heldout_bits_per_byte=1.0) for s in range(1, STEPS, 50)),
        checkpoints=report.checkpoints * 5000,
        warnings=tuple(WarningEvent(step=step, message="x" * 5000) for step in range(5000)),
        directives=report.directives * 5000,
        verdicts=(replace(SLOW, evidence=("x" * 20_000,) * 3),) * 500,
        skipped_steps=tuple(range(STEPS)),
    )
    page = render_run_page(long, "a: 1\n" * 10_000)
    assert_alone(page)
    assert len(page.encode()) < 1e6
    points, heldout = curve_of(page, "c-measure"), curve_of(page, "c-heldout")
    assert 100 < len(points) < 1000 and len(heldout) < 100
    assert (points[0][0], points[-1][0]) == (64.0, 736.0)
    top = min(points, key=lambda point: point[1])
    assert top[0] == pytest.approx(64 + 672 * SPIKE / STEPS, abs=0.1)
    assert top[1] == pytest.approx(34 + 242 / 22, abs=0.1), "a twentieth of what is drawn lies above it"
    assert "Of 200,000 steps" in page


def test_losses_that_were_not_finite_are_told(report: Report, recorded: Recorded) -> None:
    page = render_run_page(replace(report, loss=((1, 2.0), (2, None)), final_loss=None))
    recorded(seen(part_of(page, "Loss")), seen(page[: page.index("<section>")]))
    none = render_run_page(replace(report, loss=((1, None),), evaluations=()))
    assert "<svg" not in part_of(none, "Loss") and "not finite: 1." in part_of(none, "Loss")


def test_a_run_without_steps_has_a_page(fake_run: Any) -> None:
    fake_run.about()
    for page in (render_run_page(collect(fake_run.dir.root)), render_verdicts_page(collect(fake_run.dir.root))):
        assert_alone(page)
        assert "made, 0 of 20 steps" in page
    fake_run.start()
    page = render_run_page(collect(fake_run.dir.root, running=True))
    assert_alone(page)
    assert "No steps yet." in page and "in progress" in page


def test_steps_that_took_no_time_have_a_page(fake_run: Any) -> None:
    fake_run.about()
    fake_run.start()
    fake_run.step(1, seconds=0.0)
    report = collect(fake_run.dir.root)
    assert_alone(render_run_page(report))
    strange = LocalPrediction({"forward": 1.0, "backward": -1.0}, {})
    page = render_run_page(replace(report, predicted=strange))
    assert_alone(page)
    assert widths(page, "c-forward") == [100.0]


def test_a_run_without_evaluations_has_a_page(fake_run: Any) -> None:
    fake_run.about()
    fake_run.start()
    fake_run.step(1, loss=2.0)
    page = render_run_page(collect(fake_run.dir.root))
    assert_alone(page)
    assert page.count("<polyline") == 3 and "held-out" not in page.lower()
    assert "[circle dot c-measure cx=400.0 cy=155.0]" in seen(page).splitlines(), "one step alone shows"
