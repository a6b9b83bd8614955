"""The rendezvous server as a real process: what its clients get, and what strangers do not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.drawing import slow_after
from lab.problems import raises
from lab.waiting import PATIENCE_S, wait_for

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.wire.rendezvous import LINE_BYTES, JsonClient
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.folder.generations import create_secret, read_secret
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.rendezvous.address import Rendezvous

HERE = "127.0.0.1"


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[Rendezvous]:
    job = Job(tmp_path, (), {LAUNCH_ID: f"rendezvous-{os.getpid()}"}, 1, 1.0, tmp_path / "logs")
    create_secret(job.run.secret(1))
    resilience = ResilienceSpec(heartbeat_timeout_s=0.5, exchange_timeout_s=30.0)
    made = Rendezvous(job, resilience, job.run.secret(1), HERE)
    yield made
    made.close()


@pytest.fixture
def connect(rendezvous: Rendezvous) -> Iterator[Callable[[], JsonClient]]:
    clients: list[JsonClient] = []

    def make() -> JsonClient:
        clients.append(JsonClient(rendezvous.address, read_secret(rendezvous._secret_file), PATIENCE_S))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ask(client: JsonClient, operation: str, **request: object) -> dict[str, object]:
    return client.ask({"op": operation, **request}, PATIENCE_S)


def knock(rendezvous: Rendezvous) -> socket.socket:
    host, _, port = rendezvous.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), PATIENCE_S)
    connection.settimeout(PATIENCE_S)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection after its nonce."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_value_is_set_waited_for_and_deleted(connect: Callable[[], JsonClient]) -> None:
    one, other = connect(), connect()
    answers: list[dict[str, object]] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(other, "get", keys=["k"], timeout_s=PATIENCE_S)))
    waiting.start()
    ask(one, "set", key="k", value="v")
    waiting.join()
    assert answers == [{"values": ["v"]}]
    assert ask(one, "check", keys=["k"]) == {"value": True}
    assert ask(one, "delete", key="k") == {"value": True}
    assert ask(one, "get", keys=["k"], timeout_s=0.1) == {"missing": "k"}
    assert ask(one, "count") == {"value": 0}


def test_counting_appending_and_comparing(connect: Callable[[], JsonClient]) -> None:
    client = connect()
    assert [ask(client, "add", key="n", amount=amount)["value"] for amount in (2, 3, -1)] == [2, 5, 4]
    ask(client, "append", key="a", value="x")
    ask(client, "append", key="a", value="y")
    assert ask(client, "get", keys=["a", "n"], timeout_s=1) == {"values": ["xy", "4"]}
    assert ask(client, "compare_set", key="c", expected="", value="1") == {"value": "1"}
    assert ask(client, "compare_set", key="c", expected="0", value="2") == {"value": "1"}
    assert ask(client, "compare_set", key="c", expected="1", value="2") == {"value": "2"}


def test_a_stranger_gets_a_nonce_and_nothing_else(rendezvous: Rendezvous, connect) -> None:
    with knock(rendezvous) as stranger:
        stranger.sendall(json.dumps({"op": "set", "key": "k", "value": "v"}).encode() + b"\n" + b"x" * 100)
        assert is_closed(stranger)
    assert ask(connect(), "count") == {"value": 0}


def test_who_does_not_know_the_secret_is_not_let_in(rendezvous: Rendezvous) -> None:
    with pytest.raises(ConnectionError):
        JsonClient(rendezvous.address, b"x" * 32, 0.0)


@pytest.mark.parametrize(
    "line",
    slow_after(
        3,
        [b"[", b'{"op": "get", "keys": 5, "timeout_s": 1}', b"\xff\xfe", b"[]", b"5", b'"op"', b"{}", b'{"op": "no"}',
         b'{"op": "set"}', b'{"op": "add", "key": "k", "amount": "x"}', b'{"op": "join", "name": "a"}',
         b'{"op": "get", "keys": ["k"], "timeout_s": "x"}', b'{"op": "beat"}', b"[" * 100_000],
    ),
)  # fmt: skip
def test_nonsense_ends_its_own_connection_alone(rendezvous: Rendezvous, connect, line: bytes) -> None:
    sound, mad = connect(), connect()
    mad._connection.sendall(line + b"\n")
    mad._connection.settimeout(PATIENCE_S)
    assert is_closed(mad._connection)
    assert ask(sound, "count") == {"value": 0}
    assert rendezvous._process.poll() is None


def test_a_line_without_an_end_is_cut_off(connect) -> None:
    sound, mad = connect(), connect()
    mad._connection.settimeout(PATIENCE_S)
    with pytest.raises(OSError):
        for _ in range(4):
            mad._connection.sendall(b"x" * LINE_BYTES)
    assert ask(sound, "count") == {"value": 0}


def test_idle_strangers_keep_nobody_out(rendezvous: Rendezvous, connect) -> None:
    strangers = [knock(rendezvous) for _ in range(400)]
    assert ask(connect(), "count") == {"value": 0}
    for stranger in strangers:
        stranger.close()


def test_it_listens_at_its_address_alone(rendezvous: Rendezvous) -> None:
    assert rendezvous._listener.getsockname()[0] == HERE


def join(client: JsonClient, name: str, step: int, failures: int = 0) -> None:
    client.send({"op": "join", "name": name, "step": step, "failures": failures, "number": 1})


def receive_beating(client: JsonClient, name: str) -> dict[str, object]:
    while True:
        client.send({"op": "beat", "name": name})
        with contextlib.suppress(TimeoutError):
            return client.receive(0.1)


def test_a_quorum_of_two_and_of_the_one_that_is_left(connect) -> None:
    one, other = connect(), connect()
    other.send({"op": "beat", "name": "b"})
    ask(other, "count")  # so the beat has been heard
    join(one, "a", 3)
    join(other, "b", 5)
    first = one.receive(PATIENCE_S)
    assert (first["names"], first["steps"]) == (["a", "b"], [3, 5])
    assert other.receive(PATIENCE_S) == first
    join(one, "a", 6)
    other.close()  # its process was killed
    left = one.receive(PATIENCE_S)
    assert left["names"] == ["a"]
    assert left["quorum"] != first["quorum"]


def test_a_silent_group_is_dropped(connect) -> None:
    """Its connection is there, and it does not beat: it was stopped, or its host is gone."""
    one, other = connect(), connect()
    other.send({"op": "beat", "name": "b"})
    ask(other, "count")  # so the beat has been heard
    join(one, "a", 0)
    assert receive_beating(one, "a")["names"] == ["a"]


def test_an_error_of_one_gives_the_quorum_another_number(connect) -> None:
    client, numbers = connect(), []
    for failures in (0, 0, 1):
        join(client, "a", 1, failures)
        numbers.append(client.receive(PATIENCE_S)["quorum"])
    assert numbers[0] == numbers[1] != numbers[2]


def test_it_starts_again_on_its_own_port(rendezvous: Rendezvous, connect) -> None:
    before = rendezvous.address
    first = connect()
    join(first, "a", 1)
    number = first.receive(PATIENCE_S)["quorum"]
    rendezvous.kill()
    rendezvous._process.wait()
    wait_for(rendezvous.keep_alive)
    assert not rendezvous.keep_alive()
    assert rendezvous.address == before
    again = connect()
    join(again, "a", 1)
    assert receive_beating(again, "a")["quorum"] != number, "numbers are not given twice"


def test_the_secret_goes_with_the_server(tmp_path: Path, rendezvous: Rendezvous) -> None:
    assert rendezvous._secret_file.stat().st_mode & 0o777 == 0o600
    assert rendezvous._secret_file.read_bytes().hex() not in json.dumps(rendezvous.environment)
    rendezvous.close()
    assert not rendezvous._secret_file.exists()


@pytest.mark.slow
def test_a_server_that_cannot_start_is_given_up(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.run.rendezvous.address.RESTART_INTERVAL_S", 0.2)
    rendezvous._secret_file.chmod(0o644)
    rendezvous.kill()
    with raises(MachineError, "rendezvous"):
        wait_for(lambda: rendezvous.keep_alive() and False)


def test_a_word_to_the_whole_job_does_not_end_it(rendezvous: Rendezvous, connect) -> None:
    """Slurm tells every process of a job that its time is over, and the workers still have to save."""
    client = connect()
    rendezvous._process.terminate()
    assert ask(client, "count") == {"value": 0}
    assert rendezvous._process.poll() is None


def test_an_answer_says_what_it_answers(connect) -> None:
    client = connect()
    client.send({"op": "join", "name": "a", "step": 1, "failures": 0, "number": 7})
    assert client.receive(PATIENCE_S)["number"] == 7
