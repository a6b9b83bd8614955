"""`python -m trainspec_cli.launch.backend.nodes.agent [--node I] RUN GENERATION`: one host's part of a job.

Runs torchrun here and does what the hub says. When the hub is silent for too long this host is cut off: what runs here
is ended, since the job goes on elsewhere; of a run of replica groups it comes back when it can. Under Slurm the host's
number is the task's.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainspec_cli.errors import MachineError, Problem, TrainspecError
from trainspec_cli.launch.backend.executor import Running
from trainspec_cli.launch.backend.local import LocalExecutor
from trainspec_cli.launch.backend.nodes.parts import Parts
from trainspec_cli.launch.backend.nodes.wire import Wire, call_hub
from trainspec_cli.launch.backend.processes import POLL_S
from trainspec_cli.launch.job.job import Job, build_node_job
from trainspec_cli.launch.job.machine import detect
from trainspec_cli.launch.job.place import NodePlace
from trainspec_cli.launch.signals import PatientRequests, on_stop_signal
from trainspec_cli.node import node_name
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.secret import read_secret
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.rules.check import check_machine
from trainspec_cli.trust import private_files

APPEAR_TIMEOUT_S = 60.0
"""A network file system may show a new file this late on another host."""
EXAMINE_TIMEOUT_S = 180.0
RETURN_INTERVAL_S, RETURN_TIMEOUT_S = 1.0, 300.0
"""How often, and for how long, an agent that was cut off tries to come back."""
CUT_OFF, UNFIT = 3, 4
"""Exit codes of an agent: it no longer heard the hub, or the host lacks something."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int, default=os.environ.get("SLURM_NODEID"))
    parser.add_argument("run", type=RunDir)
    parser.add_argument("generation", type=int)
    options = parser.parse_args()
    sys.exit(run_agent(options.run, options.generation, int(options.node)))


def run_agent(run: RunDir, generation: int, node: int) -> int:
    """-> 0 when all is done here, how it ended being told to the hub; else `CUT_OFF` or `UNFIT`.

    Raises MachineError where the hub cannot be reached.
    """
    start = await_start(run, generation)
    plan = from_plain(Plan, read_json(run.plan_json))
    requests = PatientRequests()
    serve = partial(_serve, run, plan, start, node, generation, requests)

    def goes_on() -> bool:
        return not requests.count and not run.result_json.is_file() and generations.newest(run) == generation

    with on_stop_signal(requests.add), private_files():
        return _keep_serving(serve, goes_on) if plan.replica_groups > 1 else serve()


def _keep_serving(serve: Callable[[], int], goes_on: Callable[[], bool]) -> int:
    """An agent of replica groups that was cut off comes back when there is a way again."""
    code, deadline = serve(), time.monotonic() + RETURN_TIMEOUT_S
    while code == CUT_OFF and goes_on() and time.monotonic() < deadline:
        time.sleep(RETURN_INTERVAL_S)
        try:
            code, deadline = serve(), time.monotonic() + RETURN_TIMEOUT_S
        except MachineError as error:
            if isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError)):
                break  # the first host is there, and its hub, or this start's secret, is not
    return code


def _serve(
    run: RunDir, plan: Plan, start: dict[str, Any], node: int, generation: int, requests: PatientRequests
) -> int:
    hub = connect(start, read_secret(run.secret(generation)), node)
    try:
        return Agent(hub, run, plan, start, node, generation, requests).work()
    except MachineError as error:
        hub.say(f"failed {' '.join(str(error).split())}")
        hub.say("ended 1")
        return UNFIT
    finally:
        hub.close()


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


def connect(start: dict[str, Any], secret: bytes, node: int) -> Wire:
    """Raises MachineError."""
    address = (start["head"], start["hub_port"])
    try:
        wire = call_hub(address, secret)
    except OSError as error:
        message = f"{socket.gethostname()} cannot reach the first host at {address[0]}:{address[1]}: {error}"
        hint = "open the way between the job's hosts (a firewall), or look at the cable"
        raise MachineError(Problem("hub_unreachable", message, hint=hint, environment=True)) from error
    wire.say(f"hello {node} {node_name()}")
    return wire


