"""A node that joins a run which another one starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.errors import MachineError, WorkerError
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.session.console import RunConsole
from trainspec_cli.session.launching import nodes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(nodes, "RETRY_S", 0.001)
    monkeypatch.setattr(nodes, "RESULT_TIMEOUT_S", 0.2)
    return RunDir(tmp_path)


def test_a_node_serves_every_start_until_there_is_a_result(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[int, int]] = []

    def serve(run: RunDir, generation: int, node: int) -> None:
        served.append((generation, node))
        if generation == 2:
            write_json(run.result_json, {"status": "stopped", "exit_code": 6})
        else:
            generations.begin(run)

    monkeypatch.setattr(nodes, "run_agent", serve)
    generations.begin(run)
    assert nodes.join(str(run.root), 3, console, wait_s=0.2) == 6
    assert served == [(1, 3), (2, 3)]


def test_the_result_of_an_earlier_start_is_not_taken_for_this_ones(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.result_json, {"status": "done", "exit_code": 0})
    with pytest.raises(MachineError, match="no first node was found"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)
    monkeypatch.setattr(
        nodes, "run_agent", lambda run, *_: write_json(run.result_json, {"status": "stopped", "exit_code": 6})
    )
    generations.begin(run)
    assert nodes.join(str(run.root), 1, console, wait_s=0.2) == 6


def test_an_earlier_start_that_nobody_answers_for_is_passed_over(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def serve(run: RunDir, generation: int, node: int) -> None:
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
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "run_agent", lambda *_: None)
    generations.begin(run)
    assert nodes.join(str(run.root), 1, console, wait_s=0.2) == WorkerError.exit_code


def test_no_run_in_which_others_can_write_is_taken_part_in(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "run_agent", lambda *_: pytest.fail("nothing of it is run"))
    generations.begin(run)
    run.root.chmod(0o777)
    with pytest.raises(MachineError, match="may be written by every user"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)


def test_a_refusal_of_this_node_is_what_is_told(
    run: RunDir, console: RunConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*_: object) -> None:
        raise MachineError("nobody listens")

    monkeypatch.setattr(nodes, "run_agent", serve)
    generations.begin(run)
    with pytest.raises(MachineError, match="nobody listens"):
        nodes.join(str(run.root), 1, console, wait_s=0.2)
