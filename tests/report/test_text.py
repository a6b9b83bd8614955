"""Events whose figures were not finite are null, and told as such."""

from __future__ import annotations

from typing import Any

import pytest

from trainspec_cli.report.progress import Progress
from trainspec_cli.report.text import describe_event, describe_progress


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"heldout_bits_per_byte": 2.0, "xz_bits_per_byte": 3.0}, "2.000 bits per byte (xz 3.000), loss not finite"),
        ({"heldout_bits_per_byte": None}, "loss not finite"),
        ({"heldout_accuracy": None}, "accuracy not finite, loss not finite"),
    ],
)
def test_an_evaluation(figures: dict[str, Any], words: str) -> None:
    event = {"type": "eval", "step": 3, "heldout_loss": None, **figures}
    assert describe_event(event) == f"step 3: held out {words}"


def test_a_step() -> None:
    progress = Progress(9)
    progress.take({"type": "step", "step": 1, "loss": None})
    assert describe_progress(progress) == "loss not finite"


def test_a_cadence_where_no_failure_is_expected() -> None:
    event = {"type": "cadence", "step": 1, "interval_steps": 7, "blocked_s": 1.0, "drag_s": 0.0, "written_s": 1.0}
    assert describe_event({**event, "mtbf_s": None}).endswith("; no failures are expected")
