"""A run that another terminal watches, reads and stops: its supervisor is a thread that holds the claim."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from lab.problems import raises
from lab.waiting import PATIENCE_S

from trainspec_cli.__main__ import run as trainspec
from trainspec_cli.core.errors import EXIT_DONE, MachineError, RecipeError
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.folder.event_types.events import WarningEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import claim, find_owner
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.session.runs import follow

MakeRun = Callable[..., RunDir]


@contextmanager
def supervised(run: RunDir, ends: Callable[[], bool], work: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the run in a thread, which does `work` and then leaves a result when `ends` says so."""
    held = threading.Event()

    def hold() -> None:
        with claim(run, "launch"):
            held.set()
            work()
            deadline = time.monotonic() + PATIENCE_S
            while not ends() and time.monotonic() < deadline:
                time.sleep(0.01)
            write_json(run.result_json, {"status": "stopped", "exit_code": 6})

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        yield
    finally:
        thread.join()


def say(run: RunDir, message: str) -> None:
    writer = EventWriter(run.events(0), 0)
    writer.write(WarningEvent(step=3, message=message))
    writer.close()


def test_a_run_is_stopped_and_waited_for(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, requests = make_run(), StopRequests()
    with on_stop_signal(requests.add), supervised(run, lambda: requests.count > 0):
        assert trainspec(["stop", str(run.root)]) == EXIT_DONE
        assert requests.count == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{run.root}: ")
    assert "step 10\n" in said.out and said.out.endswith(f" trainspec resume {run.root}\n")


def test_a_run_that_is_to_stop_at_once_is_asked_twice(make_run: MakeRun) -> None:
    run, requests = make_run(), StopRequests()
    with on_stop_signal(requests.add), supervised(run, lambda: requests.count > 1):
        assert follow.stop(run, at_once=True, on_asked=lambda: None) == "stopped"
    assert requests.count == 2


def test_what_is_not_running_here_is_not_stopped(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    with raises(RecipeError, "not_running", "killed"):
        follow.stop(run, at_once=False, on_asked=lambda: None)
    monkeypatch.setattr(follow.os, "kill", lambda *_: pytest.fail("a process of this node was signalled"))
    with claim(run, "launch"):
        write_json(run.root / "other.json", {**read_json(run.pid_json), "host": "far"})
        run.pid_json.write_text((run.root / "other.json").read_text())
        with raises(MachineError, "other_node", " far") as refused:
            follow.stop(run, at_once=False, on_asked=lambda: None)
        assert refused.value.problems[0].hint.endswith(f"ssh far trainspec stop {run.root}")


def test_the_owner_is_the_process_that_holds_the_run(make_run: MakeRun) -> None:
    run = make_run()
    assert find_owner(run) is None
    with claim(run, "launch"):
        owner = find_owner(run)
    assert owner is not None and (owner.pid, owner.launch_id) == (os.getpid(), "launch")
    run.pid_json.write_text('{"pid": 1, "host": "h", "launch_id": "left by a crash"}')
    assert find_owner(run) is None


def test_watching_shows_what_was_said_before_and_ends_with_the_run(
    make_run: MakeRun, console: RunConsole, shown: StringIO
) -> None:
    run = make_run()
    say(run, "before")
    with supervised(run, lambda: "before" in shown.getvalue(), work=lambda: None):
        assert follow.watch(run, console) == "stopped"
    assert "step 3: warning: before\n" in shown.getvalue()
    with raises(RecipeError, "not_running", "stopped"):
        follow.watch(run, console)


def test_a_log_is_followed_to_the_last_line(make_run: MakeRun) -> None:
    run, ended = make_run(), threading.Event()
    with raises(RecipeError, "no_log"):
        next(follow.read_run_log(run, follow=False))
    run.logs.mkdir()
    run.run_log.write_text("one\n")
    assert list(follow.read_run_log(run, follow=False)) == ["one\n"]

    def append(text: str) -> None:
        with run.run_log.open("a") as file:
            file.write(text)

    read = []
    with supervised(run, ended.is_set):
        for text in follow.read_run_log(run, follow=True):
            read.append(text)
            if text == "one\n":
                append("two\n")
            elif text == "two\n":
                append("last\n")
                ended.set()
    assert "".join(read) == "one\ntwo\nlast\n"


def test_the_commands_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: MakeRun) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("watch", "logs", "stop"):
        assert trainspec([command, "nothing"]) == RecipeError.exit_code
    run = make_run()
    for command in ("watch", "logs", "stop"):
        assert trainspec([command, str(run.root)]) == RecipeError.exit_code


def test_a_number_that_another_process_has_by_now_is_nobody_s(tmp_path: Path) -> None:
    """After `kill -9` pid.json stays, and somebody who only looks holds its lock."""
    run = RunDir(tmp_path)
    stranger = subprocess.Popen(["sleep", "60"])
    owner = {"pid": stranger.pid, "host": socket.gethostname(), "launch_id": "earlier"}
    run.pid_json.write_text(json.dumps(owner))
    os.utime(run.pid_json, (time.time() - 3600,) * 2)
    try:
        with run.pid_json.open() as looking:
            fcntl.flock(looking, fcntl.LOCK_EX)
            assert find_owner(run) is None
            os.utime(run.pid_json)
            assert find_owner(run) is not None, "it began before this was written"
            stranger.kill()
            stranger.wait()
            assert find_owner(run) is None
    finally:
        stranger.kill()
        stranger.wait()
