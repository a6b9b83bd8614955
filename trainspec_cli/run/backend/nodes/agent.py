"""`python -m trainspec_cli.run.backend.nodes.agent [--node I] RUN GENERATION`: the agent of one node of a job.

It runs this node's workers on the hub's request, and reports how they exit. The agent of a spare node, or of a node
that was dropped because it is too slow, is connected but runs nothing. If the hub is silent for too long, the agent
considers this node disconnected and ends its processes, because the job continues elsewhere. In a run with replica
groups, the agent reconnects when it can. Under Slurm, the node's number is the task's number.

`--joins I` instead of `--node I`: the agent replaces that of a lost node. A signal ends this agent, but not the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainspec_cli.core.errors import Interrupted, MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.node import node_name, private_files
from trainspec_cli.core.printable import format_duration, label_node
from trainspec_cli.core.reading.files import parse_json
from trainspec_cli.core.wings import part_named
from trainspec_cli.recipe.records import from_plain
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import check_machine
from trainspec_cli.run.backend import processes
from trainspec_cli.run.backend.nodes.backend import JOB_KINDS, RECIPE_JOBS, NodePart, RunningNode, run_section
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.backend.standby import keep_standby
from trainspec_cli.run.channel import messages
from trainspec_cli.run.channel.wire import Wire, call_hub
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import NodesEvent
from trainspec_cli.run.folder.events import read_sound, spoken_bytes
from trainspec_cli.run.folder.generations import GenerationRecord, read_secret
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.job.folder import find_owner
from trainspec_cli.run.job.job import own_modules
from trainspec_cli.run.job.machine import NodePlace, detect
from trainspec_cli.run.signals import PatientRequests, interrupt, on_stop_signal
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.queue import own_job

APPEAR_TIMEOUT_S = 60.0
"""Time in seconds that a network file system may take to show a new file on another node."""
EXAMINE_TIMEOUT_S = 180.0
FIRST_NODE_TIMEOUT_S = 30.0
"""Time in seconds that the first node of a Slurm job may take to show a sign of life."""
RETURN_INTERVAL_S = 1.0
"""Interval between a disconnected agent's attempts to reconnect."""
CUT_OFF, UNFIT = 3, 4
"""Exit codes of an agent that lost its connection to the hub, and of one whose node is unfit."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int, default=os.environ.get("SLURM_PROCID"))
    parser.add_argument("--joins", type=int)
    parser.add_argument("run", type=RunDir)
    parser.add_argument("generation", type=int)
    options = parser.parse_args()
    # Slurm sends this warning signal to every process of a step; only the supervisor acts on it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    is_replacement = options.joins is not None
    node = options.joins if is_replacement else int(options.node)

    def tell(what: str) -> None:
        """Print a line to the agents' common log."""
        print(f"{time.strftime('%H:%M:%S')} {label_node(node, node_name())}: {what}", flush=True)

    def begin(record: GenerationRecord) -> None:
        tell(f"{describe_part(options.run, record, node)} (first node: {record.head}:{record.hub_port})")

    in_slurm = "SLURM_JOB_ID" in os.environ and not is_replacement
    try:
        code = run_agent(
            options.run,
            options.generation,
            node,
            begin,
            tell,
            serves_once=True,
            alone=is_replacement,
            first_may_change=lambda: in_slurm,
        )
    except KeyboardInterrupt:
        tell("ends, because it was asked to")
        sys.exit(Interrupted.exit_code)
    if code == CUT_OFF and in_slurm:
        requeue_without_first_node(options.run, options.generation, tell)
    if code == 0:
        tell("ends, because the first node has ended this start")
    sys.exit(code)


