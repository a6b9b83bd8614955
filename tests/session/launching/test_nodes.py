"""A node that joins a run which another one starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from lab.events import started, stepped, write_event
from lab.problems import raises

from trainspec_cli.core.errors import MachineError, RecipeError, WorkerError
from trainspec_cli.reporter import live
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import GenerationRecord, UnplannedWork
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job import folder
from trainspec_cli.run.job.folder import claim, read_claim
from trainspec_cli.session.launching import nodes
from trainspec_cli.session.launching.nodes import TURN_S, Joined, LostSupervisor


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(nodes, "RETRY_S", 0.001)
    monkeypatch.setattr(nodes, "RESULT_TIMEOUT_S", 0.2)
    return RunDir(tmp_path)


def test_a_node_serves_every_start_until_there_is_a_result(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[int, int]] = []

    def serve(run: RunDir, generation: int, node: int, begin: object, tell: object, **_: object) -> None:
        served.append((generation, node))
        if generation == 2:
            write_json(run.result_json, {"status": "stopped", "exit_code": 6})
        else:
            generations.begin(run)

    monkeypatch.setattr(nodes, "run_agent", serve)
    generations.begin(run)
    assert nodes.join(str(run.root), 3, console, wait_s=0.2) == 6
    assert served == [(1, 3), (2, 3)]


WORK = UnplannedWork("command", "{}")
Begin = Callable[[GenerationRecord], None]
COMMAND = Joined(lambda run, record: None, folder="--dir", join_key="--join-timeout-s")


@pytest.fixture
def describe_start(run: RunDir):
    """Writes what the first node runs, as it does once its hub is there."""

    def describe(own: UnplannedWork | None = None) -> GenerationRecord:
        number = generations.begin(run)
        record = GenerationRecord(number, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(run.logs), (), (), own=own)
        generations.describe(run, record)
        return record

    return describe


@pytest.mark.parametrize("of_slurm", [False, True])
def test_a_node_shows_the_runs_progress_while_it_takes_part(
    run: RunDir, console: RunConsole, shown: StringIO, monkeypatch: pytest.MonkeyPatch, describe_start, of_slurm: bool
) -> None:
    """The first node prints them too, and srun joins the outputs."""
    monkeypatch.setattr(live, "LINE_S", 0.0)
    write_event(run.events(0), stepped(6))

    def serve(
        run: RunDir, generation: int, node: int, begin: Callable[[GenerationRecord], None], *_: object, **__: object
    ) -> None:
        begin(record)
        write_event(run.events(0), started(6))
        for step in range(7, 17):
            write_event(run.events(0), stepped(step))
        write_json(run.result_json, {"status": "done", "exit_code": 0})

    monkeypatch.setattr(nodes, "run_agent", serve)
    record = describe_start(WORK)
    assert nodes.join(str(run.root), 1, console, wait_s=0.2, joined=replace(COMMAND, of_slurm=of_slurm)) == 0
    assert ("step 16: loss 1.000" in shown.getvalue()) != of_slurm
    assert "step 6:" not in shown.getvalue()
    assert "joined start 1" in shown.getvalue() and "is done" in shown.getvalue()


def test_another_kind_of_run_is_refused_as_soon_as_the_first_nodes_is_known(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch, describe_start
) -> None:
    """The agent waits for what the first node runs; a number without it may be there for a while."""

    def serve(
        run: RunDir, generation: int, node: int, begin: Callable[[GenerationRecord], None], *_: object, **__: object
    ) -> None:
        begin(describe_start(WORK))
        pytest.fail("nothing of it is run")

    monkeypatch.setattr(nodes, "run_agent", serve)
    generations.begin(run)
    with raises(RecipeError, "usage", "first node"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)


@pytest.mark.parametrize(
    ("joined", "of_slurm", "words"),
    [
        (Joined(), False, ("--node-rank 0", "run.dir", "run.join_timeout_s")),
        (COMMAND, False, ("--node-rank 0", "--dir", "--join-timeout-s")),
        (COMMAND, True, ("srun", "--dir", "--join-timeout-s")),
    ],
)
def test_the_hint_has_the_words_of_the_command_that_was_typed(
    run: RunDir, console: RunConsole, joined: Joined, of_slurm: bool, words: tuple[str, ...]
) -> None:
    with pytest.raises(MachineError) as raised:
        nodes.join(str(run.root), 1, console, wait_s=0.01, joined=replace(joined, of_slurm=of_slurm))
    hint = raised.value.problems[0].hint
    assert all(word in hint for word in words)
    assert ("--node-rank" in hint) != of_slurm and ("run.dir" in hint) == (joined.folder == "run.dir")


def test_the_result_of_an_earlier_start_is_not_taken_for_this_ones(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.result_json, {"status": "done", "exit_code": 0})
    with raises(MachineError, "no_first_host", "0.2 s"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)
    monkeypatch.setattr(
        nodes, "run_agent", lambda run, *_, **__: write_json(run.result_json, {"status": "stopped", "exit_code": 6})
    )
    generations.begin(run)
    assert nodes.join(str(run.root), 1, console, wait_s=0.2) == 6


def test_an_earlier_start_that_nobody_answers_for_is_passed_over(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def serve(run: RunDir, generation: int, node: int, begin: object, tell: object, **_: object) -> None:
        asked.append(generation)
        if len(asked) == 1:
            generations.begin(run)
            raise MachineError("nobody listens")
        write_json(run.result_json, {"status": "done", "exit_code": 0})

    monkeypatch.setattr(nodes, "run_agent", serve)
    generations.begin(run)
    assert nodes.join(str(run.root), 1, console, wait_s=0.2) == 0
    assert asked == [1, 2]


def test_a_first_node_that_leaves_no_result_has_failed(
    run: RunDir, console: RunConsole, shown: StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "run_agent", lambda *_, **__: None)
    generations.begin(run)
    assert nodes.join(str(run.root), 1, console, wait_s=0.2) == WorkerError.exit_code
    assert f"trainspec resume {run.root}" in shown.getvalue()


def test_no_run_in_which_others_can_write_is_taken_part_in(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "run_agent", lambda *_, **__: pytest.fail("nothing of it is run"))
    generations.begin(run)
    run.root.chmod(0o777)
    with raises(MachineError, "not_trusted", "by every user"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)


def test_a_refusal_of_this_node_is_what_is_told(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*_: object, **__: object) -> None:
        raise MachineError("nobody listens")

    monkeypatch.setattr(nodes, "run_agent", serve)
    generations.begin(run)
    with pytest.raises(MachineError, match="nobody listens"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)


class SupervisorLab:
    """A supervisor with a claim and a hub, and nodes that have lost their connection to it; time passes as told."""

    def __init__(self, run: RunDir, describe_start, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 0.0
        monkeypatch.setattr(nodes.time, "monotonic", lambda: self.now_s)
        self.hub = socket.create_server(("127.0.0.1", 0))
        port = self.hub.getsockname()[1]
        self.record = replace(describe_start(), hub_port=port, nodes=(0, 1, 2, 3))
        self.run = run

    def look(self, node: int, *, locks_are_seen: bool) -> LostSupervisor:
        return LostSupervisor(self.run, self.record, node, locks_are_seen=locks_are_seen)

    def is_gone_within(self, seen: LostSupervisor, seconds: float, beats: bool = False) -> bool:
        """Look ten times per second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if beats:
                os.utime(self.run.pid_json, (self.now_s, self.now_s))
            if seen.is_gone():
                return True
            self.now_s += 0.1
        return False


