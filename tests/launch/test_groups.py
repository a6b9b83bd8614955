"""Why a replica group failed, where its torchrun was ended before it could list its workers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from trainspec_cli.launch.failure import WorkerFailure, explain
from trainspec_cli.launch.groups import failures_of
from trainspec_cli.launch.job.job import Job
from trainspec_cli.rundir.files import write_json


def test_what_was_seen_of_a_killed_worker_goes_before_what_its_peer_tells(make_job) -> None:
    """The supervisor sees the exit code before torchrun does; the other rank speaks of a lost connection alone."""
    job: Job = replace(make_job("endless"), ranks=range(2))
    lost = {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:1", "traceback": "..."}
    write_json(job.run.error(0), {"rank": 0, "host": "here", **lost})
    seen = WorkerFailure(1, "here", "was killed by SIGKILL")
    group = SimpleNamespace(running=SimpleNamespace(job=job, failure=lambda: seen), failure=seen)
    told = explain(failures_of(group))
    assert told.headline == "rank 1 (host here) was killed by SIGKILL"
    assert told.detail == "rank 0 lost the connection to rank 1, or ended with it."
