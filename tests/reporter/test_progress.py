from __future__ import annotations

from typing import Any

import pytest

from trainspec_cli.reporter.progress import Progress
from trainspec_cli.run.folder.events import read_log


def progress_after(run: Any, steps: int) -> Progress:
    run.start()
    for step in range(1, steps + 1):
        run.step(step, seconds=60.0 if step <= 3 else 2.0)
    progress = Progress(max_steps=20)
    for event in read_log(run.dir.events(0)):
        progress.add(event)
    return progress


def test_figures_wait_for_steps_that_mean_something(fake_run: Any) -> None:
    progress = progress_after(fake_run, steps=3)
    assert (progress.step, progress.loss, progress.has_stepped) == (3, 2.0, True)
    assert (progress.tokens_per_s, progress.mfu, progress.time_left_s) == (None, None, None)


def test_the_time_left_follows_from_the_recent_steps(fake_run: Any) -> None:
    progress = progress_after(fake_run, steps=10)
    assert progress.tokens_per_s == pytest.approx(50.0)
    assert progress.mfu == pytest.approx(50.0 * 1e6 / 2e9)
    assert progress.time_left_s == pytest.approx(10 * 2.0)


def test_a_resumed_run_begins_at_its_step(fake_run: Any) -> None:
    fake_run.start(step=7)
    progress = Progress(max_steps=20)
    for event in read_log(fake_run.dir.events(0)):
        progress.add(event)
    assert progress.begin is not None
    assert (progress.step, progress.has_stepped, progress.begin.step) == (7, False, 7)