class Agent:
    def __init__(
        self,
        hub: Wire,
        run: RunDir,
        plan: Plan,
        start: dict[str, Any],
        node: int,
        generation: int,
        requests: PatientRequests,
    ):
        self._hub, self._run, self._plan, self._start, self._node = hub, run, plan, start, node
        self._generation, self._requests = generation, requests
        self._heard: set[str] = set()
        self._orders: deque[list[str]] = deque()

    def work(self) -> int:
        """Examine the host, run the workers, tell how it ended. Raises MachineError for what this host lacks."""
        self._check_host()
        if self._start["examine"]:
            self._examine()
        if not self._may_begin():
            return CUT_OFF if self._is_cut_off else 0
        running = self._start_running()
        asked = False
        try:
            while running.anything_left() and "end" not in self._heard and self._listen():
                if not asked and (self._requests.count or "stop" in self._heard):
                    asked = True
                    running.ask_to_stop()
        finally:
            running.end()
        self._take_in()
        if self._is_cut_off:
            return CUT_OFF
        code = running.exit_code()
        self._hub.say(f"ended {1 if code is None else abs(code)}")
        return 0

    def _check_host(self) -> None:
        machine = detect(look_for_gpus=self._plan.device != "cpu")
        if problems := check_machine(self._plan.spec, machine):
            raise MachineError(problems)

    def _start_running(self) -> Running | Parts:
        job, plan = self._build_job(), self._plan
        if plan.replica_groups == 1:
            return LocalExecutor().submit(job)
        return Parts(self._hub, self._orders, plan, job, self._node, self._start["head"])

    def _build_job(self) -> Job:
        start = self._start
        place = NodePlace(self._node, start["num_nodes"], start["head"])
        return build_node_job(
            self._plan,
            self._run.root,
            detect(look_for_gpus=self._plan.device != "cpu"),
            place,
            start["rendezvous"],
            self._generation,
            launch_id=f"{start['launch_id']}-{self._node}",
            logs=Path(start["logs"]) / f"node{self._node:05d}",
            worker=start["worker"],
        )

    def _examine(self) -> None:
        """Tell the hub what this host can do."""
        with tempfile.TemporaryFile() as output:
            examining = subprocess.Popen(self._start["examine"], stdin=subprocess.DEVNULL, stdout=output)
            deadline = time.monotonic() + EXAMINE_TIMEOUT_S
            while examining.poll() is None and self._listen() and "end" not in self._heard:
                if time.monotonic() > deadline:
                    break
            examining.kill()
            examining.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        if not lines:
            message = f"the examination of {socket.gethostname()} ended without a report within {EXAMINE_TIMEOUT_S:g} s"
            raise MachineError(Problem("examination_failed", message, hint=f"look at {self._start['logs']}"))
        self._hub.say(f"report {lines[-1]}")

    def _may_begin(self) -> bool:
        """Wait until the hub lets the workers start; False where it does not."""
        while not self._heard & {"go", "end"} and self._listen():
            pass
        return "go" in self._heard

    def _listen(self) -> bool:
        """Hear the hub and be heard, for an instant; False where it is gone."""
        time.sleep(POLL_S)
        self._take_in()
        self._hub.beat()
        return not self._is_cut_off

    def _take_in(self) -> None:
        """What has come; only then can it be said that nothing did."""
        said = self._hub.hear()
        self._heard.update(word for word, *_ in said)
        self._orders.extend(said)

    @property
    def _is_cut_off(self) -> bool:
        return "end" not in self._heard and (
            self._hub.closed or self._hub.silent_s > self._plan.spec.run.node_timeout_s
        )


if __name__ == "__main__":
    try:
        main()
    except TrainspecError as error:
        print(f"{error}\n{error.problems[0].hint}", file=sys.stderr)
        sys.exit(error.exit_code)
