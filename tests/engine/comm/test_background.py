"""A background thread: order, errors, and the records."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from itertools import pairwise

import pytest
import torch
from lab.waiting import PATIENCE_S

from trainspec_cli.engine.comm import forking as background
from trainspec_cli.engine.comm.forking import Background

CPU = torch.device("cpu")


def test_pieces_run_in_order_beside_the_main_thread() -> None:
    noted: list[tuple[float, float]] = []
    beside, gate, done = Background(CPU, lambda *times: noted.append(times)), threading.Event(), list[int]()
    beside.wait()  # nothing was started
    beside.start(lambda: gate.wait(PATIENCE_S) and done.append(0))  # type: ignore[func-returns-value]
    for number in (1, 2):
        beside.start(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not done, "the first one waits for the main thread"
    gate.set()
    beside.wait()
    assert done == [0, 1, 2]
    assert len(noted) == 3
    assert all(begin <= end <= later for (begin, end), (later, _) in pairwise(noted))


def test_after_an_error_nothing_runs_until_the_main_thread_has_it() -> None:
    beside, done = Background(CPU, lambda *_: None), list[int]()

    def fail() -> None:
        raise RuntimeError("lost")

    beside.start(fail)
    beside.start(lambda: done.append(1))
    with pytest.raises(RuntimeError, match="lost"):
        beside.wait()
    beside.start(lambda: done.append(2))
    beside.wait()
    assert done == [2]


def test_what_is_done_is_held_no_longer() -> None:
    """A gradient would live until the next step's."""
    beside, tensor = Background(CPU, lambda *_: None), torch.ones(3)
    held = weakref.ref(tensor)
    beside.start(lambda tensor=tensor: tensor.mul_(2))  # type: ignore[misc]
    beside.wait()
    assert tensor.tolist() == [2, 2, 2]
    del tensor
    gc.collect()
    assert held() is None


def test_a_piece_waits_for_what_it_follows_and_that_is_no_time_of_its_own() -> None:
    noted, gate, begun = list[tuple[float, float]](), threading.Event(), threading.Event()
    beside, opened_s = Background(CPU, lambda *times: noted.append(times)), list[float]()
    beside.start(begun.set, after=lambda: gate.wait(PATIENCE_S))
    assert not begun.wait(0.01)
    opened_s.append(time.perf_counter())
    gate.set()
    beside.wait()
    assert begun.is_set() and noted[0][0] >= opened_s[0]


def test_the_main_thread_waits_where_too_many_pieces_wait() -> None:
    beside, gate, order = Background(CPU, lambda *_: None, most_waiting=1), threading.Event(), list[str]()
    running = threading.Event()
    beside.start(lambda: (running.set(), gate.wait(PATIENCE_S), order.append("first")))  # type: ignore[func-returns-value]
    assert running.wait(PATIENCE_S)
    beside.start(lambda: order.append("second"))
    giving = threading.Thread(target=lambda: (beside.start(lambda: None), order.append("given")))  # type: ignore[func-returns-value]
    giving.start()
    giving.join(0.01)
    assert order == []
    gate.set()
    giving.join(PATIENCE_S)
    beside.wait()
    assert order[0] == "first" and set(order) == {"first", "second", "given"}


def test_the_thread_ends_once_all_is_done() -> None:
    others, beside, done = set(threading.enumerate()), Background(CPU, lambda *_: None), list[int]()
    beside.close()  # nothing was started
    beside.start(lambda: done.append(1))
    (own,) = set(threading.enumerate()) - others
    beside.close()
    own.join(PATIENCE_S)
    assert done and not own.is_alive()


def test_an_error_is_raised_by_the_next_start() -> None:
    beside = Background(CPU, lambda *_: None)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("lost")

    beside.start(fail)
    assert failed.wait(PATIENCE_S)
    beside._given.join()
    with pytest.raises(RuntimeError, match="lost"):
        beside.start(lambda: None)
    beside.start(lambda: None)
    beside.wait()


@pytest.mark.parametrize("is_heard", [True, False])
def test_what_the_main_thread_does_not_hear_of_is_given_up(monkeypatch: pytest.MonkeyPatch, *, is_heard: bool) -> None:
    """It may wait in an exchange for ranks that wait for what this one has not sent."""
    monkeypatch.setattr(background, "UNHEARD_S", 20.0 if is_heard else 0.01)
    given_up = threading.Event()
    beside = Background(CPU, lambda *_: None, give_up=given_up.set)

    def fail() -> None:
        raise RuntimeError("lost")

    beside.start(fail)
    if is_heard:
        with pytest.raises(RuntimeError, match="lost"):
            beside.wait()
        assert beside._unheard is not None
        beside._unheard.join(PATIENCE_S)
        assert not given_up.is_set()
    else:
        assert given_up.wait(PATIENCE_S)
        assert str(beside.take_error()) == "lost"
        beside.wait()
