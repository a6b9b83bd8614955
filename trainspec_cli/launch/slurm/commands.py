"""sbatch, squeue and scontrol, each with a deadline: a controller that is down must hang nobody."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.errors import MachineError, Problem

TIMEOUT_S = 30.0
NONE = "(null)"
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


def submit(script: Path) -> str:
    """-> the job's number. Raises MachineError with what sbatch says."""
    said = _run(["sbatch", "--parsable", str(script)], hint="look at cluster.slurm (sinfo lists partitions and nodes)")
    return said.partition(";")[0].strip()


def is_alive(job_id: str) -> bool:
    """Whether Slurm still holds the job, waiting or running; False where Slurm cannot be asked."""
    try:
        said = _run(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"], hint="")
    except MachineError:
        return False
    return bool(set(said.split()) - ENDED)


def pending() -> frozenset[str]:
    """The user's own jobs that wait to be started, an array's tasks one by one (`12_3`); none where Slurm cannot be
    asked."""
    try:
        said = _run(["squeue", "--me", "--noheader", "--array", "--states=PENDING", "--format=%i"], hint="")
    except MachineError:
        return frozenset()
    return frozenset(said.split())


def show(job_id: str) -> dict[str, str]:
    """What Slurm knows of a job: `Restarts`, `PreemptTime`, `ExcNodeList` and more. Raises MachineError."""
    words = _run(["scontrol", "show", "job", job_id, "--oneliner"], hint="").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def requeue(job_id: str) -> None:
    """Slurm ends this very job, its script included, and queues it anew. Raises MachineError."""
    _run(["scontrol", "requeue", job_id], hint="resume it yourself: sbatch job.sbatch in the run's folder")


def exclude(job_id: str, hosts: Sequence[str]) -> None:
    """The job, which waits to be started, stays away from `hosts` too. Raises MachineError."""
    known = show(job_id).get("ExcNodeList", NONE)
    before = [] if known == NONE else [known]
    _run(["scontrol", "update", f"job={job_id}", f"ExcNodeList={','.join([*before, *hosts])}"], hint="")


def first_host(node_list: str) -> str:
    """`node[3-5]` -> node3"""
    return _run(["scontrol", "show", "hostnames", node_list], hint="").split()[0]


def address_of(host: str) -> str:
    """What Slurm itself reaches it by."""
    found = re.search(r"NodeAddr=(\S+)", _run(["scontrol", "show", "node", host], hint=""))
    return found[1] if found else host


def _run(command: Sequence[str], hint: str) -> str:
    """-> what it printed. Raises MachineError."""
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        hint = "go to a login node of the cluster, or print the script here without --submit"
        raise _failed("no_slurm", f"there is no {name} on this host", hint) from error
    except subprocess.TimeoutExpired as error:
        raise _failed("slurm_silent", f"{name} has not answered for {TIMEOUT_S:g} s", "scontrol ping") from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise _failed("slurm_refused", f"{name} refused: {said}", hint)
    return done.stdout


def _failed(code: str, message: str, hint: str) -> MachineError:
    return MachineError(Problem(code, message, hint=hint, environment=True))
