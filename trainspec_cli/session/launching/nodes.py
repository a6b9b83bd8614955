"""Runs on several nodes without Slurm: the user types the same command on each node. The first node starts the run, and
the others join it."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainspec_cli.core.environment_names import NODES_SECRET
from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError, WorkerError
from trainspec_cli.core.node import check_tree
from trainspec_cli.core.printable import format_duration
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.resilience import NodeLossResponse
from trainspec_cli.recipe.keys.run import RunSection, RunSpec
from trainspec_cli.recipe.records import Absent
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.reporter.live import LiveView
from trainspec_cli.run.backend.nodes.agent import CUT_OFF, describe_part, run_agent
from trainspec_cli.run.backend.nodes.backend import JOIN_KEY, AgentThread, Reach, agent_command
from trainspec_cli.run.backend.nodes.mirror import Mirror, mirrored
from trainspec_cli.run.channel.folders import nodes_secret
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.events import spoken_bytes
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RECIPE, RunDir
from trainspec_cli.run.folder.record import RunResult, read_plan, read_plan_of_all_nodes, read_result
from trainspec_cli.run.job.folder import ClaimSigns, drop_claim, is_running, read_claim
from trainspec_cli.run.job.machine import own_address
from trainspec_cli.session.launching.kinds import kind_of

RETRY_S = 0.1
TURN_S = 0.5
"""When the first node is lost, each node gives those with a lower number this much longer to take over, in seconds."""
WATCH_S = 1.0
"""Interval at which a node that has joined reads the run's progress from the shared folder."""
STALE_S = 3.0
"""Time in seconds without a sign of life (`BEAT_S` in run/job/folder.py) after which a supervisor is considered dead if
its node does not answer either."""
ANSWER_S = 0.5
RESULT_TIMEOUT_S = 30.0
"""Maximum time that a joined node waits for the first node to write the result or restart the run, in seconds."""


MANAGED = Reach("", ("trainspec", "resume"))
"""How the nodes of a run are reached whose manager finds them when its supervisor starts (`cluster.manager`)."""


@dataclass(frozen=True)
class NodeOptions:
    """The command-line options for nodes."""

    nnodes: int | None = None
    node_rank: int = 0
    endpoint: str | None = None
    """HOST:PORT"""
    min_nodes: int | None = None
    """For a user's command: the smallest number of nodes on which it continues after losses; None for `nnodes`."""
    spare_nodes: int = 0
    """For a user's command: nodes in addition to `nnodes` that replace lost ones. (A recipe states its own.)"""
    of_slurm: bool = False
    """True if srun started this command on each node. In that case, hints must not ask the user to run it there."""

    @property
    def as_arguments(self) -> list[str]:
        return [f"cluster.num_nodes={self.nnodes}"] if self.nnodes else []

    @property
    def is_first(self) -> bool:
        return self.node_rank == 0

    def reach(self, spec: RunSpec, run_dir: str) -> Reach | None:
        """Return how the nodes of a run in `run_dir` reach one another; None for a single node. Raises RecipeError if
        the command line does not specify it."""
        nodes = spec.cluster.num_nodes
        if spec.cluster.manager != "none":
            return MANAGED
        if nodes == 1:
            return None
        example = f"--nnodes {nodes} --node-rank I --rdzv-endpoint HOST:PORT run.dir=<a shared folder>"
        hint = f"under Slurm: trainspec sbatch; otherwise on each node: {example}"
        if self.nnodes is None or self.endpoint is None:
            message = f"`cluster.num_nodes` is {nodes}, and this command starts one node"
            raise RecipeError(Problem("several_hosts", message, "cluster.num_nodes", hint))
        spares = spec.cluster.reliability.spare_nodes or 0
        reach = self.reach_at(self.endpoint, nodes, spares, hint, spec.run.join_timeout_s)
        if run_dir == AUTO:
            message = "`run.dir` is auto, so each node would create a separate folder"
            hint = "set run.dir=<a folder that all nodes share>"
            raise RecipeError(Problem("missing_value", message, "run.dir", hint))
        return with_own_agent(reach, 0)

    def check_managed(self, spec: RunSpec) -> None:
        """Raise RecipeError for options of a node whose manager finds the nodes."""
        if self.node_rank or self.endpoint:
            message = f"`cluster.manager` is {spec.cluster.manager}, which finds the nodes: type the command once"
            raise RecipeError(Problem("usage", message, "--node-rank", "leave out --node-rank and --rdzv-endpoint"))

    @property
    def address(self) -> tuple[str, int] | None:
        """Return the host and port that the user has named, as checked by `reach`."""
        host, _, port = (self.endpoint or "").rpartition(":")
        return (host, int(port)) if port.isdigit() else None

    def reach_at(self, endpoint: str, nodes: int, spares: int, hint: str, join_timeout_s: float) -> Reach:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise RecipeError(Problem("usage", f"--rdzv-endpoint is `{endpoint}`; expected HOST:PORT", hint=hint))
        if not 0 <= self.node_rank < nodes + spares:
            beside = f" and {spares} spares (cluster.reliability.spare_nodes)" if spares else ""
            message = (
                f"--node-rank is {self.node_rank}; with {nodes} nodes{beside} it must be 0 to {nodes + spares - 1}"
            )
            raise RecipeError(Problem("usage", message, hint=hint))
        # The command starts the agent on this node, the first one; every other node starts an agent itself.
        return Reach(host, agent_command(node=0), int(port), return_timeout_s=join_timeout_s)


