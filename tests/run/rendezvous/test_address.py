"""The supervisor's end of the rendezvous server: how it is started, and when it is started again."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.environment_names import RENDEZVOUS, SECRET_FILE
from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.rendezvous import address
from trainspec_cli.run.rendezvous.address import RESTART_INTERVAL_S, START_S, Rendezvous

RESILIENCE = ResilienceSpec(mode="elastic", heartbeat_timeout_s=7.0, exchange_timeout_s=9.0)


class Server:
    """Server processes that live until the test ends them, by the test's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.commands, self.is_alive = 100.0, [], True
        monkeypatch.setattr(address.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(address, "start", self._start)

    def _start(self, command: list[str], job: Job, pass_fds: tuple[int, ...]) -> Server:
        assert str(pass_fds[0]) == command[3], "it inherits the socket that it listens on"
        self.commands.append(command)
        self.is_alive = True
        return self

    def poll(self) -> int | None:
        return None if self.is_alive else 1

    def kill(self) -> None:
        self.is_alive = False

    def wait(self, timeout_s: float) -> None:
        assert not self.is_alive

    @property
    def times_s(self) -> list[float]:
        """Silence, patience, pause and grace of the last start."""
        return [float(word) for word in self.commands[-1][6:]]

    def live(self, seconds: float) -> None:
        self.now_s += seconds
        self.is_alive = False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.fixture
def rendezvous(server: Server, make_job: Callable[..., Job], tmp_path: Path) -> Iterator[Rendezvous]:
    (tmp_path / "secret").touch()
    made = Rendezvous(make_job("train", 30.0), RESILIENCE, tmp_path / "secret", "127.0.0.1", name="head")
    yield made
    made.close()


def test_the_server_is_told_its_socket_supervisor_secret_and_times(
    rendezvous: Rendezvous, server: Server, tmp_path: Path
) -> None:
    (command,) = server.commands
    assert command[:3] == [sys.executable, "-m", "trainspec_cli.run.rendezvous.server"]
    assert command[4:6] == [str(os.getpid()), str(tmp_path / "secret")]
    assert server.times_s == [7.0, 9.0, 0.0, 30.0]


def test_others_reach_it_by_the_name_of_its_node(rendezvous: Rendezvous, tmp_path: Path) -> None:
    host, _, port = rendezvous.address.rpartition(":")
    assert host == "head" and int(port) > 0
    assert rendezvous.environment == {RENDEZVOUS: rendezvous.address, SECRET_FILE: str(tmp_path / "secret")}


def test_without_a_name_it_has_its_address_and_the_port_that_was_asked_for(
    server: Server, make_job: Callable[..., Job], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Rendezvous(make_job("train"), RESILIENCE, tmp_path / "secret", "127.0.0.1", port)
    assert made.address == f"127.0.0.1:{port}"
    made.close()


def test_a_server_that_ended_is_started_again_and_waits_for_its_groups(rendezvous: Rendezvous, server: Server) -> None:
    assert not rendezvous.keep_alive()
    server.live(RESTART_INTERVAL_S - 0.1)
    assert not rendezvous.keep_alive(), "not more often than that"
    server.now_s += 0.1
    assert rendezvous.keep_alive()
    assert server.times_s == [7.0, 9.0, 7.0, 30.0], "they may come back for as long as they may be silent"
    server.now_s += 1000.0
    assert not rendezvous.keep_alive(), "it lives"


def test_a_server_that_keeps_ending_at_once_is_given_up(rendezvous: Rendezvous, server: Server) -> None:
    def end_soon(times: int) -> None:
        for _ in range(times):
            server.live(1.5 * RESTART_INTERVAL_S)
            assert rendezvous.keep_alive()

    end_soon(address.MAX_FAILURES)
    server.live(START_S)
    assert rendezvous.keep_alive(), "it lived for a while: the count begins anew"
    end_soon(address.MAX_FAILURES)
    server.live(1.5 * RESTART_INTERVAL_S)
    with raises(MachineError, "rendezvous"):
        rendezvous.keep_alive()


def test_nothing_of_it_is_left(rendezvous: Rendezvous, server: Server, tmp_path: Path) -> None:
    port = int(rendezvous.address.rpartition(":")[2])
    rendezvous.close()
    assert not server.is_alive and not (tmp_path / "secret").exists()
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_it_can_be_killed(rendezvous: Rendezvous, server: Server) -> None:
    rendezvous.kill()
    assert not server.is_alive
