"""`python -m trainspec_cli.launch.nodes.agent RUN GENERATION [NODE]`: one host's part of a job.

Runs torchrun here and does what the hub says. When the hub is silent for too long this host is cut off: what runs here
is ended, since the job goes on elsewhere. Under Slurm the host's number is the task's.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainspec_cli.errors import MachineError, Problem, TrainspecError
from trainspec_cli.launch.job import build_node_job
from trainspec_cli.launch.local import LocalExecutor, LocalProcesses
from trainspec_cli.launch.machine import detect
from trainspec_cli.launch.nodes.wire import Wire
from trainspec_cli.launch.place import Place
from trainspec_cli.launch.processes import POLL_S
from trainspec_cli.launch.signals import PatientRequests, on_stop_signal
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.rules import check_machine

APPEAR_TIMEOUT_S = 60.0
"""A network file system may show a new file this late on another host."""
CONNECT_TIMEOUT_S = 10.0
CUT_OFF = 3
"""The exit code of an agent that no longer heard the hub."""


def main() -> None:
    root, generation = Path(sys.argv[1]), int(sys.argv[2])
    node = int(sys.argv[3] if len(sys.argv) > 3 else os.environ["SLURM_NODEID"])
    sys.exit(run_agent(RunDir(root), generation, node))


def run_agent(run: RunDir, generation: int, node: int) -> int:
    """-> torchrun's exit code, or `CUT_OFF`. Raises MachineError where the hub cannot be reached."""
    start = await_start(run, generation)
    requests = PatientRequests()
    with on_stop_signal(requests.add):
        hub = connect(start, node)
        try:
            running, timeout_s = _start_workers(run, generation, start, node)
        except TrainspecError as error:
            hub.say(f"failed {' '.join(str(error).split())}")
            hub.say("ended 1")
            return error.exit_code
        code = _Watch(hub, running, requests, timeout_s).until_ended()
    hub.close()
    return code


def await_start(run: RunDir, generation: int) -> dict[str, Any]:
    """What the hub has written of itself."""
    deadline = time.monotonic() + APPEAR_TIMEOUT_S
    while not (start := generations.read(run, generation)):
        if time.monotonic() > deadline:
            message = f"{socket.gethostname()} does not see {run.generation(generation)}"
            hint = "keep run.dir on a file system that all hosts share"
            raise MachineError(Problem("not_shared", message, hint=hint, environment=True))
        time.sleep(POLL_S)
    return start


def connect(start: dict[str, Any], node: int) -> Wire:
    """Raises MachineError."""
    address = (start["head"], start["hub_port"])
    try:
        wire = Wire(socket.create_connection(address, CONNECT_TIMEOUT_S))
    except OSError as error:
        message = f"{socket.gethostname()} cannot reach the first host at {address[0]}:{address[1]}: {error}"
        hint = "open the way between the job's hosts (a firewall), or look at the cable"
        raise MachineError(Problem("hub_unreachable", message, hint=hint, environment=True)) from error
    wire.say(f"hello {start['token']} {node} {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}")
    return wire


def _start_workers(run: RunDir, generation: int, start: dict[str, Any], node: int) -> tuple[LocalProcesses, float]:
    """-> what runs here, and how long the hub may be silent. Raises MachineError for what this host lacks."""
    plan = from_plain(Plan, read_json(run.plan_json))
    machine = detect(look_for_gpus=plan.device != "cpu")
    if problems := check_machine(plan.spec, machine):
        raise MachineError(problems)
    place = Place(node, start["num_nodes"], start["head"], start["rendezvous_port"])
    logs = Path(start["logs"]) / f"node{node:05d}"
    job = build_node_job(plan, run.root, machine, place, generation, f"{start['token']}-{node}", logs, start["worker"])
    return LocalExecutor().submit(job), plan.spec.run.node_timeout_s


class _Watch:
    def __init__(self, hub: Wire, running: LocalProcesses, requests: PatientRequests, timeout_s: float):
        self._hub, self._running, self._requests, self._timeout_s = hub, running, requests, timeout_s
        self._asked = False

    def until_ended(self) -> int:
        """-> torchrun's exit code, or `CUT_OFF`."""
        ended = False
        while not ended and self._running.anything_left():
            for word, *_ in self._hub.hear():
                if word == "stop":
                    self._requests.add()
                ended = ended or word == "end"
            if self._requests.count and not self._asked:
                self._asked = True
                self._running.ask_to_stop()
            self._hub.beat()
            if self._hub.closed or self._hub.silent_s > self._timeout_s:
                self._running.end()
                return CUT_OFF
            time.sleep(POLL_S)
        self._running.end()
        code = self._running.exit_code()
        with suppress(OSError):
            self._hub.say(f"ended {1 if code is None else abs(code)}")
        return 0


if __name__ == "__main__":
    try:
        main()
    except TrainspecError as error:
        print(f"{error}\n{error.problems[0].hint}", file=sys.stderr)
        sys.exit(error.exit_code)
