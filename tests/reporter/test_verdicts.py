"""Verdicts as lines and as a page."""

from __future__ import annotations

from lab.pages import seen
from lab.recorded import Recorded

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.verdicts import describe_event, render_verdicts, verdicts_section
from trainspec_cli.run.folder.event_types.events import VerdictEvent

SPIN = RunVerdict(cause="host_bound", rank=1, since_step=20, cost_s=0.2, confidence=0.9, code="a/<b>.py:7 (f)")


def test_the_line_of_code_stands_in_the_live_line_the_text_and_the_page(recorded: Recorded):
    event = VerdictEvent(step=30, is_over=False, verdict=SPIN)
    recorded(describe_event(event), render_verdicts([SPIN]).plain, seen(verdicts_section([SPIN])))
    assert "a/&lt;b&gt;.py:7" in verdicts_section([SPIN])
    assert SPIN.as_json()["code"] == "a/<b>.py:7 (f)"


def test_steps_without_a_cause_are_not_said_to_be_as_planned():
    verdict = RunVerdict(
        cause="as_planned", since_step=3, confidence=0.9, evidence=("a step takes 139 ms; 41 ms were planned",)
    )
    assert "as planned" not in render_verdicts([verdict]).plain