def with_own_agent(reach: Reach, node: int) -> Reach:
    """Return `reach` with this process as the agent of its node, `node`, in the starts that it supervises."""
    return replace(reach, open_agents=partial(AgentThread, partial(run_agent, node=node)))


def exit_code_of(run: RunDir, result: RunResult | None) -> int:
    return WorkerError.exit_code if result is None or result.exit_code is None else result.exit_code


def check_recipe(run: RunDir, record: GenerationRecord) -> None:
    """Raise RecipeError if the first node runs something other than a recipe."""
    if record.kind != RECIPE:
        message = f"the run in {run.root} is not a recipe run: the first node runs a {record.kind}"
        raise RecipeError(Problem("usage", message, hint="use the same command on each node"))


def response_of_recipe(run: RunDir) -> NodeLossResponse:
    resilience = read_plan(run).spec.resilience
    if resilience.survives_first_node:
        return "continue"
    return "wait" if resilience.survives_lost_nodes else "end"


def take_over(
    run: RunDir, lost_in: GenerationRecord, node: int, console: RunConsole, joined: Joined, wait_s: float
) -> int | None:
    """Supervise a run from this node, `node`, after its first node was lost in the start `lost_in`; the other nodes
    join this node's starts. Return the run's exit code; None if another supervisor has the run."""
    if joined.take_over is None or is_running(run):
        return None
    # The node that supervised the run may have been one of its spares.
    first = lost_in.supervising_node
    others, spares = lost_in.nodes[: lost_in.num_nodes], lost_in.nodes[lost_in.num_nodes :]
    own = (node, *(other for other in others if other not in (first, node)))
    away = (first, *(spare for spare in spares if spare not in (first, node)))
    missing = away[: max(1, joined.num_nodes(run) - len(own))]
    reach = Reach(
        own_address(lost_in.head),
        agent_command(node),
        return_timeout_s=wait_s,
        nodes=(*own, *away),
        lost=tuple((other, lost_in.host if other == first else "") for other in missing),
    )
    console.report(f"node {node}: takes over the run, because its first node, {lost_in.host}, is gone")
    try:
        return joined.take_over(run, reach, console)
    except TrainspecError as error:
        if error.problems[0].code in ("still_running", generations.FENCED):
            console.report(f"node {node}: another node has the run")
            return None
        raise


@dataclass(frozen=True)
class Joined:
    """A node's expectations of the run that it joins. The defaults describe a recipe run."""

    check: Callable[[RunDir, GenerationRecord], None] = check_recipe
    """Raises RecipeError for a run that this node is not supposed to join."""
    exit_code: Callable[[RunDir, RunResult | None], int] = exit_code_of
    """Maps the run, and its result if the first node has written one, to an exit code."""
    folder: str = "run.dir"
    """Key or option that specifies the run folder."""
    join_key: str = JOIN_KEY
    """Key or option that specifies how long nodes wait for one another."""
    of_slurm: bool = False
    """True if srun merges the output of all nodes, so that the first node's progress is already visible."""
    num_nodes: Callable[[RunDir], int] = lambda run: read_plan_of_all_nodes(run).num_nodes
    """Returns the number of nodes that the run uses if none is lost."""
    first_node_loss: Callable[[RunDir], NodeLossResponse] = response_of_recipe
    """Returns what follows from the loss of the first node: another node takes over the run (continue), the others wait
    for the first node, or the run ends."""
    take_over: Callable[[RunDir, Reach, RunConsole], int] | None = None
    """Supervises the run from this node after the loss of the first node, and returns the run's exit code. Raises
    TrainspecError if another supervisor has the run. None if the run ends with its first node in any case."""


