"""sbatch, squeue and scontrol, each with a deadline: a controller that is down must hang nobody."""

from __future__ import annotations

import os
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


def show(name: str, kind: str = "job") -> dict[str, str]:
    """What Slurm knows of a job (`Restarts`, `PreemptTime`, `ExcNodeList` and more) or a partition. Raises
    MachineError."""
    said = _run(["scontrol", "show", kind, name, "--oneliner"], hint="")
    words = re.sub(r" JobName=.*? UserId=", " UserId=", said).split()  # a name may hold blanks, and words like these;
    return dict(word.split("=", 1) for word in reversed(words) if "=" in word)  # so may paths, which stand at the end


def requeue(job_id: str) -> None:
    """Slurm ends this very job, its script included, and queues it anew. Raises MachineError."""
    _run(["scontrol", "requeue", job_id], hint="resume it yourself: sbatch job.sbatch in the run's folder")


def exclude(job_id: str, hostnames: Sequence[str], always: str | None = None) -> None:
    """The job, which waits to be started, stays away from `hostnames` too, and from those `always` (a node list).

    Of earlier ones as many are still avoided as leave the partition nodes enough: a node that was lost long ago may
    serve again, and a job that could never start would wait for ever. Raises MachineError.
    """
    job = show(job_id)
    nodes_wanted = int(job["NumNodes"].partition("-")[0])  # of a range the lower end
    room = int(show(job["Partition"], "partition")["TotalNodes"]) - nodes_wanted
    kept = _names(always)
    lost = [*(name for name in _names(job.get("ExcNodeList")) if name not in {*hostnames, *kept}), *hostnames]
    newest = lost[max(0, len(lost) - max(0, room - len(kept))) :]
    _run(["scontrol", "update", f"job={job_id}", f"ExcNodeList={','.join([*kept, *newest])}"], hint="")


def _names(node_list: str | None) -> list[str]:
    """`node[3-5]` -> node3, node4, node5"""
    if not node_list or node_list == NONE:
        return []
    return _run(["scontrol", "show", "hostnames", node_list], hint="").split()


def own_address() -> str:
    """Return the address of the node that this process runs on, the job's first, as Slurm itself reaches it."""
    hostname = os.environ.get("SLURMD_NODENAME") or _names(os.environ["SLURM_JOB_NODELIST"])[0]
    return address_of(hostname)


def address_of(hostname: str) -> str:
    """What Slurm itself reaches it by."""
    found = re.search(r"NodeAddr=(\S+)", _run(["scontrol", "show", "node", hostname], hint=""))
    return found[1] if found else hostname


def _run(command: Sequence[str], hint: str) -> str:
    """-> what it printed. Raises MachineError."""
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        hint = "go to a login node of the cluster, or print the script here without --submit"
        raise _failed("no_slurm", f"there is no {name} on this node", hint) from error
    except subprocess.TimeoutExpired as error:
        raise _failed("slurm_silent", f"{name} has not answered for {TIMEOUT_S:g} s", "scontrol ping") from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise _failed("slurm_refused", f"{name} refused: {said}", hint)
    return done.stdout


def _failed(code: str, message: str, hint: str) -> MachineError:
    return MachineError(Problem(code, message, hint=hint, environment=True))
