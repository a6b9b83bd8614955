"""The backend of a command of the user's own: the local backend's processes, and what is seen of them from outside."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil

from trainspec_cli.environment_names import GENERATION
from trainspec_cli.errors import WorkerError
from trainspec_cli.launcher.backend import processes
from trainspec_cli.launcher.backend.node_processes import NodeProcesses
from trainspec_cli.launcher.backend.nodes.messages import GroupExited, ProcessMessage, WorkersOrphaned
from trainspec_cli.launcher.failure import explain_end, find_failures
from trainspec_cli.launcher.job.job import Job
from trainspec_cli.launcher.own_command.hang import Hang, HangWatch
from trainspec_cli.launcher.own_command.job import start_environment
from trainspec_cli.launcher.own_command.journal import StepJournal, count_steps
from trainspec_cli.launcher.own_command.usage import UsageLog
from trainspec_cli.policy.recovery import run_state
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.generations import note_stop
from trainspec_cli.rundir.record import WorkerErrorRecord, write_error
from trainspec_cli.spec.results.plan import Plan

GROUP = 0
"""The command is one replica group."""


class OwnCommandBackend:
    """One start of the command. `device_name`: what its ranks run on, for people."""

    def __init__(self, job: Job, plan: Plan | None, *, device_name: str):
        assert plan is None and job.own is not None, "it has no plan"
        self.generation = generations.begin(job.run)
        progress = job.run.progress(self.generation)
        progress.mkdir(parents=True)
        added = {GENERATION: str(self.generation), **start_environment(job, self.generation)}
        self._job = replace(job, environment={**job.environment, **added})
        self._made_before = count_steps(job.run)
        self._journal = StepJournal(job.run, progress, device_name)
        self._usage, self._hang_watch = UsageLog(), HangWatch(job.own.hang_s, job.torchrun_log)
        self._processes = NodeProcesses(self._job, plan)
        self._made = 0
        self._ended = self._hung = False
        self._unreported: list[run_state.Event] = [run_state.PresenceChanged(GROUP, "there")]

    def start(self, group: int, number: int) -> None:
        """It may have something to save before its first step, so that it counts as begun at once."""
        self._processes.start(group, number)
        self._unreported.append(run_state.Begun(GROUP))

    def poll(self) -> list[run_state.Event]:
        events, self._unreported = self._unreported, []
        messages = self._processes.poll()
        events += self._count()  # after the processes were looked at: what has ended has counted all its steps
        if not self._ended:
            self._usage.look(self._journal.ranks)
            events += self._find_hang()
        for message in messages:
            events += self._hear(message)
        return events

    def stop(self, group: int | None = None) -> None:
        """Ask what trains to end: its launcher ends when that has ended. Where nothing counts steps or has a rank, all
        processes are asked."""
        if group is None:
            note_stop(self._job.run, self.generation)
        members = self._processes.members()
        counted = {trainer.pid for trainer in self._journal.trainers}
        trainers = processes.workers_among(members) or [member for member in members if member.pid in counted]
        processes.terminate(trainers or members)
        for member in trainers or members:  # a stopped one hears nothing until it goes on
            _resume(member)

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        if group is not None:
            self._processes.kill(group)
            return ()
        left_behind = self._processes.close()
        self._journal.close()
        return left_behind

    def _count(self) -> Iterator[run_state.Event]:
        self._journal.poll()
        made = self._journal.made
        if made > self._made:
            self._made = made
            yield run_state.Stepped(GROUP)

    def _find_hang(self) -> Iterator[run_state.Event]:
        if self._hung or not (hang := self._hang_watch.look(self._journal.ranks)):
            return
        self._hung = True
        self._report(hang)
        yield run_state.WorkerFailed(GROUP)

    def _report(self, hang: Hang) -> None:
        """Write where each rank stands to its events, and the hang as an error of the rank that is late."""
        for rank in self._journal.ranks:
            if rank.number in hang.events:
                rank.write(hang.events[rank.number])
        late, host = hang.late[0], socket.gethostname()
        who = "rank" if len(hang.late) == 1 else "ranks"
        names = ", ".join(map(str, hang.late))
        stacks = [f"rank {number} ({host}) is at\n{event.stack.rstrip()}" for number, event in hang.events.items()]
        record = WorkerErrorRecord(
            rank=late,
            host=host,
            time=time.time(),
            type="Hang",
            message=f"no step for {hang.waited_s:.0f} s, and no sign of work; {who} {names}: {hang.why}",
            code="hang",
            exit_code=WorkerError.exit_code,
            hint="give --hang-s more seconds if it may stand still for longer than that",
            step=hang.events[late].step if late in hang.events else None,
            traceback="\n\n".join(stacks),
        )
        write_error(self._job.run.error(late), record)

    def _hear(self, message: ProcessMessage) -> list[run_state.Event]:
        if isinstance(message, WorkersOrphaned):
            return [run_state.Orphaned(GROUP)]
        if not isinstance(message, GroupExited):
            return [run_state.WorkerFailed(GROUP)]
        self._ended = True
        failures = find_failures(self._job)
        killed = (message.exit_code or 0) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        killed = killed or any(failure.was_killed for failure in failures) or message.exit_code is None
        done = message.exit_code == 0 and not self._hung
        headline = "" if done else explain_end(self._job, message.exit_code, failures).headline
        if message.oom_kills and killed:
            headline = f"{headline}: the kernel did, because the host's memory had run out"
        return [
            run_state.GroupEnded(
                group=GROUP,
                done=done,
                headline=headline,
                exit_code=message.exit_code,
                own_error=any(failure.self_reported for failure in failures),
                from_outside=killed and not self._hung,
                checkpoint_step=self._made_before + self._made,
                left_behind=message.left_behind,
            )
        ]


def _resume(process: psutil.Process) -> None:
    try:
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()
    except psutil.Error:
        return
