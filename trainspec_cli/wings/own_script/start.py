"""Starts of a command of the user's own, on this node alone or on several, as `recovery` hears of them."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.nodes.backend import NameHang, NodePart, RunningNode
from trainspec_cli.run.backend.observe import RunningStart
from trainspec_cli.run.channel.messages import (
    GroupExited,
    NodeSilent,
    NodeStands,
    NodeWorks,
    OwnCommandMessage,
    ProcessMessage,
    WorkedLong,
    WorkersOrphaned,
)
from trainspec_cli.run.failure import Explanation, WorkerFailure, explain
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import COMMAND
from trainspec_cli.run.folder.record import WorkerErrorRecord, write_error
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery import run_state
from trainspec_cli.wings.own_script.failure import explain_own_end, find_own_failures
from trainspec_cli.wings.own_script.hang import name_late
from trainspec_cli.wings.own_script.job import (
    Wanted,
    build_own_node_job,
    device_name,
    read_own_command,
    start_environment,
)
from trainspec_cli.wings.own_script.journal import count_steps, newest_step
from trainspec_cli.wings.own_script.node import OwnNode
from trainspec_cli.wings.own_script.silence import name_silent
from trainspec_cli.wings.own_script.terminal import PassedOutput

JOIN_OPTION = "--join-timeout-s"
GROUP = 0
"""The command is one replica group."""
HERE = 0
"""This node's number."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class OwnStart:
    """It has ended when its nodes have all reported so. `name_hang` has them write down where their ranks stand."""

    def __init__(
        self, job: Job, number: int, nodes: Sequence[int], name_hang: Callable[[tuple[int, ...]], None]
    ) -> None:
        self.group = GROUP
        self.number = number
        self._job = job
        self._name_hang = name_hang
        self._made_before = count_steps(job.run)
        self._made = 0
        self._running, self._stepping = set(nodes), set[int]()
        self._exits: list[GroupExited] = []
        """In the order in which they came."""
        self._quiet: dict[int, NodeStands | NodeSilent] = {}
        self._lost: WorkerFailure | None = None
        self._hung = self._worked_long = False
        self._unreported: list[run_state.Event] = [run_state.Begun(GROUP)]
        """It may have something to save before its first step, so that it counts as begun at once."""

    @property
    def has_ended(self) -> bool:
        return not self._running

    def hear(self, node: int, hostname: str, message: ProcessMessage) -> list[run_state.Event]:
        if isinstance(message, OwnCommandMessage):
            return self._hear_of_work(node, message)
        if isinstance(message, GroupExited):
            self._running.discard(node)
            self._stepping.discard(node)
            self._quiet.pop(node, None)
            self._exits.append(message)
            return [run_state.WorkerFailed(GROUP)] if message.exit_code and self._running else []
        return [run_state.Orphaned(GROUP) if isinstance(message, WorkersOrphaned) else run_state.WorkerFailed(GROUP)]

    def _hear_of_work(self, node: int, message: OwnCommandMessage) -> list[run_state.Event]:
        if isinstance(message, NodeStands | NodeSilent):
            self._quiet[node] = message
            return self._find_hang()
        if isinstance(message, WorkedLong):
            self._worked_long = True
            return []
        self._quiet.pop(node, None)
        if isinstance(message, NodeWorks):
            return []
        self._stepping.add(node)
        newer = message.made > self._made
        self._made = max(self._made, message.made)
        return [run_state.Stepped(GROUP)] if newer else []

    def lose(self, node: int, number: int, hostname: str, why: str) -> None:
        """A lost node ends by itself what it runs. `number`: by which the job knows it."""
        self._lost = WorkerFailure(number, hostname, why, time=0.0, whole_node=True, foreseen=True)
        self._running.discard(node)

    def poll(self) -> Iterator[run_state.Event]:
        events = self._unreported
        self._unreported = []
        yield from events
        if self.has_ended:
            yield self._end()

    def _find_hang(self) -> list[run_state.Event]:
        """The run hangs where no node that makes steps shows a sign of work, or where none makes steps, no node."""
        if self._hung or not (self._stepping or self._running) <= self._quiet.keys():
            return []
        self._hung = True
        found = [self._quiet[node] for node in sorted(self._quiet)]
        stands = [quiet for quiet in found if isinstance(quiet, NodeStands)]
        if stands:
            self._report_hang(stands)
        else:
            self._report_silence([quiet for quiet in found if isinstance(quiet, NodeSilent)])
        return [run_state.WorkerFailed(GROUP)]

    def _report_hang(self, stands: Sequence[NodeStands]) -> None:
        """Write the hang as an error of the rank that is late, and have the nodes write where theirs stand."""
        ranks = {rank.rank: rank for node in stands for rank in node.ranks}
        late, why = name_late(list(ranks.values()))
        waited_s = min(node.waited_s for node in stands)
        who = "rank" if len(late) == 1 else "ranks"
        names = ", ".join(map(str, late))
        stacks = [
            f"rank {number} ({rank.host}) is at\n{rank.stack.rstrip()}"
            for number, rank in sorted(ranks.items())
            if not rank.ended
        ]
        message = f"no step for {waited_s:.0f} s, and no sign of work; {who} {names}: {why}"
        step = None if ranks[late[0]].ended else max(rank.step for rank in ranks.values()) + 1
        self._write_hang(late[0], ranks[late[0]].host, message, step, "\n\n".join(stacks))
        self._name_hang(tuple(late))

    def _report_silence(self, nodes: Sequence[NodeSilent]) -> None:
        """Write the hang as an error of the process that is named first."""
        named, why = name_silent([process for node in nodes for process in node.processes])
        waited_s = min(node.waited_s for node in nodes)
        names = [
            f"{'' if process.rank is None else f'rank {process.rank}, '}process {process.pid} ({process.command})"
            f"{f' on {process.host}' if len(nodes) > 1 else ''}"
            for process in named
        ]
        message = f"no sign of work for {waited_s:.0f} s: {', '.join(names)} {why}"
        self._write_hang(named[0].rank or 0, named[0].host, message, None, "")

    def _write_hang(self, rank: int, host: str, message: str, step: int | None, stacks: str) -> None:
        record = WorkerErrorRecord(
            rank=rank,
            host=host,
            time=time.time(),
            type="Hang",
            message=message,
            code="hang",
            exit_code=WorkerError.exit_code,
            hint="give --hang-s more seconds if it may stand still for longer than that",
            step=step,
            traceback=stacks,
        )
        write_error(self._job.run.error(rank), record)

    def _end(self) -> run_state.GroupEnded:
        failed = [exited.exit_code for exited in self._exits if exited.exit_code]
        was_ended = self._lost is not None or any(exited.exit_code is None for exited in self._exits)
        exit_code = failed[0] if failed else None if was_ended else 0
        failures = find_own_failures(self._job)
        if self._lost is not None:
            failures = [self._lost, *(failure for failure in failures if not failure.whole_node)]
        killed = exit_code is None or exit_code in _KILLED or any(failure.was_killed for failure in failures)
        done = exit_code == 0 and not self._hung
        explanation = None if done else self._explain(exit_code, failures)
        headline = explanation.headline if explanation else ""
        if killed and any(exited.oom_kills for exited in self._exits):
            headline = f"{headline}: the kernel did, because the host's memory had run out"
        return run_state.GroupEnded(
            group=GROUP,
            done=done,
            headline=headline,
            exit_code=exit_code,
            own_error=any(failure.self_reported for failure in failures),
            foreseen=self._lost is not None,
            from_outside=killed and not self._hung,
            checkpoint_step=self._made_before + self._made,
            has_worked=self._worked_long and not self._made,
            left_behind=tuple(pid for exited in self._exits for pid in exited.left_behind),
            cause=explanation.cause if explanation else "",
            reached_step=newest_step(self._job.run),
        )

    def _explain(self, exit_code: int | None, failures: list[WorkerFailure]) -> Explanation:
        if self._lost is not None:
            return explain(failures)
        return explain_own_end(self._job, exit_code, failures)


