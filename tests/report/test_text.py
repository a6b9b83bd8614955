"""Events whose figures were not finite are null, and told as such."""

from __future__ import annotations

from typing import Any

import pytest

from trainspec_cli.report.progress import Progress
from trainspec_cli.report.text import describe_event, describe_progress
from trainspec_cli.rundir.event_types import CadenceEvent, EvalEvent, StepEvent


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({"heldout_bits_per_byte": 2.0, "xz_bits_per_byte": 3.0}, "2.000 bits per byte (xz 3.000), loss not finite"),
        ({"heldout_bits_per_byte": None}, "loss not finite"),
        ({"heldout_accuracy": None}, "accuracy not finite, loss not finite"),
    ],
)
def test_an_evaluation(figures: dict[str, Any], shown: str) -> None:
    event = EvalEvent(step=3, heldout_loss=None, **figures)
    assert describe_event(event) == f"step 3: held out {shown}"


def test_a_step() -> None:
    progress = Progress(9)
    figures: dict[str, Any] = {"grad_norm": None, "tokens": 1, "step_time_s": 1.0, "time_s": {}}
    progress.take(StepEvent(step=1, loss=None, skipped=True, **figures))
    assert describe_progress(progress) == "loss not finite"


def test_a_cadence_where_no_failure_is_expected() -> None:
    event = CadenceEvent(step=1, interval_steps=7, blocked_s=1.0, drag_s=0.0, written_s=1.0, step_time_s=1.0)
    assert describe_event(event).endswith("; no failures are expected")