def requeue_without_first_node(run: RunDir, generation: int, tell: Callable[[str], None]) -> None:
    """Requeue the Slurm job of this agent if its first node is down.

    A job that outlives its nodes (`--no-kill`) also outlives the node of its batch script: Slurm 22.05 leaves it
    running on the other nodes until its time limit."""
    plan = read_plan(run) if run.plan_json.is_file() else None
    if plan is None or plan.replica_groups == 1:
        return  # Slurm ends such a job with its first lost node
    before_bytes = spoken_bytes(run)
    tell(f"requeues the job, unless the run continues within {FIRST_NODE_TIMEOUT_S:g} s")
    time.sleep(FIRST_NODE_TIMEOUT_S)
    is_over = run.result_json.is_file() or generations.newest(run) > generation
    if is_over or find_owner(run) is not None or spoken_bytes(run) > before_bytes:
        return
    done = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    try:
        job = slurm.show(own_job())
        may_requeue = done < plan.spec.cluster.slurm.max_requeues
        if may_requeue and job.get("JobState") == "RUNNING" and int(job.get("Restarts", done)) == done:
            tell("requeues the job, because its first node is down")
            slurm.requeue(own_job())
    except MachineError as error:
        tell(f"the job was not requeued: {error}")


def describe_part(run: RunDir, record: GenerationRecord, node: int) -> str:
    """Return what a node does in a start, for messages."""
    place = record.place_of(node)
    if place < record.num_nodes:
        return f"joined start {record.generation}; its output goes to {Path(record.logs) / f'node{place:05d}'}"
    events = read_sound(run.directives)
    reasons = [event.reason for event in events if isinstance(event, NodesEvent) and event.node == node]
    why = "it was dropped, because it was slow" if reasons[-1:] == ["slow"] else "a spare"
    return f"stands by in start {record.generation}: {why}"


