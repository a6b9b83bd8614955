"""Run sbatch, squeue and scontrol, each with a timeout, because a controller that is down must not block a command."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem

TIMEOUT_S = 30.0
WORDS_TIMEOUT_S = 5.0
"""Time limit for a question whose answer only explains a failure."""
NONE = "(null)"
SILENT = "slurm_silent"
"""The error code for a Slurm command that did not answer. The command may have taken effect nevertheless."""
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


def submit(script: Path, *options: str, environment: Mapping[str, str] | None = None) -> str:
    """Submit a script and return the job's id. Options take precedence over the script's. Raises MachineError with
    sbatch's message."""
    hint = "check cluster.slurm (sinfo lists partitions and nodes)"
    answer = _run(["sbatch", "--parsable", *options, str(script)], hint, environment)
    return answer.partition(";")[0].strip()


def cancel(job_id: str) -> None:
    """End a job that is pending or running. Raises MachineError."""
    _run(["scancel", job_id], hint="")


def is_alive(job_id: str) -> bool:
    """Return True if the job is pending or running. Return False if Slurm cannot be reached."""
    try:
        answer = _run(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"], hint="")
    except MachineError:
        return False
    return bool(set(answer.split()) - ENDED)


def pending() -> frozenset[str]:
    """Return the user's pending jobs, with the tasks of an array listed individually (`12_3`); empty if Slurm cannot be
    reached."""
    try:
        answer = _run(["squeue", "--me", "--noheader", "--array", "--states=PENDING", "--format=%i"], hint="")
    except MachineError:
        return frozenset()
    return frozenset(answer.split())


def show(name: str, kind: str = "job") -> dict[str, str]:
    """Return Slurm's fields for a job (`Restarts`, `PreemptTime`, `ExcNodeList`, ...) or a partition. Raises
    MachineError."""
    answer = _run(["scontrol", "show", kind, name, "--oneliner"], hint="")
    # the job's name may contain blanks, and words of the form NAME=VALUE
    words = re.sub(r" JobName=.*? UserId=", " UserId=", answer).split()
    # Paths may contain such words too; they come last, so the earlier fields win.
    return dict(word.split("=", 1) for word in reversed(words) if "=" in word)


def requeue(job_id: str) -> None:
    """Requeue this job: Slurm ends it, including the script, and queues it again. Raises MachineError."""
    _run(["scontrol", "requeue", job_id], hint="resume it yourself: sbatch job.sbatch in the run's folder")


def exclude(job_id: str, hostnames: Sequence[str], always: str | None = None) -> None:
    """Exclude `hostnames`, and those in the node list `always`, from this job, which was requeued.

    Earlier exclusions are kept, newest first, as long as the partition has enough nodes. The oldest exclusions are
    dropped first, because a node lost long ago may work again, and a job with too few nodes would wait forever. Raises
    MachineError."""
    job = show(job_id)
    nodes_wanted = int(job["NumNodes"].partition("-")[0])  # for a range such as 2-4, its lower end
    # While the job is completing, Slurm counts only the nodes that have not completed yet.
    nodes_wanted = max(nodes_wanted, int(os.environ.get("SLURM_JOB_NUM_NODES", "0")))
    room = int(show(job["Partition"], "partition")["TotalNodes"]) - nodes_wanted
    kept = names(always)
    lost = [*(name for name in names(job.get("ExcNodeList")) if name not in {*hostnames, *kept}), *hostnames]
    newest = lost[max(0, len(lost) - max(0, room - len(kept))) :]
    exclude_only(job_id, [*kept, *newest])


def exclude_only(job_id: str, hostnames: Sequence[str]) -> None:
    """Exclude exactly `hostnames` from a pending job. Raises MachineError."""
    _run(["scontrol", "update", f"job={job_id}", f"ExcNodeList={','.join(hostnames)}"], hint="")


def names(node_list: str | None) -> list[str]:
    """Expand a node list: `node[3-5]` -> node3, node4, node5."""
    if not node_list or node_list == NONE:
        return []
    return _run(["scontrol", "show", "hostnames", node_list], hint="").split()


def own_address() -> str:
    """Return Slurm's address for the node that this process runs on, the job's first."""
    hostname = own_name()
    found = re.search(r"NodeAddr=(\S+)", _run(["scontrol", "show", "node", hostname], hint=""))
    return found[1] if found else hostname


def own_name() -> str:
    """Return Slurm's name for the node that this process runs on."""
    return os.environ.get("SLURMD_NODENAME") or names(os.environ["SLURM_JOB_NODELIST"])[0]


def why_down(hostname: str) -> str:
    """Return the state of a node and Slurm's reason for it, such as `DOWN*: Not responding`; empty if Slurm gives no
    reason, does not answer in time, or did not start this process."""
    if "SLURM_JOB_ID" not in os.environ:
        return ""
    try:
        answer = _run(["scontrol", "show", "node", hostname, "--oneliner"], hint="", timeout_s=WORDS_TIMEOUT_S)
    except MachineError:
        return ""
    state = re.search(r"\bState=(\S+)", answer)
    reason = re.search(r"\bReason=(.+?)(?= \[\S+@|\s+\w+=|\s*$)", answer)
    return f"{state[1]}: {reason[1]}" if state and reason else ""


def topology_addresses(num_nodes: int) -> dict[str, str]:
    """Return the switches above each node of this job, in the format of SLURM_TOPOLOGY_ADDR. Raises MachineError."""
    srun = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--mpi=none"]
    answer = _run([*srun, "sh", "-c", 'echo "$SLURMD_NODENAME" "$SLURM_TOPOLOGY_ADDR"'], hint="")
    lines = (line.split() for line in answer.splitlines())
    addresses = {words[0]: words[1] if len(words) > 1 else "" for words in lines if words}
    return {node: addresses[node] for node in names(os.environ["SLURM_JOB_NODELIST"]) if node in addresses}


def show_topology() -> str:
    """Return what Slurm reports about its switches. Raises MachineError."""
    return _run(["scontrol", "show", "topology"], hint="")


def _run(
    command: Sequence[str], hint: str, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> str:
    """Run a command and return its output. Raises MachineError."""
    name = command[0]
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        hint = "use a login node of the cluster, or print the script here without --submit"
        raise _failed("no_slurm", f"{name} is not installed on this node", hint) from error
    except subprocess.TimeoutExpired as error:
        raise _failed(SILENT, f"{name} has not answered for {limit_s:g} s", "scontrol ping") from error
    if done.returncode != 0:
        answer = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise _failed("slurm_refused", f"{name} refused: {answer}", hint)
    return done.stdout


def _failed(code: str, message: str, hint: str) -> MachineError:
    return MachineError(Problem(code, message, hint=hint, environment=True))


# Place a job's nodes next to their neighbours on the same switch, as the plan requires.
#
# If asked to, Slurm numbers tasks according to a hostfile (`srun --distribution=arbitrary` with SLURM_HOSTFILE). It
# also tells each task the switches above its node (SLURM_TOPOLOGY_ADDR, under topology/tree). Both are documented in
# srun(1).


HOSTFILE = "SLURM_HOSTFILE"
SEPARATOR = "."


def arrange(addresses: Mapping[str, str], first: str, places: Sequence[int]) -> list[str]:
    """Return the job's nodes, ordered by number.

    `addresses`: for each node, the switches above it, from the top, and its name. Nodes are sorted so that the nodes of
    each switch are contiguous, starting with `first`, where the supervisor runs, and its neighbours. Nodes on the same
    switch stay in the order of `addresses`. `places`: the place of each number among the sorted nodes; if empty, they
    are numbered in sorted order."""
    own = _switches(addresses[first], first)

    def place(node: str) -> tuple[list[tuple[bool, str]], bool]:
        """Sort key: on every tier, the first node's switch comes first, and the other switches follow by name."""
        above = _switches(addresses[node], node)
        far = [above[: depth + 1] != own[: depth + 1] for depth in range(len(above))]
        return list(zip(far, above, strict=True)), node != first

    standing = sorted(addresses, key=place)
    return [standing[place] for place in places] if places else standing


def has_switches(addresses: Mapping[str, str]) -> bool:
    """Return whether Slurm knows the switches of its nodes."""
    return any(_switches(address, node) for node, address in addresses.items())


def _switches(address: str, node: str) -> list[str]:
    """`top.leaf1.node7` -> top, leaf1. Without Slurm's topology plug-in, the address is empty or only the node's
    name."""
    above = address.removesuffix(node).rstrip(SEPARATOR)
    return above.split(SEPARATOR) if above else []
