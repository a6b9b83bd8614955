"""Supervision of real torchrun processes: how they end, how that is explained, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest
from lab.drawing import slow_after
from lab.waiting import wait_for

from trainspec_cli.run.backend import processes
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.outcome import RunOutcome, conclude
from trainspec_cli.run.supervise import supervise

MakeJob = Callable[..., Job]


def run(job: Job, watch: Callable[[], None] = lambda: None) -> RunOutcome:
    outcome = conclude(job, supervise(job, None, LocalBackend, lambda stop_requested: watch()))
    assert processes.members(job.launch_id) == []
    return outcome


class Once:
    """Acts the first time a condition holds."""

    def __init__(self, condition: Callable[[], bool], act: Callable[[], None]):
        self._condition, self._act, self.done = condition, act, False

    def __call__(self) -> None:
        if not self.done and self._condition():
            self.done = True
            self._act()


def both_training(job: Job) -> bool:
    return all(job.run.events(rank).is_file() for rank in (0, 1))


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.slow
def test_a_run_that_ends_well_is_done(make_job: MakeJob) -> None:
    outcome = run(make_job("train"))
    assert (outcome.result.status, outcome.exit_code, outcome.explanation) == ("done", 0, None)


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
@pytest.mark.slow
def test_a_request_to_stop_lets_the_workers_write_a_checkpoint(make_job: MakeJob, number: signal.Signals) -> None:
    job = make_job("endless")
    outcome = run(job, Once(lambda: both_training(job), lambda: send(number)))
    assert (outcome.result.status, outcome.exit_code) == ("stopped", 6)
    assert job.run.checkpoint_steps() == [outcome.result.steps]


@pytest.mark.slow
def test_workers_that_ignore_the_request_are_killed_at_the_deadline(make_job: MakeJob) -> None:
    job = make_job("deaf", stop_grace_s=0.5)
    outcome = run(job, Once(lambda: both_training(job), lambda: send(signal.SIGTERM)))
    assert (outcome.result.status, outcome.exit_code) == ("stopped", 130)
    assert outcome.result.steps > 0


@pytest.mark.slow
def test_a_second_request_does_not_wait_for_the_deadline(make_job: MakeJob) -> None:
    job = make_job("deaf", stop_grace_s=600.0)
    first = Once(lambda: both_training(job), lambda: send(signal.SIGINT))
    second = Once(lambda: first.done, lambda: send(signal.SIGINT))

    def watch() -> None:
        second()
        first()

    outcome = run(job, watch)
    assert outcome.exit_code == 130


@pytest.mark.slow
def test_before_the_first_word_of_the_workers_a_request_ends_them_at_once(make_job: MakeJob) -> None:
    job = make_job("mute", stop_grace_s=600.0)
    outcome = run(job, Once(lambda: bool(processes.workers(job.launch_id)), lambda: send(signal.SIGINT)))
    assert (outcome.result.status, outcome.exit_code, outcome.result.steps) == ("stopped", 130, 0)


@pytest.mark.slow
def test_the_exception_that_began_it_is_shown_with_its_rank_and_traceback(make_job: MakeJob) -> None:
    outcome = run(make_job("raise"))
    assert (outcome.result.status, outcome.exit_code, outcome.result.steps) == ("failed", 5, 3)
    assert outcome.explanation.headline.startswith("rank 1 (here, step 3): ValueError: ")
    assert outcome.explanation.detail.startswith("Traceback (")
    assert 'raise ValueError(f"' in outcome.explanation.detail
    assert outcome.explanation.detail.rpartition("\n")[2].startswith("rank 0 lost the connection")
    assert "ChildFailedError" not in outcome.explanation.detail


@pytest.mark.slow
def test_a_worker_that_could_not_speak_is_shown_by_its_log(make_job: MakeJob) -> None:
    outcome = run(make_job("import_error"))
    assert outcome.exit_code == 5
    assert outcome.explanation.headline.endswith(" 1 without a report")
    assert "no_such_module_anywhere" in outcome.explanation.detail


@pytest.mark.slow
def test_a_killed_worker_is_said_to_be_killed(make_job: MakeJob) -> None:
    job = make_job("endless")

    def kill_rank_1() -> None:
        (victim,) = (p for p in processes.workers(job.launch_id) if processes.rank_of(p) == 1)
        victim.kill()

    outcome = run(job, Once(lambda: both_training(job), kill_rank_1))
    assert outcome.exit_code == 5
    assert outcome.explanation.headline.startswith("rank 1 (")
    assert "killed by SIGKILL; perhaps" in outcome.explanation.headline


@pytest.mark.slow
def test_when_torchrun_is_killed_its_workers_save_and_end(make_job: MakeJob) -> None:
    job = make_job("endless")

    def kill_torchrun() -> None:
        psutil.Process(processes.workers(job.launch_id)[0].ppid()).kill()

    outcome = run(job, Once(lambda: both_training(job), kill_torchrun))
    assert (outcome.result.status, outcome.exit_code) == ("failed", 5), "not started again"
    assert job.run.checkpoint_steps() == [outcome.result.steps]
    assert outcome.explanation.headline.startswith("torchrun ") and "SIGKILL" in outcome.explanation.headline


@pytest.mark.slow
def test_a_killed_torchrun_is_a_failure_that_starts_again(make_job: MakeJob, make_plan) -> None:
    """Its workers save and end, and nobody had asked for that; the second start is stopped by request."""
    job = make_job("endless")
    said: list[str] = []

    def kill_torchrun() -> None:
        psutil.Process(processes.workers(job.launch_id)[0].ppid()).kill()

    kill = Once(lambda: both_training(job), kill_torchrun)
    stop = Once(lambda: bool(said) and starts(job) == 2, lambda: send(signal.SIGTERM))

    def watch(stop_requested: bool) -> None:
        stop()
        kill()

    ending = supervise(job, make_plan(), LocalBackend, watch, said.append)
    outcome = conclude(ending.job, ending)
    assert len(said) == 1, said
    assert said[0].startswith("torchrun ") and "SIGKILL" in said[0] and "again from step " in said[0]
    assert (outcome.result.status, outcome.exit_code) == ("stopped", 6)
    assert [recovery.kind for recovery in outcome.result.recoveries] == ["restart"]
    assert processes.members(job.launch_id) == []


def starts(job: Job) -> int:
    return sum(event["type"] == "start" for event in read_events(job.run.events(0)))


SUPERVISOR = """
from pathlib import Path
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.supervise import supervise
supervise(Job(Path({root!r}), {command!r}, {environment!r}, 2, {grace!r}, Path({logs!r})), None, LocalBackend)
"""


def start_supervisor(job: Job) -> subprocess.Popen[bytes]:
    program = SUPERVISOR.format(
        root=str(job.root),
        command=job.command,
        environment=dict(job.environment),
        grace=job.stop_grace_s,
        logs=str(job.logs),
    )
    return subprocess.Popen([sys.executable, "-c", program])


def test_nothing_outlives_a_supervisor_that_was_killed(make_job: MakeJob) -> None:
    job = make_job("endless")
    supervisor = start_supervisor(job)
    wait_for(lambda: both_training(job))
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not processes.members(job.launch_id))
    assert json.loads(job.run.result_json.read_text())["status"] == "stopped"


@pytest.mark.parametrize("moment", ["torchrun starts", "workers hear"])
@pytest.mark.slow
def test_workers_that_have_not_begun_are_given_no_time_when_their_supervisor_is_killed(
    make_job: MakeJob, moment: str
) -> None:
    """They hear the request and do not follow it: nothing of theirs is lost."""
    job = make_job("mute", stop_grace_s=600.0)
    supervisor = start_supervisor(job)
    if moment == "torchrun starts":
        wait_for(lambda: processes.members(job.launch_id))
    else:
        wait_for((job.root / "listening1").exists)
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not processes.members(job.launch_id))
    assert not job.run.result_json.exists()
