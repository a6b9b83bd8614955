"""The backend of a multi-node run: it starts the nodes' agents, and reaches the workers through them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from trainspec_cli.core.environment_names import LAUNCH_ID, SUPERVISOR
from trainspec_cli.core.errors import MachineError, Problem, TrainspecError
from trainspec_cli.core.printable import format_duration
from trainspec_cli.core.wings import Point
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSection
from trainspec_cli.recipe.results.doctor import DISK, FAULTS, NodeReport
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.family import Family, start_guard
from trainspec_cli.run.backend.hub import Came, Hub, Lost, News, RemoteNode, max_pending
from trainspec_cli.run.backend.local import NodeProcesses, close_family
from trainspec_cli.run.backend.observe import GroupStart, RendezvousWatch, RunningStart, poll_starts
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.channel import messages
from trainspec_cli.run.channel.folders import nodes_secret, secret_of_start
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.accounting import read_node_failures
from trainspec_cli.run.folder.event_types.events import NodeCheckedEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import Fence, GenerationRecord, UnplannedWork, create_secret
from trainspec_cli.run.folder.paths import RECIPE, RunDir
from trainspec_cli.run.job.job import ENGINE, Job, build_node_job, next_log_folder, own_modules
from trainspec_cli.run.job.machine import NodePlace, allow_connections, listen, listening_address
from trainspec_cli.run.recovery import run_state
from trainspec_cli.run.recovery.reliability import repeated_faults
from trainspec_cli.run.rendezvous.address import Rendezvous

AGENT = ("-m", "trainspec_cli.run.backend.nodes.agent")
"""Arguments for Python, followed by the run folder and the generation."""
SUPERVISOR_RANK = -1
"""The rank stated in the supervisor's events."""
END_TIMEOUT_S = 12.0
"""Time in seconds to wait for an agent that was asked to end. After that, the agent notices that the hub is silent, and
ends its processes by itself."""
JOIN_KEY = "run.join_timeout_s"
"""The recipe key for how long nodes wait for one another."""
DRAIN_S = 5.0
"""Time in seconds that srun may take to exit after all agents have ended."""


class Replacements(Protocol):
    """Finds other machines for the lost nodes of a run with replica groups. No method but `close` may block."""

    def ask(self, node: int, hostname: str, generation: int) -> None:
        """Find a machine in place of the lost node `node`, which joins this generation under the same number."""

    def withdraw(self, node: int, hostname: str = "") -> None:
        """Note that the node is connected, from `hostname`."""

    def take_news(self) -> list[str]:
        """Return the messages for the user since the last call."""

    def close(self) -> None: ...


class Agents(Protocol):
    """Whatever has started the nodes' agents for one generation."""

    def poll(self) -> int | None:
        """Return its exit code if it has failed to start any agents; None or 0 otherwise."""

    def take_losses(self) -> list[tuple[int, str]]:
        """Return the numbers of the nodes that were lost since the last call, with the reasons, as far as it knows
        earlier than the hub."""

    def end(self, *, in_order: bool, is_fenced: bool) -> None:
        """End whatever is left. `in_order`: all agents have ended by themselves. `is_fenced`: a newer start owns the
        run."""


