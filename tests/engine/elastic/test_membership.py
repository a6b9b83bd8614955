"""Who takes part in a step, who heals from whom, and whether a group of several ranks counts a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainspec_cli.core.wire.rendezvous import FormedQuorum
from trainspec_cli.engine.elastic import membership
from trainspec_cli.engine.elastic.membership import (
    GroupRank,
    HealFailedError,
    Membership,
    Participation,
    QuorumClient,
)


class Peers:
    """The other groups, as scripted: what the server answers, and whether exchanges fail."""

    def __init__(self) -> None:
        self.quorums: list[tuple[str, list[str], list[int]]] = []
        """(number, names, steps); "own" is the name of the group under test."""
        self.asked: list[tuple[int, int]] = []
        self.connected: list[tuple[str, int, int]] = []
        self.fails = False
        self.sent: list[tuple[list[float], int]] = []
        self.comm: Any = None

    def join(self, own: str, step: int, failures: int) -> FormedQuorum:
        self.asked.append((step, failures))
        number, names, steps = self.quorums.pop(0)
        return FormedQuorum(number, tuple(own if name == "own" else name for name in names), tuple(steps), 0)

    def connect(self, name: str, rank: int, size: int, _timeout_s: float, device: torch.device) -> Any:
        assert device == CPU
        self.connected.append((name, rank, size))
        self.comm = FakeComm(self, rank, size)
        return self.comm


class FakeComm:
    def __init__(self, peers: Peers, rank: int, size: int):
        self.peers, self.rank, self.size = peers, rank, size
        self.closed = False
        self.staged_because = "because"

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.peers.fails:
            raise RuntimeError("a peer is lost")

    def sum_(self, tensor: torch.Tensor) -> None:
        self._check()
        tensor.mul_(self.size)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._check()
        return [tensor.clone() for _ in range(self.size)]

    def send(self, tensors: Any, to: int) -> None:
        self._check()
        self.peers.sent.append(([float(tensor) for tensor in tensors], to))

    def receive_(self, tensors: Any, sender: int) -> None:
        self._check()
        for tensor in tensors:
            tensor.fill_(100 + sender)


class Client:
    def __init__(self, peers: Peers, name: str):
        self._peers, self._name, self.closed = peers, name, False

    def join(self, step: int, failures: int) -> FormedQuorum:
        return self._peers.join(self._name, step, failures)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def peers(one_process: None, monkeypatch: pytest.MonkeyPatch) -> Peers:
    peers = Peers()
    monkeypatch.setattr(membership, "QuorumClient", lambda name, _connect: Client(peers, name))
    monkeypatch.setattr(membership, "CrossGroupComm", peers.connect)
    return peers


CPU = torch.device("cpu")
STATE = torch.tensor(5.0)


@pytest.fixture
def own(peers: Peers) -> Membership:
    STATE.fill_(5.0)
    return Membership(GroupRank(1, 0, 1), lambda: [STATE], 1.0, CPU)


def test_the_others_wait_for_a_group_from_its_first_step_on_and_not_before(own: Membership, peers: Peers) -> None:
    assert own._client is None and not peers.asked
    peers.quorums = [("1", ["00000:a", "own"], [0, 0])]
    part = own.agree(0)
    assert (part.groups, part.rank, part.step, part.healed) == ((0, 1), 1, 0, False)
    assert own._client is not None


def test_a_group_that_is_behind_copies_the_state(own: Membership, peers: Peers) -> None:
    peers.quorums = [("1", ["00000:a", "own"], [7, 3])]
    part = own.agree(3)
    assert (part.step, part.healed, float(STATE), peers.sent) == (7, True, 100.0, [])


def test_a_group_in_front_gives_it_and_keeps_its_own(own: Membership, peers: Peers) -> None:
    peers.quorums = [("1", ["00000:a", "own", "00002:c"], [3, 7, 3])]
    part = own.agree(7)
    assert (part.step, part.healed, float(STATE)) == (7, False, 5.0)
    assert peers.sent == [([5.0], 0), ([5.0], 2)]


def test_who_loses_the_group_it_heals_from_must_end(own: Membership, peers: Peers) -> None:
    peers.quorums, peers.fails = [("1", ["00000:a", "own"], [7, 3])], True
    with pytest.raises(HealFailedError, match="a peer is lost"):
        own.agree(3)


def test_who_gives_its_state_to_a_group_that_dies_goes_on(own: Membership, peers: Peers) -> None:
    peers.quorums, peers.fails = [("1", ["00000:a", "own"], [3, 7])], True
    assert not own.agree(7).healed
    assert own.failed and not own.vote()


def test_after_an_error_nothing_is_exchanged_and_the_connection_is_closed(own: Membership, peers: Peers) -> None:
    peers.quorums = [("1", ["00000:a", "own"], [0, 0])]
    own.agree(0)
    tensor = torch.ones(1)
    own.sum_(tensor)
    assert tensor == 2
    peers.fails = True
    own.sum_(tensor)
    assert peers.comm.closed, "peers that wait on it would wait for the timeout"
    peers.fails = False
    own.sum_(tensor)
    assert tensor == 2 and own.gather(tensor) == [] and own.failed


def test_failed_votes_are_reported_to_the_server_until_one_commits(own: Membership, peers: Peers) -> None:
    peers.quorums = [(str(number), ["00000:a", "own"], [0, 0]) for number in range(4)]
    own.agree(0)
    peers.fails = True
    own.sum_(torch.ones(1))
    assert not own.vote()
    own.agree(0)
    own.sum_(torch.ones(1))
    assert not own.vote()
    peers.fails = False
    own.agree(0)
    assert own.vote()
    own.agree(1)
    assert peers.asked == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_connection_lasts_as_long_as_the_quorum(own: Membership, peers: Peers) -> None:
    same = ("1", ["00000:a", "own"], [0, 0])
    peers.quorums = [same, same, ("2", ["00000:a", "own"], [0, 0]), ("2", ["00000:b", "own"], [0, 0])]
    for _ in range(4):
        own.agree(0)
    names = [name for name, _, _ in peers.connected]
    assert len(names) == len(set(names)) == 3
    assert {(rank, size) for _, rank, size in peers.connected} == {(1, 2)}


def test_the_connections_to_other_groups_are_told_from_those_that_were_there(
    own: Membership, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = [{(3, 30)}, {(3, 30), (4, 40), (5, 50)}]
    monkeypatch.setattr(membership, "open_connections", lambda: iter(opened.pop(0)))
    peers.quorums = [("1", ["00000:a", "own"], [0, 0])] * 2
    assert own.connections == frozenset()
    for _ in range(2):  # the second time they are connected already
        own.agree(0)
        assert own.connections == {(4, 40), (5, 50)}


def test_the_name_of_an_exchange_is_the_ranks_own_and_the_steps(peers: Peers) -> None:
    """A server that starts again counts quorums anew: number 1 at step 9 is another one than number 1 at step 0."""
    for rank, step in ((0, 0), (0, 9), (1, 9)):
        own = Membership(GroupRank(1, 0, 1), lambda: [STATE], 1.0, CPU)
        own.own = GroupRank(1, 0, 2) if rank == 0 else GroupRank(1, 1, 2)
        own._connect(FormedQuorum("1", ("00000:a", "own"), (step, step), 0), 1)
    assert len({name for name, _, _ in peers.connected}) == 3


def test_changes_name_the_groups_and_a_new_start_is_another(own: Membership) -> None:
    def with_names(*names: str) -> Participation:
        return Participation((), 0, 0, healed=False, names=frozenset(names))

    before = with_names("00000:a", "00001:b", "00012:c")
    after = with_names("00000:a", "00001:new", "00003:d")
    assert after.changes_since(before) == [("left", 1), ("left", 12), ("joined", 1), ("joined", 3)]
    assert before.changes_since(before) == []


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("refused"), dist.DistNetworkError("gone")])
def test_a_group_that_cannot_connect_votes_against_the_step_and_connects_again(
    own: Membership, peers: Peers, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> Any:
        raise error

    peers.quorums = [("1", ["00000:a", "own"], [0, 0]), ("2", ["00000:a", "own"], [0, 0])]
    with monkeypatch.context() as patch:
        patch.setattr(membership, "CrossGroupComm", refuse)
        assert own.agree(0).groups == (0, 1)
    assert own.failed and own.gather(torch.ones(1)) == []
    assert not own.vote()
    own.agree(0)
    assert not own.failed
    assert len(own.gather(torch.ones(1))) == 2 and own.vote()


def test_who_leaves_closes_all_connections(own: Membership, peers: Peers) -> None:
    own.leave()
    peers.quorums = [("1", ["00000:a", "own"], [0, 0])]
    own.agree(0)
    client: Any = own._client
    own.leave()
    assert client.closed and peers.comm.closed


def test_why_gradients_are_staged_is_known_while_groups_are_connected(own: Membership, peers: Peers) -> None:
    assert own.staged_because == ""
    peers.quorums = [("1", ["00000:a", "own"], [0, 0])]
    own.agree(0)
    assert own.staged_because == "because"


def test_a_group_alone_sums_nothing(own: Membership, peers: Peers) -> None:
    peers.quorums, peers.fails = [("1", ["own"], [4])], True
    part = own.agree(4)
    tensor = torch.ones(1)
    own.sum_(tensor)
    assert (part.groups, part.rank, part.healed, tensor.item(), own.failed) == ((1,), 0, False, 1.0, False)


def test_the_other_ranks_of_a_group_are_told_the_quorum(own: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask no server."""
    own.own = GroupRank(1, 1, 2)
    told = {"quorum": "7", "number": 1, "names": ["00000:a", own._name], "steps": [3, 3]}
    heard: list[Any] = []
    monkeypatch.setattr(membership, "broadcast_json", lambda value, read: heard.append(value) or read(told))
    assert own._join(3) == FormedQuorum("7", ("00000:a", own._name), (3, 3), 1)
    assert heard == [None] and own._client is None


