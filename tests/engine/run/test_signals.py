"""Requests to stop, as the signals that a worker gets."""

import os
import signal
from collections.abc import Iterator

import pytest

from trainspec_cli.engine.run.faults import STOP_SIGNALS, StopRequest


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give the signals their handlers back."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_is_a_request_to_stop(number: signal.Signals) -> None:
    others = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest().listen()
    assert not stop.requested
    os.kill(os.getpid(), number)
    assert stop.requested
    assert signal.getsignal(signal.SIGUSR1) is others, "NCCL keeps it for itself"
