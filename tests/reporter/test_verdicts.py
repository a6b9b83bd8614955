"""Verdicts as lines and as a page."""

from __future__ import annotations

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.verdicts import describe_event, render_verdicts, verdicts_section
from trainspec_cli.run.folder.event_types.events import VerdictEvent

SPIN = RunVerdict(cause="host_bound", rank=1, since_step=20, cost_s=0.2, confidence=0.9, code="a/<b>.py:7 (f)")


def test_the_line_of_code_stands_in_the_live_line_the_text_and_the_page():
    event = VerdictEvent(step=30, is_over=False, verdict=SPIN)
    assert describe_event(event) == "host bound, rank 1, since step 20: 200 ms per step, 90% sure, at a/<b>.py:7 (f)"
    assert "\n  line of code: a/<b>.py:7 (f)\n" in render_verdicts([SPIN]).plain
    assert "Line of code: a/&lt;b&gt;.py:7 (f)" in verdicts_section([SPIN])
    assert SPIN.as_json()["code"] == "a/<b>.py:7 (f)"


def test_steps_without_a_cause_are_not_said_to_be_as_planned():
    verdict = RunVerdict(
        cause="as_planned", since_step=3, confidence=0.9, evidence=("a step takes 139 ms; 41 ms were planned",)
    )
    assert "as planned" not in render_verdicts([verdict]).plain
