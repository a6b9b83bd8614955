"""Starts of a user's command, on one or several nodes, reported as events to the supervisor in `run/recovery`."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from trainspec_cli.core.environment_names import GENERATION, PROGRESS
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import processes
from trainspec_cli.run.backend.local import NodeProcesses
from trainspec_cli.run.backend.nodes.backend import NameHang, NodePart, RunningNode
from trainspec_cli.run.backend.observe import RunningStart
from trainspec_cli.run.channel.messages import (
    GroupExited,
    HangFound,
    NodeSilent,
    NodeStands,
    NodeWorks,
    ProcessMessage,
    StepsMade,
    WorkedLong,
    WorkersOrphaned,
)
from trainspec_cli.run.failure import WorkerFailure, explain, with_faults
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import HangEvent, LateStepEvent, StallEvent
from trainspec_cli.run.folder.generations import note_stop
from trainspec_cli.run.folder.paths import COMMAND
from trainspec_cli.run.folder.record import WorkerErrorRecord, write_error
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery import run_state
from trainspec_cli.wings.own_script.failure import explain_own_end, find_own_failures
from trainspec_cli.wings.own_script.job import (
    CommandSettings,
    build_own_node_job,
    device_name,
    read_own_command,
    start_environment,
)
from trainspec_cli.wings.own_script.journal import StepJournal, count_steps, newest_step
from trainspec_cli.wings.own_script.terminal import PassedOutput
from trainspec_cli.wings.own_script.watches import (
    HangWatch,
    SilenceWatch,
    UsageLog,
    locate,
    main_stack,
    name_late,
    name_silent,
    read_stacks,
)

JOIN_OPTION = "--join-timeout-s"
GROUP = 0
"""The number of the only replica group of a command."""
HERE = 0
"""The node's number in a single-node job."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class OwnStart:
    """One start of a command. It has ended once all of its nodes have reported their end. `name_hang` makes the nodes
    record their hung ranks."""

    def __init__(self, job: Job, number: int, nodes: Sequence[int], name_hang: NameHang) -> None:
        self.group = GROUP
        self.number = number
        self._job = job
        self._name_hang = name_hang
        self._made_before = count_steps(job.run)
        self._made = 0
        self._running = set(nodes)
        self._stepping: set[int] = set()
        self._exits: list[tuple[str, GroupExited]] = []
        """Hostnames and reports of nodes that have ended, in order of arrival."""
        self._quiet: dict[int, NodeStands | NodeSilent] = {}
        self._lost: WorkerFailure | None = None
        self._hung = self._worked_long = False
        self._unreported: list[run_state.Event] = [run_state.Begun(GROUP)]
        """The command is treated as started immediately, because it may have state to save before its first step."""

    @property
    def has_ended(self) -> bool:
        return not self._running

    def hear(self, node: int, hostname: str, message: ProcessMessage) -> list[run_state.Event]:
        if isinstance(message, NodeStands | NodeSilent):
            self._quiet[node] = message
            return self._find_hang()
        if isinstance(message, WorkedLong):
            self._worked_long = True
            return []
        if isinstance(message, NodeWorks):
            self._quiet.pop(node, None)
            return []
        if isinstance(message, StepsMade):
            self._quiet.pop(node, None)
            self._stepping.add(node)
            newer = message.made > self._made
            self._made = max(self._made, message.made)
            return [run_state.Stepped(GROUP)] if newer else []
        if isinstance(message, GroupExited):
            self._running.discard(node)
            self._stepping.discard(node)
            self._quiet.pop(node, None)
            self._exits.append((hostname, message))
            return [run_state.WorkerFailed(GROUP)] if message.exit_code and self._running else []
        return [run_state.Orphaned(GROUP) if isinstance(message, WorkersOrphaned) else run_state.WorkerFailed(GROUP)]

    def lose(self, node: int, number: int, hostname: str, why: str) -> None:
        """Record that a node is lost. Its processes end by themselves. `number`: the node's number in the job."""
        self._lost = WorkerFailure(number, hostname, why, time=0.0, whole_node=True, foreseen=True)
        self._running.discard(node)

    def poll(self) -> Iterator[run_state.Event]:
        events = self._unreported
        self._unreported = []
        yield from events
        if self.has_ended:
            yield self._end()

    def _find_hang(self) -> list[run_state.Event]:
        """Report a hang if none of the nodes that have taken steps shows a sign of work. If no node has taken a step,
        consider all running nodes instead."""
        if self._hung or not (self._stepping or self._running) <= self._quiet.keys():
            return []
        found = [self._quiet[node] for node in sorted(self._quiet)]
        stands = [quiet for quiet in found if isinstance(quiet, NodeStands)]
        is_over = all(not isinstance(quiet, NodeStands) or quiet.is_over for quiet in found)
        if not is_over:
            ranks = {rank.rank: rank for node in stands for rank in node.ranks}
            late, why = name_late(list(ranks.values()))
            self._name_hang(HangFound(tuple(late), why, is_over))
            return []
        self._hung = True
        if stands:
            # The error record describes the first late rank, and every node records the state of its ranks.
            ranks = {rank.rank: rank for node in stands for rank in node.ranks}
            late, why = name_late(list(ranks.values()))
            waited_s = min(node.waited_s for node in stands)
            who = "rank" if len(late) == 1 else "ranks"
            stacks = [
                f"rank {number} ({rank.host}) is at\n{rank.stack.rstrip()}"
                for number, rank in sorted(ranks.items())
                if not rank.ended
            ]
            message = f"no step for {waited_s:.0f} s, and no sign of work; {who} {', '.join(map(str, late))}: {why}"
            step = None if ranks[late[0]].ended else max(rank.step for rank in ranks.values()) + 1
            self._write_hang(late[0], ranks[late[0]].host, message, step, "\n\n".join(stacks))
            self._name_hang(HangFound(tuple(late), why, is_over))
        else:
            # The error record describes the first process that the message names.
            silent = [quiet for quiet in found if isinstance(quiet, NodeSilent)]
            named, why = name_silent([process for node in silent for process in node.processes])
            waited_s = min(node.waited_s for node in silent)
            names = [
                f"{'' if process.rank is None else f'rank {process.rank}, '}process {process.pid} ({process.command})"
                f"{f' on {process.host}' if len(silent) > 1 else ''}"
                for process in named
            ]
            message = f"no activity for {waited_s:.0f} s: {', '.join(names)} {why}"
            self._write_hang(named[0].rank or 0, named[0].host, message, None, "")
        return [run_state.WorkerFailed(GROUP)]

    def _write_hang(self, rank: int, host: str, message: str, step: int | None, stacks: str) -> None:
        record = WorkerErrorRecord(
            rank=rank,
            host=host,
            time=time.time(),
            type="Hang",
            message=message,
            code="hang",
            exit_code=WorkerError.exit_code,
            hint="increase --hang-s if a step, an evaluation or a save may take longer than this",
            step=step,
            traceback=stacks,
        )
        write_error(self._job.run.error(rank), record)

    def _end(self) -> run_state.GroupEnded:
        # The first failure counts. Later ones are most likely its consequences.
        failed = [exited.exit_code for _, exited in self._exits if exited.exit_code]
        was_ended = self._lost is not None or any(exited.exit_code is None for _, exited in self._exits)
        exit_code = failed[0] if failed else None if was_ended else 0
        failures = find_own_failures(self._job)
        if self._lost is not None:
            failures = [self._lost, *(failure for failure in failures if not failure.whole_node)]
        killed = exit_code is None or exit_code in _KILLED or any(failure.was_killed for failure in failures)
        done = exit_code == 0 and not self._hung
        explanation = None
        if not done:
            lost = self._lost is not None
            explanation = explain(failures) if lost else explain_own_end(self._job, exit_code, failures)
        headline = explanation.headline if explanation else ""
        if killed and any(exited.oom_kills for _, exited in self._exits):
            headline = f"{headline}: the kernel killed it, because the host had run out of memory"
        faults = tuple(run_state.HostFault(host, fault) for host, exited in self._exits for fault in exited.faults)
        return run_state.GroupEnded(
            group=GROUP,
            done=done,
            headline=with_faults(headline, faults),
            exit_code=exit_code,
            own_error=any(failure.self_reported for failure in failures),
            foreseen=self._lost is not None,
            from_outside=killed and not self._hung,
            checkpoint_step=self._made_before + self._made,
            has_worked=self._worked_long and not self._made,
            left_behind=tuple(pid for _, exited in self._exits for pid in exited.left_behind),
            cause=explanation.cause if explanation else "",
            reached_step=newest_step(self._job.run),
            faults=faults,
        )


