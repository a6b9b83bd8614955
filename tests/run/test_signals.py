"""Requests to stop, as signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainspec_cli.run.signals import PatientRequests, StopRequests, interrupt, on_stop_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_counts_while_the_block_runs_and_the_former_handler_comes_back(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda *_: heard.append(1))
    try:
        requests = StopRequests()
        with on_stop_signal(requests.add):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert (requests.count, heard) == (2, [])
        os.kill(os.getpid(), number)
        assert (requests.count, heard) == (2, [1])
    finally:
        signal.signal(number, before)


@pytest.fixture
def hangups() -> Iterator[list[int]]:
    """Counts those that no block hears."""
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda *_: heard.append(1))
    yield heard
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_once_however_many_signals_come(hangups: list[int]) -> None:
    outer, inner = StopRequests(), StopRequests()
    with on_stop_signal(outer.add):
        with on_stop_signal(inner.add):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            assert inner.count == 1
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.count == 2
        os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    assert (outer.count, hangups) == (0, [])


def test_without_a_hangup_its_handler_comes_back(hangups: list[int]) -> None:
    with on_stop_signal(interrupt):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
    assert hangups == [1]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A run started with `nohup` ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        requests = StopRequests()
        with on_stop_signal(requests.add):
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_comes_back_after_an_error_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), on_stop_signal(interrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_scheduler_that_repeats_itself_asks_once() -> None:
    requests = PatientRequests()
    assert requests.count == 0
    requests.add()
    requests.add()
    assert requests.count == 1
