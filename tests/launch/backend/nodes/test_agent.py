"""An agent that no longer hears the hub: when it comes back, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainspec_cli.errors import MachineError
from trainspec_cli.launch.backend.nodes import agent
from trainspec_cli.launch.backend.nodes.agent import CUT_OFF


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "RETURN_INTERVAL_S", 0.0)


def unreachable(cause: OSError) -> MachineError:
    error = MachineError("no way")
    error.__cause__ = cause
    return error


def serving(*ends: int | MachineError) -> Callable[[], int]:
    """Each call ends as said; one call more than that fails the test."""
    left = list(ends)

    def serve() -> int:
        end = left.pop(0)
        if isinstance(end, MachineError):
            raise end
        return end

    return serve


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ((0,), 0),
        ((CUT_OFF, 0), 0),
        ((CUT_OFF, unreachable(TimeoutError()), CUT_OFF, unreachable(OSError()), 0), 0),
        ((CUT_OFF, unreachable(ConnectionRefusedError())), CUT_OFF),
    ],
)
def test_who_was_cut_off_comes_back_while_there_is_a_hub(ends: tuple[int | MachineError, ...], code: int) -> None:
    assert agent._keep_serving(serving(*ends), lambda: True) == code


def test_nobody_comes_back_to_a_run_that_is_over() -> None:
    assert agent._keep_serving(serving(CUT_OFF), lambda: False) == CUT_OFF