class CommandAgents:
    """A command that runs an agent on every node (srun), or only on this node."""

    def __init__(self, job: Job, generation: int):
        environment = {**os.environ, **job.environment}
        del environment[LAUNCH_ID]  # the guard must not end the agents
        with job.torchrun_log.open("ab") as log:
            self._process = subprocess.Popen(
                (*job.command, str(job.root), str(generation)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C on a terminal reaches only the supervisor
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def take_losses(self) -> list[tuple[int, str]]:
        return []  # srun only exits once all agents have

    def end(self, *, in_order: bool, is_fenced: bool) -> None:
        """Agents without work exit by themselves, so srun is given time to exit. On SIGTERM, srun asks Slurm to end a
        job step by number, and that number may already belong to a newer start."""
        signals = (signal.SIGKILL,) if is_fenced else (signal.SIGTERM, signal.SIGKILL)
        for number in (None, *signals) if in_order else signals:
            if self._process.poll() is not None:
                return
            if number is not None:
                os.killpg(self._process.pid, number)
            try:
                self._process.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                continue


class AgentThread(threading.Thread):
    """The agent of the supervisor's own node, in a thread of its process: it then lasts from one generation to the
    next, and with it the node's standby."""

    def __init__(self, serve: Callable[[RunDir, int], int], job: Job, generation: int):
        """`serve` takes the run and the generation, and returns the agent's exit code."""
        super().__init__(name="agent", daemon=True)
        self._serve = partial(serve, job.run, generation)
        self._log = job.torchrun_log
        self._exit_code: int | None = None
        self.start()

    def run(self) -> None:
        try:
            self._exit_code = self._serve()
        except Exception as error:
            self._log.write_text("".join(traceback.format_exception(error)))
            self._exit_code = error.exit_code if isinstance(error, TrainspecError) else 1

    def poll(self) -> int | None:
        return self._exit_code

    def take_losses(self) -> list[tuple[int, str]]:
        return []

    def end(self, *, in_order: bool, is_fenced: bool) -> None:
        self.join(2 * DRAIN_S)


@dataclass(frozen=True)
class Reach:
    """How this process reaches the nodes of a job."""

    head: str
    """Name or address of the first node, where this process runs."""
    start: tuple[str, ...]
    """A command that runs an agent on every node (srun), or only on this node; RUN and GENERATION are appended to
    it."""
    rendezvous_port: int | None = None
    """The port to use; None for any free port."""
    return_timeout_s: float = 0.0
    """If too few nodes are left and a lost node's agent may be restarted, the other nodes wait this many seconds for
    it."""
    nodes: tuple[int, ...] = ()
    """The numbers of the job's nodes and spares, of which this one is the first; if empty, they are 0, 1, 2, ..."""
    folder: str = ""
    """HOST:PORT where this process serves the run folder; empty if all nodes share the folder."""
    lost: tuple[tuple[int, str], ...] = ()
    """The nodes that were lost with the first node from which this one takes over the run, and their hostnames, if
    known."""
    replacements: Replacements | None = None
    """None if users start lost nodes again themselves."""
    open_agents: Callable[[Job, int], Agents] = CommandAgents
    """Starts the agents for a generation of the job; by default with the command `start`."""


def agent_command(node: int | None = None) -> tuple[str, ...]:
    """Return the command of an agent. Without a number, the agent uses its Slurm task's number."""
    number = () if node is None else ("--node", str(node))
    return (sys.executable, *AGENT, *number)


def build_nodes_job(plan: Plan, root: Path, reach: Reach) -> Job:
    """Return the description of the job that `NodesBackend` starts."""
    root = root.absolute()
    return Job(
        root=root,
        command=reach.start,
        environment={LAUNCH_ID: secrets.token_hex(8), **own_modules()},
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=next_log_folder(RunDir(root).logs),
        nodes=reach.nodes or tuple(range(plan.num_nodes + (plan.spec.cluster.reliability.spare_nodes or 0))),
        lost=reach.lost,
        # Slurm replaces a lost node by requeueing the job.
        survives_lost_nodes=reach.return_timeout_s > 0 and plan.spec.resilience.survives_lost_nodes,
    )


@dataclass(frozen=True)
class Examination:
    """The check that each node runs before its workers start."""

    command: tuple[str, ...]
    """Arguments for Python that run the check, whose last line of output is its report as JSON."""
    judge: Callable[[Sequence[NodeReport]], None]
    """A function that receives the reports of all nodes, ordered by node number. Raises MachineError if a node is
    unfit."""
    of_all: bool = True
    """False if only nodes that have failed repeatedly run it."""


@dataclass(frozen=True)
class NodePart:
    """The information about the job that one node needs."""

    run: RunDir
    plan: Plan | None
    record: GenerationRecord
    place: NodePlace
    machine: Machine
    serves_once: bool = True
    """Whether another process serves the next start on this node (under Slurm)."""

    @property
    def keeps_standby(self) -> bool:
        """Return whether this process prepares later starts (`standby.py`)."""
        return self.plan is not None and self.plan.spec.resilience.standby and not self.serves_once


class RunningNode(Protocol):
    """A job's processes on one node. It reports on each group that it starts, in messages to the hub."""

    def start(self, group: int, number: int) -> None: ...

    def poll(self) -> list[messages.ProcessMessage]: ...

    def stop(self, group: int | None = None) -> None: ...

    def kill(self, group: int) -> None: ...

    def record_hang(self, hang: messages.HangFound) -> None:
        """Record where in the code this node's ranks are, because the run hangs or may be hanging."""

    def close(self) -> tuple[int, ...]: ...


NameHang = Callable[[messages.HangFound], None]
"""Makes the nodes of a job record where in the code their ranks are."""


class JobKind(Protocol):
    """What differs between kinds of multi-node jobs. Nodes look up the kind by name."""

    @property
    def name(self) -> str: ...

    @property
    def join_key(self) -> str:
        """The command-line option that sets how long nodes wait for one another, as the user types it."""

    def open_start(
        self, job: Job, plan: Plan | None, group: int, number: int, nodes: Sequence[int], name_hang: NameHang
    ) -> RunningStart:
        """Return an object that tracks a group's start on the first node."""

    def build_job(self, part: NodePart) -> Job:
        """Return the job of one node. Raises MachineError."""

    def open_node(self, part: NodePart, job: Job) -> RunningNode:
        """Return the processes of one node without starting any."""


class RecipeJobs:
    name = RECIPE
    join_key = JOIN_KEY

    def open_start(
        self, job: Job, plan: Plan | None, group: int, number: int, nodes: Sequence[int], name_hang: NameHang
    ) -> RunningStart:
        return GroupStart(job, plan, group, number, nodes)

    def build_job(self, part: NodePart) -> Job:
        """If an agent dies whose node the run continues without, its workers are killed without a stop request, because
        they would forward the request to all others."""
        plan = part.plan
        assert plan is not None, "a recipe has a plan"
        job = build_node_job(plan, part.run.root, part.machine, part.place.node, part.record)
        survives = plan.replica_groups > 1 or (plan.spec.resilience.survives_lost_nodes and not part.serves_once)
        return replace(job, stop_grace_s=0.0) if survives else job

    def open_node(self, part: NodePart, job: Job) -> RunningNode:
        return NodeProcesses(job, part.plan, part.place, keeps_standby=part.keeps_standby)


RECIPE_JOBS = RecipeJobs()
JOB_KINDS: Point[JobKind] = Point("job_kinds")


class NodesBackend:
    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        *,
        reach: Reach,
        worker: Sequence[str] = ENGINE,
        examination: Examination | None = None,
        kind: JobKind = RECIPE_JOBS,
        describe_work: Callable[[int], UnplannedWork] | None = None,
    ):
        """Take ownership of the run, open the hub and the rendezvous server, and start the agents.

        Without a plan, the job's processes rendezvous at a port of the first node, without the rendezvous server.
        `describe_work` receives that port and returns what every node should run."""
        assert (plan is None) == (describe_work is not None), "a plan states what to run"
        self._kind = kind
        self._describe_work = describe_work
        self._job = job
        self._plan = plan
        self._reach = reach
        # A node that returns, or a spare, must not end a run that works without it. But one that has failed repeatedly
        # for the same cause is not used again unchecked.
        # (There is no examination for users' commands.)
        self._suspects = repeated_faults(read_node_failures(job.run)) if job.survives_lost_nodes and examination else {}
        # A node that takes over the run continues it: its nodes were examined when it started.
        continues = bool(reach.lost) or (job.survives_lost_nodes and job.is_restart)
        of_all = examination and examination.of_all and not continues
        self._examination = examination if of_all or self._suspects else None
        self._num_nodes = plan.num_nodes if plan else job.num_nodes or len(job.nodes)
        self._num_groups = plan.replica_groups if plan else 1
        # A run with one group restarts without the lost node, or its job is requeued.
        self._replacements = reach.replacements if self._num_groups > 1 else None
        self._places = (*job.nodes, *job.left_out)
        """The numbers of the job's nodes; those beyond the plan's nodes are spares."""
        job.logs.mkdir(parents=True, exist_ok=True)
        self.generation = generations.begin(job.run)
        self._fence = Fence(job.run, self.generation)
        secret_file = job.run.secret(self.generation)
        address = listening_address(reach.head)
        # Nodes without the folder know only one port of this node before they have copied it.
        port = 0 if reach.folder else reach.rendezvous_port or 0
        secret = nodes_secret() if reach.folder else None
        of_start = secret_of_start(secret, job.launch_id, self.generation) if secret else None
        self.hub = self._hub = self._open_hub(create_secret(secret_file, of_start), address)
        self._rendezvous: Rendezvous | None = None
        self._rendezvous_watch: RendezvousWatch | None = None
        self._port = 0
        """For a job without a plan: the port where its processes rendezvous."""
        if plan:
            self._rendezvous = Rendezvous(job, plan.spec.resilience, secret_file, address, port, name=reach.head)
            self._rendezvous_watch = RendezvousWatch(self._rendezvous, job.run, plan)
        else:
            with listen(address, port) as found:  # fails early if the port is in use
                self._port = int(found.getsockname()[1])
        generations.describe(job.run, self._record(worker))
        # If this process is killed, the groups still need the rendezvous server to agree on their last step. After
        # that, a guard ends it.
        self._guarded = (start_guard(job), Family(job)) if self._num_groups > 1 else None
        self._agents = reach.open_agents(job, self.generation)
        self._starts: dict[int, RunningStart] = {}
        self._presence: dict[int, run_state.Presence] = {}
        self._hostnames: tuple[str, ...] = ()
        # This node may have taken over the run, whose groups start without the nodes that were lost before.
        self._lost = {self._places.index(number) for number, _ in job.lost}
        for place in self._lost:
            self._hub.nodes[place].loss = "was lost before this start"
        self._agents_failed = False

    def start(self, group: int, number: int) -> None:
        about = (self._job, self._plan, group, number, self._nodes_of(group), self._name_hang)
        self._starts[group] = self._kind.open_start(*about)
        self._send(group, messages.StartGroup(group, number))

    def poll(self) -> list[run_state.Event]:
        """Return the new events. Raises MachineError if a node is unfit from the start, and WorkerError if the run was
        restarted elsewhere."""
        self._fence.check_now_and_then()
        heard = self._hub.poll()
        for number, why in self._agents.take_losses():
            heard += self._hub.lose(self._place(number), why)
        events = [event for news in heard for event in self._handle(news)]
        events += self._admit()
        if not self._agents_failed and not any(node.wire for node in self._hub.nodes) and (code := self._agents.poll()):
            self._agents_failed = True
            events.append(run_state.AgentsFailed(code))
        for group in range(self._num_groups):
            nodes = [self._hub.nodes[node] for node in self._nodes_of(group)]
            presence: run_state.Presence = "there"
            if not all(node.admitted and not node.is_gone for node in nodes):
                now_s = time.monotonic()
                may_come = [not node.is_gone or now_s < node.lost_at_s + self._reach.return_timeout_s for node in nodes]
                presence = "awaited" if all(may_come) else "away"
            if presence != self._presence.get(group):
                self._presence[group] = presence
                events.append(run_state.PresenceChanged(group, presence))
        # A spare that has failed repeatedly is not used before it has been examined.
        hostnames = tuple(
            "" if not node.is_connected or (node.hostname in self._suspects and not node.admitted) else node.hostname
            for node in self._hub.nodes
        )
        if hostnames != self._hostnames and self._places:
            self._hostnames = hostnames
            missing = [str(self._number(node)) for node in self._hub.nodes[: self._num_nodes] if not node.is_connected]
            waiting = ""
            # The agent of node 0 is started by this process's job, and may connect later than another node's agent.
            key = self._join_key
            if missing and self._hub.nodes[0].is_connected:
                waiting = (
                    f"{self._num_nodes - len(missing)} of {self._num_nodes} nodes have joined; waiting for node "
                    f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''} at {self._reach.head} "
                    f"(up to {format_duration(self._join_timeout_s)} after the start{'; ' if key else ''}{key})"
                )
            events += [run_state.NodesSeen(hostnames, waiting)]
        events += poll_starts(self._starts)
        events += [run_state.Noted(text) for text in (self._replacements.take_news() if self._replacements else ())]
        return events + (self._rendezvous_watch.poll() if self._rendezvous_watch else [])

    def stop(self, group: int | None = None) -> None:
        if group is None:
            self._hub.send(messages.StopWorkers(None))
        else:
            self._send(group, messages.StopWorkers(group))

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        """Kill a group or everything. A lost node is fenced off, and ends its processes by itself."""
        if group is None:
            return self._close()
        if group in self._starts:
            self._send(group, messages.KillGroup(group, self._starts[group].number))
        return ()

    # Process the agents' reports

    def _handle(self, news: News) -> list[run_state.Event]:
        node, message = news
        if node.node >= self._num_nodes:  # a spare only has to be connected
            return []
        if isinstance(message, Came):
            returned = node.node in self._lost
            self._lost.discard(node.node)
            if self._replacements:
                self._replacements.withdraw(self._number(node), node.hostname)
            return [run_state.NodeBack(self._number(node), node.hostname)] if returned else []
        if isinstance(message, Lost):
            return [self._lose(node, node.loss)]
        if isinstance(message, messages.NodeRefuses):
            node.refusal = message.why
            lost = [self._lose(node, message.why)] if self._starts_on(node) else []
            return [*lost, run_state.NodeUnfit(self._number(node), node.hostname, message.why, message.hint)]
        if isinstance(message, messages.StopAsked):
            return [run_state.NodeStopRequested(self._number(node))]
        if isinstance(message, messages.ProcessMessage):
            start = self._starts.get(message.group)
            if start and start.number == message.number:  # a message from an earlier start is ignored
                return start.hear(node.node, node.hostname, message)
        return []

    def _lose(self, node: RemoteNode, why: str) -> run_state.NodeLost:
        self._lost.add(node.node)
        if self._replacements:
            self._replacements.ask(self._number(node), node.hostname, self.generation)
        there = self._starts_on(node)
        for start in there:
            start.lose(node.node, self._number(node), node.hostname, why)
        return run_state.NodeLost(self._number(node), node.hostname, why, tuple(start.group for start in there))

    def _number(self, node: RemoteNode) -> int:
        """Return a node's number in the job, as shown in messages. The hub numbers nodes by place."""
        return self._places[node.node] if self._places else node.node

    def _place(self, number: int) -> int:
        return self._places.index(number) if self._places else number

    def _nodes_of(self, group: int) -> range:
        return self._plan.nodes_of_group(group) if self._plan else range(self._num_nodes)

    def _name_hang(self, hang: messages.HangFound) -> None:
        self._hub.send(hang)

    def _starts_on(self, node: RemoteNode) -> list[RunningStart]:
        return [start for start in self._starts.values() if node.node in self._nodes_of(start.group)]

    def _admit(self) -> list[run_state.Event]:
        """Let workers start once every connected node has been checked, and after that on each node that reconnects."""
        here = [node for node in self._hub.nodes[: self._num_nodes] if not node.is_gone and not node.refusal]
        new = [node for node in here if node.wire and not node.admitted]
        if self._suspects:
            return self._admit_checked([node for node in self._hub.nodes if node.is_connected])
        if self._examination and any(node.report is None for node in here):
            return []
        if new and self._examination:
            reports = [node.report for node in here if node.report is not None]
            write_json(self._job.root / "preflight.json", [report.as_json() for report in reports])
            try:
                self._examination.judge(reports)
            except MachineError as error:
                if len(new) == len(here):
                    raise
                return [self._refuse(node, error) for node in new]
        for node in new:
            node.admitted = True
        return []

    def _admit_checked(self, nodes: Sequence[RemoteNode]) -> list[run_state.Event]:
        """Admit connected nodes, but those that have failed repeatedly only if their examination finds nothing."""
        events: list[run_state.Event] = []
        for node in nodes:
            if node.admitted or node.refusal:
                continue
            if node.hostname not in self._suspects:
                node.admitted = True
                continue
            if node.report is None:
                continue
            # The space in a shared run folder is no fault of the node, and the run trains in that folder.
            is_shared = not self._reach.folder
            checks = (check for check in node.report.checks if not (is_shared and check.name == DISK))
            bad = [check for check in checks if check.status == "fail" or check.name == FAULTS]
            if bad:
                cause, times = self._suspects[node.hostname]
                failed = f"it has failed {times} times for the same cause ({cause}), and its check says: {bad[0].found}"
                events.append(self._refuse(node, MachineError(Problem("unfit_host", failed, hint=bad[0].advice))))
                continue
            node.admitted = True
            checked = EventWriter(self._job.run.supervisor_events, SUPERVISOR_RANK)
            checked.write(NodeCheckedEvent(host=node.hostname))
            checked.close()
        return events

    def _refuse(self, node: RemoteNode, error: MachineError) -> run_state.Event:
        node.refusal = str(error)
        node.send(messages.EndAgent(node.refusal))
        if node.node >= self._num_nodes:  # the run works without this spare
            return run_state.Noted(f"{node.name} cannot be used: {node.refusal}")
        return run_state.NodeUnfit(self._number(node), node.hostname, node.refusal, error.problems[0].hint)

    # Open and close a generation

    @property
    def _join_timeout_s(self) -> float:
        wanted_s = self._job.join_timeout_s if self._job.rejoin_s is None else self._job.rejoin_s
        return run_section(self._plan).join_timeout_s if wanted_s is None else wanted_s

    @property
    def _join_key(self) -> str:
        return self._kind.join_key if self._job.rejoin_s is None else ""

    def _open_hub(self, secret: bytes, address: str) -> Hub:
        nodes = max(self._num_nodes, len(self._places))
        allow_connections(max_pending(nodes) + nodes + self._job.world_size)
        welcomes_back = self._num_groups > 1
        return Hub(
            nodes,
            secret,
            listen(address),
            timeout_s=run_section(self._plan).node_timeout_s,
            join_timeout_s=self._join_timeout_s,
            join_key=self._join_key,
            welcomes_back=welcomes_back,
            num_own=self._num_nodes,
        )

    def _record(self, worker: Sequence[str]) -> GenerationRecord:
        addresses = {}
        if self._rendezvous:
            addresses = {**self._rendezvous.environment, SUPERVISOR: f"{self._reach.head}:{self._hub.port}"}
        return GenerationRecord(
            generation=self.generation,
            at=time.time(),
            host=socket.gethostname(),
            head=self._reach.head,
            hub_port=self._hub.port,
            rendezvous=addresses,
            num_nodes=self._num_nodes,
            launch_id=self._job.launch_id,
            logs=str(self._job.logs),
            worker=tuple(worker),
            examine=self._examination.command if self._examination else (),
            suspects=tuple(sorted(self._suspects)),
            nodes=self._places,
            supervisor=self._reach.nodes[0] if self._reach.nodes else 0,
            folder=self._reach.folder,
            own=self._describe_work(self._port) if self._describe_work else None,
        )

    def _send(self, group: int, message: messages.StartGroup | messages.StopWorkers | messages.KillGroup) -> None:
        for node in self._nodes_of(group):
            self._hub.nodes[node].send(message)

    def _close(self) -> tuple[int, ...]:
        """Make all agents end their processes, then end whatever has started the agents."""
        self._hub.send(messages.EndAgent())
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline_s and any(node.is_connected for node in self._hub.nodes):
            self._hub.poll()
            time.sleep(POLL_S)
        own = self._hub.nodes[: self._num_nodes]
        others = self._hub.nodes[self._num_nodes :]
        in_order = all(node.has_left for node in [*own, *(node for node in others if node.wire)])
        self._hub.close()
        if self._rendezvous:
            self._rendezvous.close()
        self._agents.end(in_order=in_order, is_fenced=self._fence.is_closed())
        if self._replacements:
            self._replacements.close()
        return close_family(self._guarded[1], self._guarded[0]) if self._guarded else ()


def run_section(plan: Plan | None) -> RunSection:
    """Return the recipe section with the nodes' time limits; without a plan, return its defaults."""
    return plan.spec.run if plan else RunSection()