def join(
    run_dir: str,
    node: int,
    console: RunConsole,
    *,
    wait_s: float = RunSection.join_timeout_s,
    joined: Joined = Joined(),
    address: tuple[str, int] | None = None,
) -> int:
    """Join a run started by the first node, as node `node`; return the run's exit code. If this node does not share the
    run folder with the first one, whose folder server is at `address`, it gets its own copy.

    Joins every start by the first node until the run has a result. If the first node is lost, one of the others takes
    over, and the rest join its starts. Raises MachineError if no first node starts within `wait_s`, or if other users
    can write to the run folder."""
    run = RunDir(Path(run_dir).absolute())
    secret = nodes_secret() if address else None
    with mirrored(run, node, address, secret, console.report) if address and secret else nullcontext() as mirror:
        return JoiningNode(run, node, console, mirror, wait_s, joined).work()


class JoiningNode:
    """What a node knows of the run that it joins, and of the first node."""

    def __init__(
        self, run: RunDir, node: int, console: RunConsole, mirror: Mirror | None, wait_s: float, joined: Joined
    ):
        self._run = run
        self._node = node
        self._console = console
        self._mirror = mirror
        self._wait_s = wait_s
        self._joined = joined
        self._served = 0
        """The newest start that this node has taken part in."""
        self._tried = 0
        """The newest start whose first node did not answer, after an earlier first node was lost."""
        self._deadline_s = self._gives_up_s = time.monotonic() + wait_s
        """When this node acts, and when it ends, if no new start begins."""
        self._lost_in: GenerationRecord | None = None
        """The start whose first node was lost, if this node may take over from it."""
        self._lost: LostSupervisor | None = None
        self._locks_are_seen = False
        self._spoken_bytes = 0
        self._last_code = 0
        """The exit code of the agent of the newest start."""
        # The error for a missing first node; its hint uses the terminology of `trainspec launch`, `run`, or srun.
        message = f"no first node was found in {run.root} within {wait_s:g} s"
        first = "see what task 0 of srun printed" if joined.of_slurm else "also start the first node: --node-rank 0"
        same = f"{joined.folder} must be the same folder, on a file system that all nodes share (or set {NODES_SECRET})"
        hint = f"{first}; {same}; increase {joined.join_key} to wait longer"
        self._refusal = MachineError(Problem("no_first_host", message, hint=hint, environment=True))

    def work(self) -> int:
        """Join every start until the run has a result; return the run's exit code. Raises the same errors as `join`."""
        run = self._run
        where = (
            f"in {run.root}" if run.root.is_dir() else f"to create {run.root}, which does not exist on this node yet"
        )
        self._tell(
            f"waiting for the first node {where} (up to {format_duration(self._wait_s)}; {self._joined.join_key})"
        )
        while not (self._served and run.result_json.is_file()):
            if self._mirror:
                self._mirror.check()
            is_gone = self._lost is not None and self._lost.is_gone()
            if is_gone or time.monotonic() > self._deadline_s:
                self._lost = None
                is_newest = generations.newest(run) in (self._served, self._tried)
                if self._lost_in is None or (is_newest and time.monotonic() > self._gives_up_s):
                    break
                # If the run still writes events, only this node is cut off. Not all file systems show other nodes'
                # locks.
                before_bytes = self._spoken_bytes
                self._spoken_bytes = spoken_bytes(run)
                if is_newest and (is_gone or self._spoken_bytes == before_bytes):
                    code = take_over(run, self._lost_in, self._node, self._console, self._joined, self._wait_s)
                    if code is not None:
                        return code
                self._deadline_s = min(self._gives_up_s, time.monotonic() + RESULT_TIMEOUT_S)
            generation = generations.newest(run)
            if generation > self._served and (self._mirror is None or self._mirror.is_same):
                self._serve(generation)
            time.sleep(RETRY_S)
        if not self._served:
            raise self._refusal
        result = read_result(run)
        if result is None:
            is_lost = self._last_code == CUT_OFF
            self._tell(
                "the first node was lost, and has not written a result"
                if is_lost
                else "the run goes on without this node, or has ended without a result"
            )
            self._console.report(f"restart the run: {kind_of(run).start_again(run)}")
        else:
            reason = "" if isinstance(result.reason, Absent) else f": {result.reason}"
            self._tell(f"the run is {result.status}{reason}")
        return self._joined.exit_code(run, result)

    def _tell(self, what: str) -> None:
        self._console.report(f"node {self._node}: {what}")

    @property
    def _has_own_copy(self) -> bool:
        return self._mirror is not None and self._mirror.has_own_copy

    def _serve(self, generation: int) -> None:
        """Take part in a start, and decide what follows from its end."""
        run = self._run
        joined = self._joined
        check_tree(run.root)

        def may_change() -> bool:
            # Where this node cannot see the claim, its absence says nothing about the first node.
            return joined.take_over is not None and self._locks_are_seen and not self._has_own_copy

        try:
            with self._console.stopping_run_without_reader(lambda: None), ExitStack() as shown:
                begin = partial(self._begin, shown)
                code = run_agent(run, generation, self._node, begin, self._tell, first_may_change=may_change)
        except MachineError as error:  # perhaps from an earlier start whose first node is gone
            self._refusal = error
            if self._lost_in and generation > self._tried:  # the node that took over may be lost, too
                self._tried = generation
                self._deadline_s = time.monotonic() + RESULT_TIMEOUT_S + self._node * TURN_S
                self._gives_up_s = self._deadline_s + self._wait_s
            return
        self._served = generation
        self._last_code = code
        self._gives_up_s = self._deadline_s = time.monotonic() + RESULT_TIMEOUT_S
        self._lost_in = self._lost = None
        response = joined.first_node_loss(run) if code == CUT_OFF and joined.take_over else "end"
        if response == "end":
            return
        self._gives_up_s += self._wait_s
        if response == "continue" and not self._has_own_copy:
            # The node with the lowest number is the first to take over.
            self._lost_in = generations.read(run, generation)
            self._spoken_bytes = spoken_bytes(run)
            self._deadline_s += self._node * TURN_S
            if self._lost_in is not None:
                self._lost = LostSupervisor(run, self._lost_in, self._node, locks_are_seen=self._locks_are_seen)
            limit = format_duration(self._deadline_s - time.monotonic())
            self._tell(f"takes over, unless the first node or another one starts the run within {limit}")
            return
        self._deadline_s = self._gives_up_s
        self._tell(f"waiting for the first node (up to {format_duration(self._deadline_s - time.monotonic())})")
        if response == "continue":
            # Without a shared disk, nothing tells this node whether the first one is gone or only out of reach and
            # still training with others, so no node takes over by itself.
            self._tell(
                "if it is gone, end this command on each node, then choose a new first node, whose address is HOST in "
                f"HOST:PORT: {kind_of(run).start_again(run)}"
            )

    def _begin(self, shown: ExitStack, record: GenerationRecord) -> None:
        self._joined.check(self._run, record)
        if self._mirror:
            self._mirror.prepare(record)
        if record.generation <= self._tried:
            return
        claim = read_claim(self._run)
        self._locks_are_seen = claim is not None and claim.is_locked
        self._tell(describe_part(self._run, record, self._node))
        if not self._joined.of_slurm:
            shown.enter_context(_showing_progress(self._run, record, self._console))


