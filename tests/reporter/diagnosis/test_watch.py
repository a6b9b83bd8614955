"""Verdicts on a running run."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.verdict import CodeLine, Look, LookOrder
from trainspec_cli.reporter.diagnosis.watch import LONGEST_S, DiagnosisWatch
from trainspec_cli.run.folder.event_types.events import LookEvent, VerdictEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.files import write_json


@pytest.fixture
def watching(folder):
    run = folder()
    run.start()
    now = [100.0]
    told = []
    run.asked = []
    watch = DiagnosisWatch(run.run, run.asked.append, clock=lambda: now[0])

    def look():
        now[0] += LONGEST_S
        watch.update(lambda event: told.append((event.verdict.cause, event.verdict.rank, event.is_over)))
        return told

    return run, look


def test_a_verdict_is_told_once_when_two_looks_show_it_and_again_when_it_is_over(watching):
    run, look = watching
    run.steps(1, 30)
    assert look() == []
    run.steps(31, 40, slow=1)
    assert look() == []
    assert look() == [("slow_device", 1, False)]
    assert len(look()) == 1
    run.steps(41, 60)
    assert look() == [("slow_device", 1, False), ("slow_device", 1, True)]
    written = [event for event in read_log(run.run.verdicts) if isinstance(event, VerdictEvent)]
    assert [(event.is_over, event.step) for event in written] == [(False, 40), (True, 60)]
    assert written[1].verdict.until_step == pytest.approx(40, abs=2)


def test_a_hang_is_told_at_once(watching, monkeypatch):
    run, look = watching
    run.steps(1, 5)
    for rank in (0, 1, 3):
        run.stall(rank, 6)
    monkeypatch.setattr("trainspec_cli.reporter.diagnosis.gather.SILENT_S", 0.0)
    assert look() == [("hang", 2, False)]


def test_a_damaged_plan_ends_the_watch_and_not_the_run(watching):
    run, look = watching
    run.run.plan_json.write_text("[")
    assert look() == look() == []


def test_a_watch_that_begins_late_reads_no_more_than_the_steps_it_remembers(watching, monkeypatch):
    run, look = watching
    monkeypatch.setattr("trainspec_cli.reporter.diagnosis.watch.REMEMBERED_STEPS", 20)
    parsed = []
    monkeypatch.setattr(
        "trainspec_cli.reporter.diagnosis.gather.RankHistory.add", lambda _, event: parsed.append(event)
    )
    run.steps(1, 200)
    look()
    assert 4 * 20 <= len(parsed) < 4 * 100


def test_a_new_verdict_asks_its_rank_for_a_look_whose_line_is_told_when_it_is_known(watching):
    run, look = watching
    run.steps(1, 30)
    run.steps(31, 40, slow=1)
    look()
    look()
    (order,) = run.asked
    assert (order.number, order.looker, order.cause) == (1, 1, "slow_device")
    line = CodeLine(file="a.py", line=7, function="f", text="spin()", share=0.9)
    run.write(1, LookEvent(step=43, look=Look(order=order, first_step=41, last_step=43, lines=(line,))))
    run.steps(41, 60, slow=1)
    assert len(look()) == len(look()) == 2
    written = [event.verdict.code for event in read_log(run.run.verdicts) if isinstance(event, VerdictEvent)]
    assert written == [None, "a.py:7 (f)"]
    run.steps(61, 90)
    look()
    run.steps(91, 120, slow=1)
    look()
    assert len(look()) == 4, "it is told of again"
    assert run.asked == [order], "and not looked at again"


def test_a_run_that_is_not_to_look_deeper_asks_for_nothing(folder):
    run = folder()
    run.start()
    run.steps(1, 30)
    run.steps(31, 50, slow=1)
    now, told = [100.0], []
    watch = DiagnosisWatch(run.run, clock=lambda: now[0])
    for _ in range(3):
        now[0] += LONGEST_S
        watch.update(told.append)
    assert len(told) == 1


def test_looks_of_earlier_starts_count_by_the_traces_that_they_left(watching):
    run, look = watching
    write_json(run.run.look_trace(4), {"order": to_plain(LookOrder(number=4, looker=2, cause="slow_device", rank=2))})
    run.steps(1, 30)
    run.steps(31, 40, slow=2)
    look()
    look()
    assert run.asked == [], "its place was looked at"
    run.steps(41, 70)
    look()
    run.steps(71, 80, slow=1)
    look()
    look()
    assert [(order.number, order.looker) for order in run.asked] == [(5, 1)]
