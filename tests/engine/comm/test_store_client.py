"""What the store asks the rendezvous server, and torchrun's way to it; the server is a dictionary here."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lab.waiting import PATIENCE_S
from torch.distributed.elastic.rendezvous import RendezvousParameters

from trainspec_cli.core.environment_names import RENDEZVOUS, SECRET_FILE, STORE_FILE
from trainspec_cli.engine.comm import joining
from trainspec_cli.engine.comm.joining import RendezvousStore


class Server:
    """Answers as told, and notes every request with its connection and limit."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, bytes, float]] = []
        self.closed: list[int] = []
        self.asked: list[tuple[int, dict[str, Any], float]] = []
        self.answers: list[Any] = []

    def connect(self, address: str, secret: bytes, timeout_s: float) -> Client:
        self.opened.append((address, secret, timeout_s))
        return Client(self, len(self.opened))


class Client:
    def __init__(self, server: Server, number: int):
        self.server, self.number = server, number

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.server.asked.append((self.number, json.loads(json.dumps(request)), timeout_s))
        default = {"add": 1, "count": 1, "set": None, "append": None}.get(request["op"], True)
        answer = self.server.answers.pop(0) if self.server.answers else {"value": default, "values": []}
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.server.closed.append(self.number)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setenv(RENDEZVOUS, "there:29500")
    monkeypatch.setenv(SECRET_FILE, "/the/secret")
    monkeypatch.setattr(joining, "read_secret", lambda path: str(path).encode())
    monkeypatch.setattr(joining, "JsonClient", made.connect)
    return made


@pytest.fixture
def store(server: Server) -> RendezvousStore:
    made = RendezvousStore(timedelta(seconds=7))
    assert server.opened == [("there:29500", b"/the/secret", 60.0)]
    assert server.asked == [(1, {"op": "check", "keys": []}, 60.0)], "a wrong secret fails immediately"
    server.asked.clear()
    return made


@pytest.mark.parametrize(
    ("call", "answer", "found", "request_"),
    [
        (("set", "k", b"\x00\xff"), None, None, {"op": "set", "key": "k", "value": "\x00\xff"}),
        (("set", "k", "é"), None, None, {"op": "set", "key": "k", "value": "Ã©"}),
        (("get", "k"), {"values": ["\xff"]}, b"\xff", {"op": "get", "keys": ["k"], "timeout_s": 7.0}),
        (
            ("multi_get", ["a", "b"]),
            {"values": ["1", "2"]},
            [b"1", b"2"],
            {"op": "get", "keys": ["a", "b"], "timeout_s": 7.0},
        ),
        (("wait", ["a"]), {"values": []}, None, {"op": "wait", "keys": ["a"], "timeout_s": 7.0}),
        (
            ("wait", ["a"], timedelta(seconds=0)),
            {"values": []},
            None,
            {"op": "wait", "keys": ["a"], "timeout_s": 0.0},
        ),
        (("add", "k", 3), {"value": 5}, 5, {"op": "add", "key": "k", "amount": 3}),
        (("append", "k", b"\x80"), {"value": None}, None, {"op": "append", "key": "k", "value": "\x80"}),
        (
            ("compare_set", "k", "old", b"new"),
            {"value": "won"},
            b"won",
            {"op": "compare_set", "key": "k", "expected": "old", "value": "new"},
        ),
        (("delete_key", "k"), {"value": False}, False, {"op": "delete", "key": "k"}),
        (("check", ["a", "b"]), {"value": True}, True, {"op": "check", "keys": ["a", "b"]}),
        (("num_keys",), {"value": 4}, 4, {"op": "count"}),
    ],
)
def test_every_call_is_one_request(
    call: Any, answer: Any, found: Any, request_: dict[str, Any], store: RendezvousStore, server: Server
) -> None:
    """A wait's own limit is added to the server's."""
    if answer is not None:
        server.answers.append(answer)
    name, *arguments = call
    assert getattr(RendezvousStore, name)(store, *arguments) == found
    assert server.asked == [(1, request_, 60.0 + request_.get("timeout_s", 0.0))]


def test_several_keys_are_set_one_by_one_each_with_its_value(store: RendezvousStore, server: Server) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    assert [request for _, request, _ in server.asked] == [
        {"op": "set", "key": "a", "value": "1"},
        {"op": "set", "key": "b", "value": "2"},
    ]
    with pytest.raises(ValueError, match="zip"):
        store.multi_set(["a", "b"], ["1"])
    assert store.has_extended_api()