@pytest.fixture
def lost(run: RunDir, describe_start, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorLab]:
    monkeypatch.setattr(folder, "BEAT_S", 1e6)
    made = SupervisorLab(run, describe_start, monkeypatch)
    yield made
    made.hub.close()


def test_a_supervisor_whose_lock_is_free_is_gone_and_the_lowest_node_goes_first(lost: SupervisorLab) -> None:
    lowest, next_one = lost.look(1, locks_are_seen=True), lost.look(2, locks_are_seen=True)
    lost.hub.close()
    with claim(lost.run, "x" * 16):
        assert not lost.is_gone_within(lowest, 2.0), "it is locked, and 3 s without a sign of life have not passed"
    assert lowest.is_gone() and not next_one.is_gone()
    assert lost.is_gone_within(next_one, 2 * TURN_S)


def test_a_free_lock_shows_nothing_where_locks_are_not_seen(lost: SupervisorLab) -> None:
    """As on a file system that keeps locks within a node."""
    seen = lost.look(1, locks_are_seen=False)
    lost.hub.close()
    lost.run.pid_json.touch()
    assert not lost.is_gone_within(seen, 10.0, beats=True)
    assert lost.is_gone_within(seen, 4.0)


def test_a_supervisor_that_answers_is_not_gone(lost: SupervisorLab) -> None:
    seen = lost.look(1, locks_are_seen=True)
    with claim(lost.run, "x" * 16):
        assert not lost.is_gone_within(seen, 10.0), "its hub accepts connections"
        lost.hub.close()
        assert lost.is_gone_within(seen, 1.0), "it shows no sign of life"
        assert read_claim(lost.run) is None, "the lock that the file server keeps does not hinder the next owner"


