"""Replace the lost nodes of a running Slurm job.

Slurm takes a lost node out of a job that outlives it (`--no-kill`), and a running job can only shrink: Slurm has not
merged a second job into a running one since version 23.11 (`--dependency=expand`). Therefore the run submits its own
batch script again, for one node and with `JOINS` set. There, the script starts only an agent, which connects to the
running start of the run in place of the lost node's agent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from trainspec_cli.core.environment_names import JOINS
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.printable import label_node
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.slurm import commands as slurm

CLOSE_S = 10.0
"""Time limit in seconds for cancelling all jobs at the end; Slurm kills a job 30 s after its warning."""
LOOK_S = 10.0
"""Interval in seconds at which Slurm is asked whether it has noticed the loss of a node itself."""


class ReplacementJobs:
    """The jobs that replace the lost nodes of one start of a run. Slurm's commands run in separate threads, because a
    controller that does not answer must not hold up the supervisor."""

    def __init__(self, run: RunDir, job_id: str, max_jobs: int, exclude: str | None = None):
        """`job_id`: the run's own job. `exclude`: nodes excluded by the user."""
        self._run = run
        self._job_id = job_id
        self._left = max_jobs
        self._exclude = exclude
        self._news: deque[str] = deque()
        self._lost: dict[int, tuple[str, threading.Event]] = {}
        """The nodes that are being replaced: their hostnames, and an event that is set when that is over."""
        self._threads: list[threading.Thread] = []

    def ask(self, node: int, hostname: str, generation: int) -> None:
        """Submit a job that replaces the lost node `node` in a start of the run."""
        if node in self._lost:
            self._lost.pop(node)[1].set()
        name = label_node(node, hostname)
        if not self._left:
            self._news.append(f"{name} is not replaced, because no job is left for it (cluster.slurm.max_requeues)")
            return
        self._left -= 1
        over = threading.Event()
        self._lost[node] = (hostname, over)
        about = (node, hostname, generation, over)
        self._threads.append(threading.Thread(target=self._replace, args=about, daemon=True))
        self._threads[-1].start()

    def withdraw(self, node: int, hostname: str = "") -> None:
        """End the replacement of a node. If the node has connected from `hostname`, and that is not the host that was
        lost, its job is kept, because it is the replacement."""
        if node in self._lost and self._lost[node][0] in (hostname, ""):
            self._lost.pop(node)[1].set()

    def take_news(self) -> list[str]:
        """Return the messages for the user since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Cancel all jobs that are still pending or running."""
        for _, over in self._lost.values():
            over.set()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _replace(self, node: int, hostname: str, generation: int, over: threading.Event) -> None:
        name = label_node(node, hostname)
        try:
            own = [other for other in self._own_nodes() if other != hostname]
            never = [*slurm.names(self._exclude), *own]
            job_id = slurm.submit(
                self._run.job_sbatch,
                *("--nodes=1", "--no-requeue", "--dependency=", "--export=ALL"),
                f"--job-name={self._run.root.name}-node{node}",
                f"--exclude={','.join(filter(None, [*never, hostname]))}",
                environment=replacement_environment(os.environ, node, generation),
            )
        except MachineError as error:
            self._news.append(f"{name} is not replaced: {error}")
            return
        self._news.append(f"{name} is lost; job {job_id} waits for a node in its place")
        # Until Slurm itself has noticed the loss, it would start the new job on the lost node. After that, the job may
        # have the node when it works again.
        is_noticed = False
        while not is_noticed and not over.wait(LOOK_S):
            with suppress(MachineError):  # Slurm does not answer now
                is_noticed = hostname not in self._own_nodes()
        if is_noticed:
            with suppress(MachineError):  # the job has another node already
                slurm.exclude_only(job_id, never)
        over.wait()
        try:
            slurm.cancel(job_id)
        except MachineError as error:
            self._news.append(f"{error}; to end the job: scancel {job_id}")

    def _own_nodes(self) -> Sequence[str]:
        return slurm.names(slurm.show(self._job_id).get("NodeList"))


def replacement_environment(environ: Mapping[str, str], node: int, generation: int) -> dict[str, str]:
    """Return the environment of a replacement's job: that of the run's own job, without the variables that Slurm has
    set for that job."""
    kept = {name: value for name, value in environ.items() if not name.startswith("SLURM") or name == "SLURM_CONF"}
    return {**kept, JOINS: f"{node}:{generation}"}


def join_in_place(joins: str, run: RunDir, command: Sequence[str]) -> NoReturn:
    """Become an agent of the running start of the run on this job's only node. `joins`: the value of `JOINS`.
    `command`: an srun that would start an agent on every node of the run's own job."""
    node, generation = joins.split(":")
    end = next(at for at, word in enumerate(command) if at and not word.startswith("-"))
    # srun uses the last of several options with the same name.
    alone = ("--nodes=1", "--ntasks=1", "--distribution=block")
    print(f"this job replaces node {node} in start {generation} of the run in {run.root}")
    sys.stdout.flush()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the time limit's warning
    command = [*command[:end], *alone, *command[end:], "--joins", node, str(run.root), generation]
    os.execvp(command[0], command)