class OwnNode:
    """The processes from a single launch on one node, observed from outside. A run on a single node uses this directly,
    and so does a node's agent. It reports in the form of agent messages."""

    def __init__(
        self, job: Job, wanted: CommandSettings, generation: int, device_name: str, passed: PassedOutput | None = None
    ):
        """`job`: this node's job in this generation. `device_name`: name of the ranks' device, for display. `passed`:
        shows the output on a terminal."""
        self._job = job
        self._generation = generation
        progress = Path(job.environment[PROGRESS].partition(":")[2])
        progress.mkdir(parents=True)
        self._journal = StepJournal(job.run, progress, device_name)
        self._usage = UsageLog()
        self._hang_watch = HangWatch(wanted.hang_s, job.torchrun_log)
        self._silence_watch = SilenceWatch(wanted.silent_s, job.torchrun_log)
        self._work_s = wanted.work_s
        self._processes = NodeProcesses(job, None, passed=passed)
        self._group = self._number = self._made = 0
        self._stands: NodeStands | None = None
        self._silent: NodeSilent | None = None
        self._ended = self._worked_long = False

    def start(self, group: int, number: int) -> None:
        self._group = group
        self._number = number
        self._processes.start(group, number)

    def poll(self) -> list[ProcessMessage]:
        found = self._processes.poll()
        messages: list[ProcessMessage] = []
        self._journal.poll()  # after the processes have ended, because then all of their steps are counted
        if self._journal.made > self._made:
            self._made = self._journal.made
            messages.append(StepsMade(self._group, self._number, self._made))
        if not self._ended:
            self._usage.poll(self._journal.ranks)
            if self._journal.ranks:
                messages += self._find_hang()
            elif silence := self._silence_watch.poll(self._processes.members):
                # As long as no step is counted, check whether any process is making progress.
                self._silent = NodeSilent(self._group, self._number, *silence)
                messages.append(self._silent)
            else:
                if self._silent and self._silence_watch.signs.quiet_s < self._silent.waited_s:
                    self._silent = None
                    messages.append(NodeWorks(self._group, self._number))
                if not self._worked_long and self._silence_watch.worked_s >= self._work_s:
                    self._worked_long = True
                    messages.append(WorkedLong(self._group, self._number))
        self._ended = self._ended or any(isinstance(message, GroupExited) for message in found)
        return [*messages, *found]

    def stop(self, group: int | None = None) -> None:
        """Ask the training processes to exit; their launcher then exits too. If no process counts steps or has a rank,
        ask all processes to exit."""
        if group is None:
            note_stop(self._job.run, self._generation)
        members = self._processes.members()
        counted = {trainer.pid for trainer in self._journal.trainers}
        trainers = processes.workers_among(members) or [member for member in members if member.pid in counted]
        processes.terminate(trainers or members)
        for member in trainers or members:
            with suppress(psutil.Error):
                if member.status() == psutil.STATUS_STOPPED:  # a stopped process does not react to signals
                    member.resume()

    def kill(self, group: int) -> None:
        self._processes.kill(group)

    def close(self) -> tuple[int, ...]:
        left_behind = self._processes.close()
        self._journal.close()
        return left_behind

    def record_hang(self, hang: HangFound) -> None:
        """Write the state of each rank on this node to the rank's events, because the run hangs or may be hanging."""
        if self._stands is None:
            return
        standing = {rank.rank: rank for rank in self._stands.ranks if not rank.ended}
        for rank in self._journal.ranks:
            stands = standing.get(rank.number)
            if stands is None:
                continue
            if stands.stopped and rank.trainer and hang.is_over:
                # A stopped process must run in order to write its stack. While it runs, it may take a step, which would
                # count as work on all nodes. Read its stack only now that the hang is confirmed on all nodes.
                text = read_stacks([rank.trainer], resume=True).get(rank.trainer.pid, "")
                if main := main_stack(text, rank.trainer):
                    stands = replace(stands, stack=main, place=locate(main))
            step = max(one.step for one in self._stands.ranks) + 1
            late_step: Callable[..., LateStepEvent] = partial(StallEvent, usual_s=max(rank.recent_s, default=0.0))
            if hang.is_over:
                late_step = partial(HangEvent, deadline_s=self._stands.deadline_s)
            event = late_step(
                step=step,
                waited_s=self._stands.waited_s,
                host=stands.host,
                waiting=stands.rank not in hang.late,
                waits_in=stands.place or None,
                collectives={one.group: one.number for one in stands.collectives},
                stack=stands.stack,
                entered=stands.collectives,
                late=hang.late,
                why=hang.why,
            )
            rank.writer.write(event)

    def _find_hang(self) -> list[ProcessMessage]:
        if hang := self._hang_watch.poll(self._journal.ranks):
            self._stands = NodeStands(self._group, self._number, *hang)
            return [self._stands]
        if self._stands and self._hang_watch.signs.quiet_s < self._stands.waited_s:
            self._stands = None
            return [NodeWorks(self._group, self._number)]
        return []


class OwnCommandBackend:
    """The backend for a command on this node only. `device_name`: name of the ranks' device, for display. `passed`:
    shows the output on a terminal."""

    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        *,
        wanted: CommandSettings,
        device_name: str,
        passed: PassedOutput | None = None,
    ):
        assert plan is None, "a user's command has no plan"
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
    """Runs a user's command on several nodes."""

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
