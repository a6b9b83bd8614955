"""The processes of a launch, known by descent: orphans, those without an environment, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest
from lab.waiting import wait_for

from trainspec_cli.core.environment_names import GROUP
from trainspec_cli.run.backend import processes
from trainspec_cli.run.backend.family import Family, start
from trainspec_cli.run.job.job import Job

PARENT = """
import subprocess, sys, time
for environment in (None, {}):
    subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
time.sleep(600)
"""
"""Starts a process with its own environment and one with none, each in a session of its own."""


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job("endless")


@pytest.fixture
def family(job: Job) -> Iterator[Family]:
    with ExitStack() as ends:
        made = Family(job)
        ends.callback(made.close)
        ends.callback(made.kill)
        yield made


def names(members: list[psutil.Process]) -> list[str]:
    return sorted("sleep" if "sleep" in member.name() else "parent" for member in members)


def start_parent(job: Job, family: Family) -> subprocess.Popen[bytes]:
    parent = start((sys.executable, "-c", PARENT), job)
    wait_for(lambda: names(family.members()) == ["parent", "sleep", "sleep"])
    return parent


def test_all_that_descends_from_a_job_is_ended_with_it(job: Job, family: Family) -> None:
    parent = start_parent(job, family)
    assert family.kill() == []
    assert parent.wait() == -9


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_orphans_are_found_ended_and_reaped(job: Job, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = start_parent(job, family)
    monkeypatch.setattr("trainspec_cli.run.backend.family.EXEC_TIMEOUT_S", 0.0)  # they are past their exec
    children = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    wait_for(lambda: [child.ppid() for child in children] == [os.getpid()] * 2)
    assert names(family.members()) == ["sleep", "sleep"]
    assert family.kill() == []
    assert not any(psutil.pid_exists(child.pid) for child in children)


def test_strangers_and_other_groups_are_left_alone(job: Job, family: Family) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        parts = [start(("sleep", "600"), replace(job, environment={**job.environment, GROUP: name})) for name in "01"]
        eventual = Family(job, group=1)
        assert {member.pid for member in family.members()} >= {part.pid for part in parts}
        processes.kill_all(eventual.members)
        assert parts[1].wait() == -9
        assert (parts[0].poll(), stranger.poll()) == (None, None)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_look_waits_for_nobody(job: Job, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that looks for leftover processes must still answer; slurmstepd never has an environment."""
    bare = [subprocess.Popen(["sleep", "600"], env={}) for _ in range(4)]
    try:
        worker = start(("sleep", "600"), job)
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
        assert worker.pid in [member.pid for member in family.members()]
        monkeypatch.undo()
    finally:
        for process in bare:
            process.kill()
            process.wait()