class LostSupervisor:
    """Finds out whether the first node's supervisor, to which this node has lost its connection, is dead.

    If this node can see its lock on the run, the lock shows that: the file system releases it when the process ends. If
    the node is off, or the file system does not show other nodes' locks, the supervisor is considered dead if it has
    not touched the file for `STALE_S`, and does not answer either."""

    def __init__(self, run: RunDir, record: GenerationRecord, node: int, *, locks_are_seen: bool):
        self._run = run
        self._hub = (record.head, record.hub_port)
        others = sorted(other for other in record.nodes if other != record.supervising_node)
        self._turn_s = others.index(node) * TURN_S if node in others else node * TURN_S
        self._locks_are_seen = locks_are_seen
        self._signs: ClaimSigns | None = None
        self._unchanged_since_s = self._looked_s = time.monotonic()
        self._gone_since_s = math.inf

    def is_gone(self) -> bool:
        """Return whether the supervisor is dead and it is this node's turn to take over. Call this often."""
        signs = read_claim(self._run)
        now_s = time.monotonic()
        # After a stall of the file system or of this process, the owner is given the time to show itself, too.
        stalled = now_s - self._looked_s > STALE_S / 2
        self._looked_s = now_s
        if signs != self._signs or stalled:
            self._signs = signs
            self._unchanged_since_s = now_s
        free = self._locks_are_seen and not (signs and signs.is_locked)
        is_stale = now_s - self._unchanged_since_s > STALE_S
        if not free and not (is_stale and not self._answers()):
            self._gone_since_s = math.inf
            return False
        self._gone_since_s = min(self._gone_since_s, now_s)
        if now_s < self._gone_since_s + self._turn_s or self._run.result_json.is_file():
            return False
        if not free:
            drop_claim(self._run)
        return True

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._hub, ANSWER_S).close()
        except OSError:
            return False
        return True


@contextmanager
def _showing_progress(run: RunDir, record: GenerationRecord, console: RunConsole) -> Iterator[None]:
    """Show the run's progress during the block, as the first node does, from rank 0's events in the shared folder. A
    separate thread reads them, so that a stalled file system does not block the agent."""
    view = LiveView(run, None if record.own else read_plan(run), console)
    ended = threading.Event()

    def watch() -> None:
        try:
            with view:
                while not ended.wait(WATCH_S):
                    view.watch(stop_requested=False)
                view.watch(stop_requested=False)
        except OSError as error:
            console.report(f"the run's progress is no longer shown: {error}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(RESULT_TIMEOUT_S)
