"""The view of a running run, as text."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from lab.recorded import Recorded
from rich.console import Console

from trainspec_cli.reporter import live
from trainspec_cli.reporter.live import LiveView, PlainScreen, showing_progress

PHASES = ("evaluating", "writing", "ending")
MakeView = Callable[..., tuple[LiveView, io.StringIO]]


@pytest.fixture
def make_view(fake_run: Any) -> MakeView:
    def make(terminal: bool = False) -> tuple[LiveView, io.StringIO]:
        output = io.StringIO()
        train = SimpleNamespace(log_interval_steps=5)
        plan: Any = SimpleNamespace(spec=SimpleNamespace(train=train, compile=True), total_steps=20)
        return LiveView(fake_run.dir, plan, Console(file=output, force_terminal=terminal, width=110)), output

    return make


def test_plain_lines_say_what_goes_on_and_come_at_the_interval(
    fake_run: Any, make_view: MakeView, recorded: Recorded
) -> None:
    view, output = make_view()
    view.watch(False)
    view.watch(False)
    fake_run.start()
    view.watch(False)
    for step in range(1, 21):
        fake_run.step(step, loss=1.5)
    fake_run.write("eval", step=20, heldout_loss=1.0, heldout_bits_per_byte=2.0, xz_bits_per_byte=2.5, seconds=1.0)
    fake_run.write("eval", step=20, heldout_loss=1.0, heldout_bits_per_byte=1.0, xz_bits_per_byte=2.5, seconds=1.0)
    fake_run.write("checkpoint", step=20, path="p", bytes=2**20, seconds=0.5)
    fake_run.write("warning", step=20, message="[odd] thing")
    view.watch(False)
    recorded(output.getvalue())


def test_a_request_to_stop_is_answered_at_once_and_once(fake_run: Any, make_view: MakeView, recorded: Recorded) -> None:
    view, output = make_view()
    fake_run.start()
    fake_run.step(1)
    view.watch(False)
    before = len(output.getvalue())
    for step in (2, 3):
        fake_run.step(step)
        view.watch(True)
    recorded(output.getvalue()[before:])


def test_what_an_earlier_start_made_is_not_told_again(fake_run: Any, make_view: MakeView, recorded: Recorded) -> None:
    fake_run.start()
    fake_run.step(5)
    view, output = make_view()
    fake_run.start(step=5)
    view.watch(False)
    recorded(output.getvalue())


def test_a_terminal_shows_a_bar_and_keeps_the_lines(fake_run: Any, make_view: MakeView) -> None:
    view, output = make_view(terminal=True)
    with view:
        fake_run.start()
        for step in range(1, 11):
            fake_run.step(step)
        fake_run.write("checkpoint", step=10, path="p", bytes=2**20, seconds=0.5)
        view.watch(False)
    shown = output.getvalue()
    assert "step 10: checkpoint, 1.00 MiB" in shown
    assert "step 10/20" in shown
    assert "100 tokens/s · 5.0% MFU · 10.0 s left" in shown


def test_phases_of_the_preparation_are_told_once() -> None:
    output = io.StringIO()
    with showing_progress(Console(file=output)) as on_progress:
        for done in (0.1, 0.5):
            on_progress("reading", done)
        on_progress("encoding", 0.7)
    assert output.getvalue().splitlines() == ["reading", "encoding"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_rows_and_their_rate_are_shown_while_data_is_read(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    now_s = itertools.count(0.0, 5.0)
    monkeypatch.setattr("trainspec_cli.reporter.live.time.monotonic", lambda: next(now_s))
    output = io.StringIO()
    with showing_progress(Console(file=output, force_terminal=is_terminal, width=90)) as on_progress:
        for rows in (100, 1200, 2400):
            on_progress("reading", 0.1, rows)
    assert "2,400 rows, " in output.getvalue()
    assert output.getvalue().count("reading\n") == (0 if is_terminal else 1)


def test_what_follows_the_last_step_is_named(
    fake_run: Any, make_view: MakeView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only phases that take long have a line."""
    figures = {"heldout_loss": 1.0, "heldout_bits_per_byte": 2.0}
    shown = {}
    for quick_s in (0.0, 1000.0):
        monkeypatch.setattr(live, "QUICK_S", quick_s)
        view, output = make_view()
        fake_run.start()
        fake_run.step(19)
        fake_run.step(20)
        view.watch(False)
        fake_run.write("eval", step=20, **figures)
        fake_run.write("checkpoint", step=20, path="p", bytes=2**20, seconds=0.5)
        fake_run.write("end", step=20, status="done")
        view.watch(False)
        shown[quick_s] = [line for line in output.getvalue().splitlines() if line.partition(" ")[0] in PHASES]
    assert shown[0.0] == ["evaluating", "writing the checkpoint", "writing the result", "ending the workers"]
    assert shown[1000.0] == []


def test_a_stop_before_there_is_anything_to_save_says_so(fake_run: Any, make_view: MakeView) -> None:
    view, output = make_view()
    view.watch(True)
    assert output.getvalue() == "stopping\n"


def test_the_last_step_is_shown_whatever_the_interval(fake_run: Any, make_view: MakeView) -> None:
    view, output = make_view()
    view._screens = [PlainScreen(Console(file=output, width=110), interval_steps=7)]
    fake_run.start()
    for step in (*range(1, 9), 20):
        fake_run.step(step)
        view.watch(False)
        view.watch(False)
    shown = [line.partition(":")[0] for line in output.getvalue().splitlines() if line.startswith("step")]
    assert shown == ["step 7/20", "step 20/20"]


def test_the_preparation_has_a_bar_on_a_terminal_which_goes_away() -> None:
    output = io.StringIO()
    with showing_progress(Console(file=output, force_terminal=True, width=60)) as on_progress:
        on_progress("encoding", 0.5)
    shown = output.getvalue()
    assert "encoding" in shown and "\x1b[2K" in shown, "a line is cleared at the end"


def test_advice_that_comes_and_goes_is_told_ever_more_rarely(fake_run: Any, make_view: MakeView) -> None:
    view, output = make_view()
    fake_run.start()
    for step in range(1, 21):
        fake_run.step(step, loss=1.5)
        share = {"counts": [step, 3], "micro_batch_size": 1, "micro_batches": 4, "reason": "r", "number": step}
        timing = {"before_s": 1.0, "expected_s": 0.5}
        fake_run.write("directive", step=step, applied=step == 19, **share, **timing)
    view.watch(False)
    told = [line for line in output.getvalue().splitlines() if "shares" in line]
    assert [line.split(":")[0] for line in told] == [f"step {step}" for step in (1, 2, 4, 8, 16, 19)]