def test_a_key_that_nobody_sets_is_named(store: RendezvousStore, server: Server) -> None:
    server.answers.append({"missing": "b"})
    with pytest.raises(dist.DistStoreError, match="`b` within 7 s"):
        RendezvousStore.get(store, "b")


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (OSError("gone"), dist.DistNetworkError, "there:29500: gone"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_after_an_error_the_next_request_has_a_new_connection(
    error: BaseException, raised: type[BaseException], words: str, store: RendezvousStore, server: Server
) -> None:
    """A late answer must not be taken for that of the next request."""
    server.answers.append(error)
    with pytest.raises(raised, match=words):
        store.num_keys()
    assert server.closed == [1]
    server.answers.append({"value": 2})
    assert store.num_keys() == 2
    assert server.asked[-1][0] == 2
    assert store.add("k", 1) == 1
    assert (server.asked[-1][0], len(server.opened), server.closed) == (2, 2, [1])


def test_each_thread_has_its_own_connection(store: RendezvousStore, server: Server) -> None:
    other = threading.Thread(target=store.num_keys)
    other.start()
    other.join(PATIENCE_S)
    store.num_keys()
    assert [number for number, _, _ in server.asked] == [2, 1]


def test_a_clone_is_a_store_of_its_own_that_stays(store: RendezvousStore, server: Server) -> None:
    clone = store.clone()
    assert clone is not store
    assert clone.timeout == timedelta(seconds=7)
    assert store._clones == [clone], "process groups hold only the C++ half"
    clone.num_keys()
    assert server.asked[-1][0] == 2


def test_a_job_on_several_nodes_meets_at_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under the launch's own prefix; on one node in a file, which torchrun names."""
    monkeypatch.delenv(STORE_FILE, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-3")
    monkeypatch.setattr(joining, "_stores", [])
    store = joining._open_store(2)
    store.set("k", "v")
    assert server.asked[-1][1] == {"op": "set", "key": "workers/launch-3/k", "value": "v"}
    assert len(joining._stores) == 1
    monkeypatch.setenv(STORE_FILE, str(tmp_path / "store"))
    in_file = joining._open_store(1)
    assert isinstance(in_file, dist.FileStore)
    assert in_file.timeout == store.timeout == timedelta(minutes=30)


@pytest.mark.parametrize(("nodes", "alone"), [("1", True), ("2", False), ("11", False)])
def test_workers_of_one_node_meet_in_a_private_file(nodes: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, bool]] = []

    def main() -> None:
        file = os.environ.get(STORE_FILE)
        private = file is not None and Path(file).parent.stat().st_mode & 0o777 == 0o700
        seen.append((file, private))

    from torch.distributed import run

    monkeypatch.setattr(run, "main", main)
    monkeypatch.setattr(joining.rendezvous_handler_registry, "register", lambda *given: seen.append(given))
    monkeypatch.setattr(sys, "argv", ["torchrun", "--nnodes", nodes, "--nproc-per-node", "1", "worker.py"])
    monkeypatch.setenv(STORE_FILE, "/another/run's")
    joining.main()
    registered, (file, private) = seen
    assert registered == ("trainspec", joining.PrivateRendezvous)
    assert (file is not None, private) == (alone, alone)
    assert file is None or not Path(file).parent.exists(), "it is taken away at the end"


@pytest.mark.parametrize(("nodes", "kind"), [(1, dist.HashStore), (3, RendezvousStore)])
def test_a_nodes_number_is_given_and_nobody_joins_later(nodes: int, kind: type, server: Server) -> None:
    handler = joining.PrivateRendezvous(
        RendezvousParameters("trainspec", "nowhere", "run-5", nodes, nodes, None, node=str(nodes - 1))
    )
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size) == (nodes - 1, nodes)
    assert isinstance(handler._store, kind)
    assert (handler.get_backend(), handler.get_run_id()) == ("trainspec", "run-5")
    assert not handler.use_agent_store
    assert not handler.is_closed()
    handler.set_closed()
    assert not handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()
    found.store.set("k", "v")
    if nodes > 1:
        assert server.asked[-1][1] == {"op": "set", "key": "run-5/k", "value": "v"}
    first = joining.PrivateRendezvous(RendezvousParameters("trainspec", "nowhere", "run-5", nodes, nodes, None))
    assert first.next_rendezvous().rank == 0


def test_the_quorum_is_asked_for_with_the_jobs_secret(server: Server) -> None:
    client: Any = joining.connect()
    assert server.opened == [("there:29500", b"/the/secret", 60.0)]
    assert client.number == 1 and server.asked == []
