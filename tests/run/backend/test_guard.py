"""A guard ends the workers when the process that it watches is gone."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.run.backend import guard
from trainspec_cli.run.folder.generations import was_stop_noted
from trainspec_cli.run.folder.paths import RunDir

Guard = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Guard:
    """guarded(word, grace_s, spoken): what is done to the processes once the guard has heard `word`."""

    def run(word: bytes, grace_s: float = 5.0, spoken: int = 11) -> list[tuple[Any, ...]]:
        done: list[tuple[Any, ...]] = []
        ignored: list[int] = []
        monkeypatch.setattr(sys, "argv", ["guard", "launch", str(grace_s), str(tmp_path), "3", "10"])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(word)))
        monkeypatch.setattr(signal, "signal", lambda number, how: ignored.append(number) or how)
        monkeypatch.setattr(guard, "spoken_bytes", lambda run: spoken)
        monkeypatch.setattr(guard.processes, "stop", lambda *asked: done.append(("stop", *asked)))
        monkeypatch.setattr(guard.processes, "kill", lambda *asked: done.append(("kill", *asked)))
        guard.main()
        assert set(ignored) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2}
        return done

    return run


def test_a_supervisor_that_is_done_needs_nothing(guarded: Guard, tmp_path: Path) -> None:
    assert guarded(guard.DONE) == []
    assert not was_stop_noted(RunDir(tmp_path), 3)


@pytest.mark.parametrize("word", [b"", b"don"])
def test_workers_that_have_trained_are_asked_to_save(guarded: Guard, tmp_path: Path, word: bytes) -> None:
    assert guarded(word) == [("stop", "launch", 5.0)]
    assert was_stop_noted(RunDir(tmp_path), 3), "by it they know that they may stop"


@pytest.mark.parametrize(("grace_s", "spoken"), [(0.0, 11), (5.0, 10)])
def test_workers_without_grace_or_anything_to_save_are_killed(
    guarded: Guard, tmp_path: Path, grace_s: float, spoken: int
) -> None:
    assert guarded(b"", grace_s, spoken) == [("kill", "launch")]
    assert not was_stop_noted(RunDir(tmp_path), 3)