def run_agent(
    run: RunDir,
    generation: int,
    node: int,
    begin: Callable[[GenerationRecord], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
    *,
    serves_once: bool = False,
    alone: bool = False,
    first_may_change: Callable[[], bool] = lambda: False,
) -> int:
    """Take part in one generation of a run. Return 0 when the hub has ended it, otherwise `CUT_OFF` or `UNFIT`. A
    signal stops the run or, with `alone`, only this agent (KeyboardInterrupt). `tell` receives messages about this
    node. `first_may_change`: whether another node takes over from a first node that is down, so that it is not waited
    for.

    `begin` is called once the first node's record has been read, before anything is started. `serves_once`: this
    process does not serve later generations. Raises MachineError if the
    hub cannot be reached, and RecipeError if another agent has the node's number."""
    record = await_record(run, generation)
    begin(record)
    plan = None if record.own else read_plan(run)
    requests = PatientRequests()
    serve = partial(_serve, run, plan, record, record.place_of(node), requests, tell, serves_once=serves_once)

    def goes_on() -> bool:
        is_over = run.result_json.is_file() or generations.newest(run) > generation
        return not requests.count and not is_over and not (first_may_change() and find_owner(run) is None)

    with on_stop_signal(interrupt if alone else requests.add), private_files():
        if plan and plan.replica_groups > 1:
            return _keep_serving(serve, goes_on, plan.spec.run.join_timeout_s, tell)
        return serve()


def _keep_serving(
    serve: Callable[[], int],
    goes_on: Callable[[], bool],
    return_timeout_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Serve the hub. After a disconnection, try to reconnect for `return_timeout_s` (only in runs with replica
    groups)."""
    code = serve()
    deadline = time.monotonic() + return_timeout_s
    if code == CUT_OFF:
        tell(f"tries to connect again, for up to {format_duration(return_timeout_s)}")
    while code == CUT_OFF and goes_on() and time.monotonic() < deadline:
        time.sleep(RETURN_INTERVAL_S)
        try:
            code = serve()
            deadline = time.monotonic() + return_timeout_s
        except MachineError as error:
            if isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError)):
                break  # the first node is up, but this start's hub or secret no longer exists
    return code


def _serve(
    run: RunDir,
    plan: Plan | None,
    record: GenerationRecord,
    place: int,
    requests: PatientRequests,
    tell: Callable[[str], None],
    *,
    serves_once: bool = False,
) -> int:
    secret = read_secret(run.secret(record.generation))
    wire = connect(record, secret, place, run_section(plan).node_timeout_s)
    try:
        agent = Agent(wire, run, plan, record, place, requests, serves_once=serves_once)
        code = agent.work() if place < record.num_nodes else agent.stand_by()
        if code == CUT_OFF:
            how = "has closed the connection" if wire.closed else f"has been silent for {wire.silent_s:.0f} s"
            tell(f"the first node, {record.host}, {how}")
        if agent.refusal:
            tell(f"is not used by the run: {agent.refusal}")
        return code
    except MachineError as error:
        hint = next((problem.hint for problem in error.problems if problem.hint), "")
        tell(f"cannot take part: {' '.join(str(error).split())}")
        wire.send(messages.NodeRefuses(" ".join(str(error).split()), " ".join(hint.split())))
        wire.send(messages.Goodbye())
        return UNFIT
    finally:
        wire.close()


def await_record(run: RunDir, generation: int) -> GenerationRecord:
    """Return the first node's record of this generation. Raises MachineError if this node cannot see the record."""
    deadline = time.monotonic() + APPEAR_TIMEOUT_S
    while not (record := generations.read(run, generation)):
        if time.monotonic() > deadline:
            message = f"{socket.gethostname()} cannot see {run.generation(generation)}"
            hint = "put the run folder on a file system that all nodes share"
            raise MachineError(Problem("not_shared", message, hint=hint, environment=True))
        time.sleep(POLL_S)
    return record


def connect(record: GenerationRecord, secret: bytes, node: int, timeout_s: float) -> Wire:
    """Connect to the hub, which may be silent for `timeout_s`. Raises MachineError."""
    address = (record.head, record.hub_port)
    try:
        wire = call_hub(address, secret, timeout_s)
    except OSError as error:
        message = f"{socket.gethostname()} cannot reach the first node at {address[0]}:{address[1]}: {error}"
        hint = "allow connections between the job's nodes (a firewall may block them), or check the cable"
        raise MachineError(Problem("hub_unreachable", message, hint=hint, environment=True)) from error
    wire.send(messages.Hello(node, node_name()))
    return wire


class Agent:
    def __init__(
        self,
        wire: Wire,
        run: RunDir,
        plan: Plan | None,
        record: GenerationRecord,
        node: int,
        requests: PatientRequests,
        *,
        serves_once: bool = True,
    ):
        """`plan`: None for a kind of job without a plan."""
        self._wire = wire
        self._plan = plan
        self._record = record
        self._node = node
        self._kind = part_named(JOB_KINDS, record.kind, RECIPE_JOBS)
        self._requests = requests
        self._is_stopping = False
        self._is_ended = False
        self.refusal = ""
        """Why the run does not use this node; empty if it does."""
        self._machine = detect(look_for_gpus=plan is None or plan.device != "cpu")
        place = NodePlace(node, record.num_nodes, record.head)
        self._part = NodePart(run, plan, record, place, self._machine, serves_once)
        self._received: deque[messages.Message] = deque()
        self._numbers: dict[int, int] = {}
        """The newest start of each group that is running or has run on this node."""

    def work(self) -> int:
        """Check the node, then run workers until the hub ends the job. Raises MachineError if the node is unfit."""
        self._take_in()
        # another agent may have this node's number and be running processes that must not be killed
        while not self._wire.was_heard and not self._is_cut_off:
            self._listen()
        if self._is_cut_off:
            return CUT_OFF
        if self._plan and (problems := check_machine(self._plan.spec, self._machine)):
            raise MachineError(problems)
        if self._record.examine and (not self._record.suspects or self._is_suspect):
            self._examine()
        job = self._kind.build_job(self._part)
        processes.kill(job.launch_id)  # processes left by an agent that was killed on this node
        running = self._kind.open_node(self._part, job)
        try:
            while self._listen():
                while self._received:
                    message = self._received.popleft()
                    if isinstance(message, messages.StartGroup):
                        self._numbers[message.group] = message.number
                        running.start(message.group, message.number)
                    elif isinstance(message, messages.KillGroup):
                        if self._numbers.get(message.group) == message.number:
                            running.kill(message.group)
                        else:  # this agent has reconnected, so the start may be unknown here
                            self._wire.send(messages.GroupExited(message.group, message.number, None))
                    elif isinstance(message, messages.HangFound):
                        running.record_hang(message)
                    elif isinstance(message, messages.StopWorkers) and message.group is not None:
                        running.stop(message.group)
                    elif isinstance(message, messages.StopWorkers):
                        self._stop(running)
                if self._requests.count and not self._is_stopping:
                    self._wire.send(messages.StopAsked())
                    self._stop(running)
                for message in running.poll():
                    self._wire.send(message)
        finally:
            running.close()
        self._take_in()
        if self._is_cut_off:
            return CUT_OFF
        self._wire.send(messages.Goodbye())
        return 0

    def stand_by(self) -> int:
        """Serve the hub until it ends this start, or until a signal asks the agent to stop."""
        environment = self._kind.build_job(self._part).environment
        if self._is_suspect:
            self._examine()
        while self._listen() and not self._requests.count:
            self._received.clear()
            if self._part.keeps_standby:
                keep_standby(environment)
        if self._is_cut_off:
            return CUT_OFF
        self._wire.send(messages.Goodbye())
        return 0

    @property
    def _is_suspect(self) -> bool:
        """Return whether this node has failed repeatedly, so that it is examined before it is used again."""
        return node_name() in self._record.suspects

    def _stop(self, running: RunningNode) -> None:
        """Ask the workers to stop, but only once, even if both Slurm and the hub request it."""
        if not self._is_stopping:
            self._is_stopping = True
            running.stop()

    def _examine(self) -> None:
        """Report to the hub what this node can do."""
        with tempfile.TemporaryFile() as output:
            command = (sys.executable, *self._record.examine)
            examining = subprocess.Popen(
                command, env={**os.environ, **own_modules()}, stdin=subprocess.DEVNULL, stdout=output
            )
            deadline = time.monotonic() + EXAMINE_TIMEOUT_S
            while examining.poll() is None and self._listen() and time.monotonic() < deadline:
                pass
            examining.kill()
            examining.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        try:
            report = from_plain(NodeReport, parse_json(lines[-1] if lines else ""))
        except (ValueError, RecipeError) as error:
            if self._is_ended:
                return
            message = f"the check of {node_name()} ended without a report within {EXAMINE_TIMEOUT_S:g} s"
            raise MachineError(Problem("examination_failed", message, hint=f"look at {self._record.logs}")) from error
        self._wire.send(messages.NodeExamined(report))

    def _listen(self) -> bool:
        """Exchange messages with the hub for a moment; return False if the hub has ended this agent or is lost."""
        time.sleep(POLL_S)
        self._take_in()
        self._wire.beat()
        return not self._is_ended and not self._is_cut_off

    def _take_in(self) -> None:
        """Receive all messages that have arrived. The hub may be called silent only if there were none."""
        self._received.extend(self._wire.receive())
        if taken := next((one for one in self._received if isinstance(one, messages.NumberTaken)), None):
            message = f"--node-rank {self._node} is used twice: {taken.hostname} has it"
            hint = "give each node a different number, from 0 to --nnodes - 1"
            raise RecipeError(Problem("usage", message, "--node-rank", hint))
        for one in self._received:
            if isinstance(one, messages.EndAgent):
                self._is_ended = True
                self.refusal = one.why or self.refusal

    @property
    def _is_cut_off(self) -> bool:
        timeout_s = run_section(self._plan).node_timeout_s
        return not self._is_ended and (self._wire.closed or self._wire.silent_s > timeout_s)


if __name__ == "__main__":
    try:
        main()
    except TrainspecError as error:
        print(f"{error}\n{error.problems[0].hint}", file=sys.stderr)
        sys.exit(error.exit_code)
