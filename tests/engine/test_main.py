"""What a failing worker leaves for its supervisor."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.core.environment_names import GENERATION, GROUP
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine import __main__ as worker
from trainspec_cli.engine.run import worker as training
from trainspec_cli.engine.run.startup import Startup
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import WorkerErrorRecord, read_error

DEVICE = torch.device("cpu")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in (GENERATION, GROUP, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker, "StopRequest", lambda: SimpleNamespace(listen=lambda: None))
    monkeypatch.setattr(worker.sys, "argv", ["engine", str(tmp_path)])
    return RunDir(tmp_path)


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def work(run_dir: RunDir, stop: object, startup: object) -> None:
        raise error

    monkeypatch.setattr("trainspec_cli.engine.run.worker.work", work)
    with pytest.raises(type(error)):
        worker.main()


def test_an_error_that_was_foreseen_keeps_its_code_hint_and_exit_code(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, WorkerError("it is infinite", code="not_finite", hint="lower optim.lr"))
    told = read_error(run_dir.error(0), WorkerErrorRecord)
    assert (told.rank, told.host, told.type) == (0, socket.gethostname(), "WorkerError")
    assert (told.code, told.hint, told.exit_code) == ("not_finite", "lower optim.lr", WorkerError.exit_code)
    assert told.message == "it is infinite"
    assert "in work" in told.traceback and told.time is not None


@pytest.mark.parametrize(("group", "rank", "size", "number"), [(0, 1, 4, 1), (2, 3, 4, 11), (1, 0, 2, 2)])
def test_any_other_error_is_told_of_by_the_rank_over_all_replica_groups(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, group: int, rank: int, size: int, number: int
) -> None:
    for name, value in ((GROUP, group), ("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))
    fail(monkeypatch, KeyError("w"))
    told = read_error(run_dir.error(number), WorkerErrorRecord)
    assert (told.rank, told.type, told.code, told.hint, told.exit_code) == (number, "KeyError", None, None, None)


def test_a_worker_that_is_fenced_off_writes_no_error(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GENERATION, str(generations.begin(run_dir)))
    fail(monkeypatch, KeyError("w"))
    run_dir.error(0).unlink()
    generations.begin(run_dir)
    fail(monkeypatch, KeyError("w"))
    assert not run_dir.error(0).exists()


@pytest.mark.parametrize("resumes", [False, True])
def test_a_worker_builds_fills_and_trains_in_order(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """A run that has a checkpoint does not read again what it began with."""
    order: list[Any] = []
    write_json(run_dir.run_json, {"data_dir": "/data", "digest": "recipe's"})
    if resumes:
        run_dir.checkpoint(3).mkdir(parents=True)
    plan = SimpleNamespace(device="cpu", replica_groups=1, group_size=1)
    relieved = SimpleNamespace(spec="recipe", replica_groups=1)
    monkeypatch.setattr(training, "read_plan", lambda run: plan if run == run_dir else None)

    def note(name: str, answer: Any = None) -> Any:
        return lambda *given: order.append((name, *given)) or answer

    monkeypatch.setattr(training, "SupervisorConnection", SimpleNamespace(of_worker=note("connects", "supervisor")))
    monkeypatch.setattr(training, "recall_reliefs", note("recalls", relieved))
    monkeypatch.setattr(training, "check_code", lambda spec, run: None)
    monkeypatch.setattr(training, "join_processes", note("joins", DEVICE))
    monkeypatch.setattr(training, "leave_processes", note("leaves"))
    monkeypatch.setattr(training, "build_train_state", note("builds", "state"))
    monkeypatch.setattr(training, "load_initial", note("loads"))
    monkeypatch.setattr(training.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(training, "Journal", note("writes", "journal"))
    monkeypatch.setattr(training, "open_source", note("opens", "source"))
    monkeypatch.setattr(training, "open_coordinator", note("joins in", "coordinator"))
    monkeypatch.setattr(training, "Trainer", note("is made", SimpleNamespace(train=note("trains"))))
    startup = Startup()
    training.work(run_dir, "stop", startup)  # type: ignore[arg-type]
    run = TrainingRun(relieved, "state", run_dir, "recipe's", "stop", "journal", None, "supervisor", startup)  # type: ignore[arg-type]
    assert order == [
        *(("joins", "cpu"), ("connects", 3), ("recalls", plan, run_dir), ("builds", relieved, DEVICE)),
        *([] if resumes else [("loads", relieved, "state")]),
        *(("writes", run_dir, 3, "recipe", None), ("opens", run, "/data"), ("joins in", run, "source")),
        *(("is made", run, "source", "coordinator"), ("trains",), ("leaves",)),
    ]
