"""How a run ended, by what its workers left and what the supervisor saw."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder import memory
from trainspec_cli.run.folder.accounting import Recovery, WallTime
from trainspec_cli.run.folder.event_types.events import (
    EndedMark,
    EvalEvent,
    Event,
    LaunchMark,
    RecoveryEvent,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.record import NodeErrorRecord, RunResult, read_result, write_error, write_result
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.outcome import conclude
from trainspec_cli.run.supervise import Ending

DONE = RunResult(status="done", exit_code=0, steps=9, final_loss=2.0)
STOPPED = RunResult(status="stopped", exit_code=6, steps=4)
PEER_LOST = "Connection reset by peer"


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    made = make_job("train")
    made.logs.mkdir(parents=True)
    return made


def ending(job: Job, exit_code: int | None = 0, *, stop: bool = False, given_up: str = "") -> Ending:
    return Ending(job, exit_code, stop, given_up=given_up)


def report_error(job: Job, message: str = "boo", **more: Any) -> None:
    plain = {"rank": 1, "host": "h", "type": "ValueError", "message": message, "traceback": "T\n", "time": 5.0}
    write_json(job.run.error(1), {**plain, **more})


def log_events(path: Path, *events: Event) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"rank": 0, **to_plain(event)}) + "\n" for event in events))


LEFT: dict[str, RunResult | None] = {"done": DONE, "stopped": STOPPED, "nothing": None}


@pytest.mark.clause("RUN-7")
@pytest.mark.parametrize(
    ("left", "stop", "error", "status", "exit_code"),
    [
        ("done", False, None, "done", 0),
        ("done", True, None, "done", 0),
        ("done", False, "boo", "failed", 5),
        ("done", False, PEER_LOST, "done", 0),
        ("stopped", True, None, "stopped", 6),
        ("stopped", True, PEER_LOST, "stopped", 6),
        ("stopped", True, "boo", "failed", 5),
        ("stopped", False, None, "failed", 5),
        ("nothing", True, None, "stopped", 130),
        ("nothing", True, "boo", "failed", 5),
        ("nothing", False, None, "failed", 5),
        ("nothing", False, PEER_LOST, "failed", 5),
    ],
)
def test_a_run_ends_as_its_workers_left_it_unless_one_failed_or_nobody_wanted_it_to_stop(
    job: Job, left: str, stop: bool, error: str | None, status: str, exit_code: int
) -> None:
    if result := LEFT[left]:
        write_result(job.run, result)
    if error:
        report_error(job, error)
    outcome = conclude(job, ending(job, 1 if error else 0, stop=stop))
    assert (outcome.result.status, outcome.exit_code) == (status, exit_code)
    assert read_result(job.run) == outcome.result
    if status == "failed":
        assert outcome.explanation is not None
    if error == "boo":
        assert outcome.explanation is not None
        assert outcome.explanation.headline == "rank 1 (h): ValueError: boo"


def test_a_stop_with_a_checkpoint_has_another_exit_code_than_one_without(job: Job) -> None:
    job.run.checkpoint(4).mkdir(parents=True)
    outcome = conclude(job, ending(job, None, stop=True))
    assert (outcome.result.status, outcome.exit_code, outcome.explanation) == ("stopped", 6, None)


def test_the_first_cause_gives_its_exit_code(job: Job) -> None:
    report_error(job, "no disk", code="cannot_save", exit_code=4)
    outcome = conclude(job, ending(job, 1))
    assert (outcome.result.status, outcome.exit_code) == ("failed", 4)


@pytest.mark.parametrize("given_up", ["", "too few groups"])
@pytest.mark.parametrize(
    ("host", "lost", "exit_code"), [("n1", True, 5), ("", True, 4), ("n1", False, 4)], ids=["lost", "missing", "unfit"]
)
def test_a_node_that_never_came_or_lacks_something_is_no_failed_worker(
    job: Job, host: str, lost: bool, exit_code: int, given_up: str
) -> None:
    error = NodeErrorRecord(node=1, host=host, message="no GPU", lost=lost, hint="install the driver")
    write_error(job.run.node_error(1), error)
    outcome = conclude(job, ending(job, None, given_up=given_up))
    assert outcome.explanation is not None and outcome.explanation.node is not None
    assert outcome.explanation.node.never_came is (not host)
    if given_up and not lost:  # a group whose node is unfit has failed before, or the run is refused
        exit_code = 5
    assert (outcome.exit_code, read_result(job.run)) == (exit_code, outcome.result)
    assert outcome.result.exit_code == exit_code
    assert outcome.explanation.hint == ("" if given_up else "install the driver")


def test_a_lost_node_does_not_undo_a_run_that_was_done(job: Job) -> None:
    write_result(job.run, DONE)
    write_error(job.run.node_error(1), NodeErrorRecord(node=1, host="n1", message="was lost", lost=True))
    outcome = conclude(job, ending(job, 1))
    assert outcome.result.status == "done"
    assert outcome.explanation is not None and "n1" in outcome.explanation.headline


def test_a_run_that_the_supervisor_gave_up_failed_whatever_it_left(job: Job) -> None:
    write_result(job.run, DONE)
    outcome = conclude(job, ending(job, given_up="too few groups"))
    assert (outcome.result.status, outcome.exit_code) == ("failed", 5)
    assert outcome.explanation is not None
    assert outcome.explanation.headline == "too few groups"


def test_a_result_is_made_from_the_events_as_far_as_they_reach(job: Job) -> None:
    figures: dict[str, Any] = {"grad_norm": 1.0, "time_s": {}, "skipped": False, "tokens": 8, "step_time_s": 2.0}
    chip: dict[str, Any] = {"device_name": "a chip", "peak_flops": 1e9, "peak_source": "measured", "params": 1}
    log_events(
        job.run.events(0),
        StartEvent(time=10.0, step=0, world_size=1, flops_per_token=1.0, **chip),
        StepEvent(time=12.0, step=1, loss=5.0, **figures),
        EvalEvent(time=12.0, step=1, heldout_loss=9.0, heldout_bits_per_byte=9.0, seconds=0.0),
        RecoveryEvent(time=12.0, step=1, change="left", group=1, stall_s=0.5, lost_steps=1),
        StepEvent(time=14.0, step=2, loss=4.0, **figures),
        EvalEvent(time=14.0, step=2, heldout_loss=3.0, heldout_bits_per_byte=2.5, xz_bits_per_byte=2.0, seconds=0.0),
    )
    log_events(job.run.supervisor_events, LaunchMark(time=9.0), EndedMark(time=15.0))
    result = conclude(job, ending(job, 1)).result
    assert (result.status, result.steps, result.final_loss) == ("failed", 2, 4.0)
    assert (result.heldout_bits_per_byte, result.xz_bits_per_byte) == (2.5, 2.0)
    assert (result.tokens_per_s, result.mfu, result.weights_sha256) == (None, None, None)
    assert result.time_s == WallTime(productive=3.5, start_up=1.0, recovery=0.5, other=1.0)
    assert result.goodput == 3.5 / 6
    assert result.recoveries == (Recovery("left", 1, 1, 0.5, 1),)
    assert read_result(job.run) == result


def test_a_run_without_events_made_no_step(job: Job) -> None:
    result = conclude(job, ending(job, None, stop=True)).result
    assert (result.steps, result.final_loss, result.heldout_bits_per_byte, result.goodput) == (0, None, None, None)


def test_the_workers_own_result_gets_what_the_failures_cost(job: Job) -> None:
    write_result(job.run, DONE)
    log_events(
        job.run.events(0), RecoveryEvent(time=1.0, step=3, change="restart", group=None, stall_s=None, lost_steps=2)
    )
    result = conclude(job, ending(job)).result
    assert result == replace(DONE, recoveries=(Recovery("restart", None, 3, None, 2),))


@pytest.mark.parametrize(
    ("result", "on_disk", "copied", "remain"),
    [(STOPPED, 6, 6, False), (STOPPED, 6, 8, True), (DONE, 9, 8, False), (None, 6, 6, True)],
)
def test_copies_in_memory_stay_while_they_are_newer_than_the_disk_or_the_run_may_go_on(
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: RunResult | None,
    on_disk: int,
    copied: int,
    remain: bool,
) -> None:
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    write_json(job.run.run_json, {"memory_secret": "s"})
    folder = memory.make_memory_folder(job.run)
    write_json(folder / "slot0" / "rank00000.json", {"about": {"step": copied}})
    job.run.checkpoint(on_disk).mkdir(parents=True)
    if result:
        write_result(job.run, result)
    conclude(job, ending(job, stop=result is not None))
    assert folder.exists() is remain