def test_a_stall_of_the_file_system_is_no_sign_of_death(lost: SupervisorLab) -> None:
    """The owner could not touch its file either."""
    seen = lost.look(1, locks_are_seen=False)
    lost.hub.close()
    lost.run.pid_json.touch()
    assert not seen.is_gone()
    lost.now_s += 60.0
    assert not seen.is_gone()
    assert not lost.is_gone_within(seen, 2.0)
    assert lost.is_gone_within(seen, 2.0)


def test_a_run_that_has_a_result_is_not_taken_over(lost: SupervisorLab) -> None:
    seen = lost.look(1, locks_are_seen=True)
    lost.hub.close()
    write_json(lost.run.result_json, {"status": "done", "exit_code": 0})
    assert not lost.is_gone_within(seen, 10.0)


@pytest.mark.parametrize(
    ("places", "supervisor", "node", "nodes_of_reach", "lost"),
    [
        ((0, 1, 2, 3), None, 1, (1, 2, 0, 3), ((0, "host0"),)),
        ((0, 1, 2), 0, 2, (2, 1, 0), ((0, "host0"),)),
        # Node 0 was left out, and went on supervising.
        ((1, 2, 3, 0), 0, 1, (1, 2, 3, 0), ((0, "host0"),)),
        ((1, 2, 3, 0), 0, 2, (2, 1, 3, 0), ((0, "host0"),)),
        ((1, 2, 3, 0, 4), 0, 4, (4, 1, 2, 3, 0), ((0, "host0"),)),
    ],
)
def test_the_node_that_takes_over_knows_who_is_left(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch, places, supervisor, node, nodes_of_reach, lost
) -> None:
    taken: list[Reach] = []

    def supervise(run: RunDir, reach: Reach, console: RunConsole) -> int:
        taken.append(reach)
        return 0

    monkeypatch.setattr(nodes, "is_running", lambda run: False)
    record = GenerationRecord(
        *(1, 0.0, "host0", "127.0.0.1", 1, {}, 3, "id", "logs", (), ()), nodes=places, supervisor=supervisor
    )
    joined = replace(COMMAND, take_over=supervise, num_nodes=lambda run: 3)
    assert nodes.take_over(run, record, node, console, joined, 1.0) == 0
    (reach,) = taken
    assert (reach.nodes, reach.lost) == (nodes_of_reach, lost)
