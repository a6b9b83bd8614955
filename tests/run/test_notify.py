"""Notifications of a run's end, and those that fail."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab.problems import raises
from lab.waiting import PATIENCE_S, wait_for

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.run import notify as module
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult
from trainspec_cli.run.notify import Notify, notify

FAILED = RunResult(status="failed", exit_code=5, steps=7, final_loss=2.5)


def told(wanted: Notify, root: Path) -> list[str]:
    return list(notify(wanted, RunDir(root / "my run"), "tiny", FAILED, "rank 1 ran out of memory"))


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """An address, and what was posted to it; `/no` answers with an error."""
    heard: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(
                (self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            self.send_response(500 if self.path == "/no" else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}", heard
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_command_hears_the_facts(tmp_path: Path) -> None:
    facts = '"$TRAINSPEC_STATUS|$TRAINSPEC_RUN|$TRAINSPEC_MESSAGE"'
    command = f"cat > {tmp_path}/input && printf %s {facts} > {tmp_path}/said"
    assert told(Notify(command), tmp_path) == []
    status, run, message = (tmp_path / "said").read_text().split("|")
    assert (status, run) == ("failed", f"{tmp_path}/my run")
    assert message.startswith(f"trainspec: tiny ({run} on ")
    assert message.endswith(" 7 steps: rank 1 ran out of memory")
    heard = json.loads((tmp_path / "input").read_text())
    assert (heard["text"], heard["steps"], heard["loss"], heard["exit_code"]) == (message, 7, 2.5, 5)


def test_an_address_gets_them_as_json(tmp_path: Path, server: tuple[str, list[Any]]) -> None:
    address, heard = server
    assert told(Notify(address), tmp_path) == []
    ((kind, facts),) = heard
    assert (kind, facts["status"], facts["recipe"]) == ("application/json", "failed", "tiny")


def test_what_fails_is_said_and_no_more(
    tmp_path: Path, server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = server
    (refused,) = told(Notify("echo full >&2; exit 3"), tmp_path)
    (posted,) = told(Notify(f"{address}/no"), tmp_path)
    assert refused.startswith("warning: --notify echo full >&2; exit 3: ") and refused.endswith(" 3: full")
    assert posted.startswith(f"warning: --notify {address}/no: HTTP Error 500")
    (closed,) = told(Notify("http://127.0.0.1:1"), tmp_path)
    assert "Connection refused" in closed
    monkeypatch.setattr(module, "COMMAND_S", 0.05)
    (endless,) = told(Notify("exec sleep 5"), tmp_path)
    assert endless.startswith("warning: --notify exec sleep 5: ") and endless.endswith(" within 0 s")


def test_what_a_command_leaves_in_the_background_holds_nobody_up(tmp_path: Path) -> None:
    """If it did, this test would reach pytest's limit."""
    assert told(Notify(f"sleep {4 * PATIENCE_S:.0f} & echo $! > {tmp_path}/pid"), tmp_path) == []
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_all_that_a_command_has_started_ends_where_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_S", 0.5)
    (endless,) = told(Notify(f"sleep {4 * PATIENCE_S:.0f} & echo $! > {tmp_path}/pid; wait"), tmp_path)
    assert "did not end" in endless
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: not lives(child))


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_address_of_another_kind_is_refused() -> None:
    with raises(RecipeError, "usage", "`file:///etc/passwd`", path="--notify"):
        Notify("file:///etc/passwd")


def test_a_start_elsewhere_asks_for_the_same() -> None:
    assert Notify("mail me").options == ["--notify", "mail me"]
    assert Notify().options == []