class OwnCommandBackend:
    """The backend of a command on this node alone: one start of it. `device_name`: what its ranks run on, for people.
    `passed`: shows its output on a terminal."""

    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        *,
        wanted: Wanted,
        device_name: str,
        passed: PassedOutput | None = None,
    ):
        assert plan is None, "a command has none"
        self.hub = None
        self.generation = generations.begin(job.run)
        started = start_environment(job, self.generation, on_terminal=passed is not None)
        added = {GENERATION: str(self.generation), **started}
        self._job = replace(job, environment={**job.environment, **added})
        self._node = OwnNode(self._job, wanted, self.generation, device_name, passed)
        self._start: OwnStart | None = None
        self._unreported: list[run_state.Event] = [run_state.PresenceChanged(GROUP, "there")]

    def start(self, group: int, number: int) -> None:
        self._start = OwnStart(self._job, number, [HERE], self._node.record_hang)
        self._node.start(group, number)

    def poll(self) -> list[run_state.Event]:
        events = self._unreported
        self._unreported = []
        if self._start is None:
            return events
        for message in self._node.poll():
            events += self._start.hear(HERE, socket.gethostname(), message)
        events += self._start.poll()
        if self._start.has_ended:
            self._start = None
        return events

    def stop(self, group: int | None = None) -> None:
        self._node.stop(group)

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        if group is not None:
            self._node.kill(group)
            return ()
        return self._node.close()


class OwnCommandJobs:
    """How a command runs on several nodes."""

    name = COMMAND
    join_key = JOIN_OPTION

    def open_start(
        self, job: Job, plan: Plan | None, group: int, number: int, nodes: Sequence[int], name_hang: NameHang
    ) -> RunningStart:
        return OwnStart(job, number, nodes, name_hang)

    def build_job(self, part: NodePart) -> Job:
        return build_own_node_job(part.run.root, part.machine, part.place, part.record)

    def open_node(self, part: NodePart, job: Job) -> RunningNode:
        wanted = read_own_command(part.record).wanted
        return OwnNode(job, wanted, part.record.generation, device_name(part.machine))


JOBS = OwnCommandJobs()
