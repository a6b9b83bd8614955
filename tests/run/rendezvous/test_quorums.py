"""The server's replica groups and the quorums that they form, by a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from trainspec_cli.core.wire.rendezvous import FormedQuorum, GroupBeat, JoinQuorum
from trainspec_cli.run.recovery.reliability import QuorumRules
from trainspec_cli.run.rendezvous.server import Quorums, Write


class Meeting:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.0):
        self.now_s = 100.0
        monkeypatch.setattr("trainspec_cli.run.rendezvous.server.time.monotonic", lambda: self.now_s)
        self.quorums = Quorums(QuorumRules(silence_s=5.0, patience_s=20.0), pause_s)
        self.heard: dict[str, list[FormedQuorum]] = {}
        self._writers: dict[str, Write] = {}

    def writer(self, name: str) -> Write:
        return self._writers.setdefault(name, lambda answer: self.heard.setdefault(name, []).append(answer))

    def reconnect(self, name: str) -> Write:
        """Return the writer of the connection before."""
        return self._writers.pop(name)

    def join(self, name: str, step: int = 0, failures: int = 0, number: int = 0) -> None:
        self.quorums.hear(self.writer(name), JoinQuorum(name, step, failures, number))

    def beat(self, name: str) -> None:
        self.quorums.hear(self.writer(name), GroupBeat(name))

    def last(self, name: str) -> FormedQuorum:
        return self.heard[name][-1]

    def number(self, name: str = "a") -> int:
        return int(self.last(name).quorum.rpartition("-")[2])


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    return Meeting(monkeypatch)


def meet(meeting: Meeting, *names: str, **about: Any) -> None:
    for name in names:
        meeting.beat(name)
    for name in names:
        meeting.join(name, **about)


def test_a_quorum_is_told_to_each_with_its_own_number(meeting: Meeting) -> None:
    meeting.beat("a")
    meeting.beat("b")
    meeting.join("b", step=4, number=7)
    assert meeting.heard == {}, "half of them have asked"
    meeting.join("a", step=3, number=9)
    for name, number in (("a", 9), ("b", 7)):
        (answer,) = meeting.heard[name]
        assert (answer.names, answer.steps, answer.number) == (("a", "b"), (3, 4), number)
    assert meeting.last("a").quorum == meeting.last("b").quorum


def test_the_same_members_keep_their_quorums_name_until_one_has_failed(meeting: Meeting) -> None:
    meet(meeting, "a", "b")
    meet(meeting, "a", "b", step=1)
    assert [meeting.number(name) for name in ("a", "b")] == [1, 1]
    meeting.join("a", step=2)
    meeting.join("b", step=2, failures=1)
    assert [meeting.number(name) for name in ("a", "b")] == [2, 2]
    meet(meeting, "a", "b", step=3)
    assert meeting.number() == 2
    assert len(meeting.heard["a"]) == 4, "an answer for each question"


def test_who_has_left_is_not_waited_for(meeting: Meeting) -> None:
    meet(meeting, "a", "b")
    meeting.join("a", step=1)
    assert len(meeting.heard["a"]) == 1
    meeting.quorums.leave("b", meeting.writer("b"))
    assert meeting.last("a").names == ("a",) and meeting.number() == 2


def test_who_leaves_while_asking_takes_its_question_along(meeting: Meeting) -> None:
    meet(meeting, "a", "b")
    meeting.join("b", step=8)
    meeting.quorums.leave("b", meeting.writer("b"))
    meeting.join("a", step=1)
    meet(meeting, "b", "a", step=2)
    assert [answer.steps for answer in meeting.heard["a"]] == [(0, 0), (1,), (2, 2)]


def test_the_end_of_a_lost_connection_does_not_end_the_one_after(meeting: Meeting) -> None:
    meet(meeting, "a", "b")
    before = meeting.reconnect("b")
    meeting.beat("b")
    meeting.quorums.leave("b", before)
    meeting.join("a", step=1)
    assert len(meeting.heard["a"]) == 1, "b is connected, and computes"
    meeting.join("b", step=1, number=3)
    assert (meeting.last("b").names, meeting.last("b").number) == (("a", "b"), 3)


def test_a_group_that_is_silent_is_dropped_and_beats_keep_it(meeting: Meeting) -> None:
    meet(meeting, "a", "b", "c")
    meeting.join("a", step=1)
    meeting.join("b", step=1)
    for _ in range(2):
        meeting.now_s += 4.0
        for name in "abc":
            meeting.beat(name)
    meeting.quorums.form()
    assert len(meeting.heard["a"]) == 1, "c is alive, and they are patient"
    meeting.now_s += 4.0
    for name in "ab":
        meeting.beat(name)
    meeting.now_s += 1.5
    meeting.quorums.form()
    assert meeting.last("a").names == ("a", "b")


def test_a_server_that_was_restarted_waits_for_those_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(monkeypatch, pause_s=3.0)
    meeting.join("a", step=1)
    assert meeting.heard == {}
    meeting.now_s += 2.9
    meeting.join("b", step=1)
    assert meeting.heard == {}
    meeting.now_s += 0.1
    meeting.quorums.form()
    assert meeting.last("a").names == ("a", "b")


def test_another_servers_quorums_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for _ in range(2):
        meeting = Meeting(monkeypatch)
        meeting.join("a")
        names.add(meeting.last("a").quorum)
    assert len(names) == 2