# A group of two ranks, the other of which holds what is given


@pytest.fixture
def pair(own: Membership, monkeypatch: pytest.MonkeyPatch) -> Any:
    own.own = GroupRank(1, 0, 2)
    combine = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.SUM: torch.add}

    def with_other(*values: float) -> Membership:
        def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
            tensor.copy_(combine[op](tensor, torch.tensor(values)))

        monkeypatch.setattr(membership.dist, "all_reduce", all_reduce)
        return own

    return with_other


@pytest.mark.parametrize(("own_error", "other_failed", "commits"), [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
def test_a_step_counts_when_no_rank_of_the_group_met_an_error(
    pair: Any, own_error: int, other_failed: int, commits: int
) -> None:
    membership_of_pair = pair(float(other_failed))
    if own_error:
        membership_of_pair._drop(RuntimeError("lost"))
    assert membership_of_pair.vote() == bool(commits)


@pytest.mark.parametrize("other_failed", [0.0, 1.0])
def test_ranks_of_a_group_settle_on_the_greatest_counts(pair: Any, other_failed: float) -> None:
    """A rank whose exchange failed holds its own counts alone."""
    settling = pair(3.0, 0.0, other_failed)
    counts = torch.tensor([1.0, 2.0])
    settling.agree_on_counts(counts)
    assert counts.tolist() == [3.0, 2.0]
    assert settling.failed_anywhere == bool(other_failed)


# The connection to the server


class Server:
    """A server that gives its answers in turn over connections that may break; `asked` is what it was sent."""

    def __init__(self, *answers: Any):
        self.answers, self.asked = list(answers), []
        self.connections: list[Line] = []

    def connect(self) -> Line:
        self.connections.append(Line(self))
        return self.connections[-1]

    def joins(self) -> list[dict[str, Any]]:
        return [request for request in self.asked if request["op"] == "join"]


class Line:
    def __init__(self, server: Server):
        self.server, self.closed = server, False

    def send(self, request: dict[str, Any]) -> None:
        if self.closed:
            raise OSError("closed")
        self.server.asked.append(dict(request))

    def receive(self, timeout_s: float) -> dict[str, Any]:
        assert timeout_s == membership.ANSWER_TIMEOUT_S
        answer = self.server.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def close(self) -> None:
        self.closed = True


def beat(client: QuorumClient, times: int) -> None:
    """Let the client's heart beat in this thread, and in its own no more."""
    client._closed.set()
    ticks = iter([False] * times + [True])
    client._closed = SimpleNamespace(wait=lambda interval_s: next(ticks), set=lambda: None)  # type: ignore[assignment]
    client._beat()


def answer(number: int, quorum: str = "q") -> dict[str, Any]:
    return {"number": number, "quorum": quorum, "names": ["0:a", "1:b"], "steps": [3, 4]}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[QuorumClient, Server]]]:
    """client(answers): -> a client of a server with these answers. Heartbeats come only when a test calls for them."""
    monkeypatch.setattr(membership, "BEAT_INTERVAL_S", 3600.0)
    made: list[QuorumClient] = []

    def make(*answers: Any) -> tuple[QuorumClient, Server]:
        server = Server(*answers)
        made.append(QuorumClient("0:a", server.connect))  # type: ignore[arg-type]
        return made[-1], server

    yield make
    for one in made:
        one.close()


