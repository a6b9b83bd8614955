"""Moments on the host's clock, and on a GPU's stream, whose events are stand-ins here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.engine import digest as marks
from trainspec_cli.engine.digest import elapsed_s, mark, wait_for


class Event:
    """An event of a stream whose clock the test moves, in milliseconds."""

    now_ms = 0.0
    waited = 0

    def __init__(self, *, enable_timing: bool):
        assert enable_timing
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, end: Any) -> float:
        return end.at_ms - self.at_ms


def test_a_gpus_moments_are_events_and_seconds_lie_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "torch", SimpleNamespace(Event=Event))
    Event.now_ms, Event.waited = 1000.0, 0
    start = mark(on_gpu=True)
    Event.now_ms = 3500.0
    end = mark(on_gpu=True)
    assert elapsed_s(start, end) == 2.5
    assert Event.waited == 0, "the host continues"
    wait_for(end)
    assert Event.waited == 1
    wait_for(7.0)
    assert Event.waited == 1


def test_the_hosts_moments_are_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "time", SimpleNamespace(perf_counter=lambda: 12.5))
    assert mark(on_gpu=False) == 12.5
    assert elapsed_s(10.0, 12.5) == 2.5