def test_a_group_asks_for_its_place_with_its_step_and_its_failures(client: Any) -> None:
    asking, server = client(answer(1), answer(2, "r"))
    assert asking.join(3, 0) == FormedQuorum("q", ("0:a", "1:b"), (3, 4), 1)
    assert asking.join(4, 2).quorum == "r"
    assert server.joins() == [
        {"name": "0:a", "op": "join", "step": 3, "failures": 0, "number": 1},
        {"name": "0:a", "op": "join", "step": 4, "failures": 2, "number": 2},
    ]
    assert len(server.connections) == 1


def test_an_answer_to_an_earlier_question_is_passed_over(client: Any) -> None:
    asking, server = client(answer(1, "first"), answer(1, "again"), answer(2, "second"))
    assert [asking.join(3, 0).quorum, asking.join(4, 0).quorum] == ["first", "second"]
    assert len(server.joins()) == 2


def test_a_group_asks_again_where_the_server_was_started_again(client: Any) -> None:
    asking, server = client(ConnectionResetError("gone"), answer(1))
    assert asking.join(3, 1).quorum == "q"
    assert [request["number"] for request in server.joins()] == [1, 1]
    assert [line.closed for line in server.connections] == [True, False]


def test_a_server_that_does_not_answer_in_time_is_an_error(client: Any) -> None:
    asking, server = client(TimeoutError("half an hour"))
    with pytest.raises(TimeoutError):
        asking.join(3, 1)
    assert len(server.connections) == 1


def test_a_server_that_cannot_be_reached_again_is_an_error(client: Any) -> None:
    asking, _ = client(ConnectionResetError("gone"))

    def refuse() -> None:
        raise ConnectionRefusedError("nobody listens")

    asking._connect = refuse
    with pytest.raises(ConnectionRefusedError):
        asking.join(3, 1)


def test_a_connection_is_replaced_once_though_two_threads_find_it_broken(client: Any) -> None:
    asking, server = client()
    broken = asking._connection
    asking._replace(broken)
    asking._replace(broken)
    assert len(server.connections) == 2
    assert asking._connection is server.connections[1]


@pytest.mark.parametrize("broken", [False, True])
def test_heartbeats_go_on_until_the_group_leaves(client: Any, broken: bool) -> None:
    """A broken connection is replaced by the first that meets it."""
    asking, server = client()
    if broken:
        server.connections[0].closed = True
    beat(asking, 3)
    assert server.asked == [{"name": "0:a", "op": "beat"}] * (2 if broken else 3)
    assert len(server.connections) == (2 if broken else 1)


def test_heartbeats_that_cannot_be_sent_are_tried_again(client: Any) -> None:
    asking, server = client()
    server.connections[0].closed = True
    connects = iter([ConnectionRefusedError("not yet"), None])

    def connect() -> Line:
        if error := next(connects):
            raise error
        return server.connect()

    asking._connect = connect
    beat(asking, 3)
    assert len(server.asked) == 1


def test_a_client_beats_from_its_first_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "BEAT_INTERVAL_S", 0.001)
    server = Server()
    asking = QuorumClient("0:a", server.connect)  # type: ignore[arg-type]
    while not server.asked:
        pass
    asking.close()
    assert server.connections[0].closed
