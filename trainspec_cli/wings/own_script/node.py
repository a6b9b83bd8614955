"""One start of a command of the user's own on one node: its processes, and what is seen of them from outside.

The backend of a single node and a node's agent both hold one; it reports in the messages that agents send.
"""

from __future__ import annotations

import psutil

from trainspec_cli.run.backend import processes
from trainspec_cli.run.backend.local import NodeProcesses
from trainspec_cli.run.channel.messages import (
    GroupExited,
    NodeSilent,
    NodeStands,
    NodeWorks,
    ProcessMessage,
    StepsMade,
    WorkedLong,
)
from trainspec_cli.run.folder.generations import note_stop
from trainspec_cli.run.job.job import Job
from trainspec_cli.wings.own_script.hang import HangWatch, hang_event, read_stopped
from trainspec_cli.wings.own_script.job import Wanted, progress_folder
from trainspec_cli.wings.own_script.journal import StepJournal
from trainspec_cli.wings.own_script.silence import SilenceWatch
from trainspec_cli.wings.own_script.terminal import PassedOutput
from trainspec_cli.wings.own_script.usage import UsageLog


class OwnNode:
    def __init__(self, job: Job, wanted: Wanted, generation: int, device_name: str, passed: PassedOutput | None = None):
        """`job`: this node's, of this generation. `device_name`: what its ranks run on, for people. `passed`: shows
        its output on a terminal."""
        self._job = job
        self._generation = generation
        progress = progress_folder(job)
        progress.mkdir(parents=True)
        self._journal = StepJournal(job.run, progress, device_name)
        self._usage, self._hang_watch = UsageLog(), HangWatch(wanted.hang_s, job.torchrun_log)
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
        messages = self._count()  # after the processes were looked at: what has ended has counted all its steps
        if not self._ended:
            self._usage.look(self._journal.ranks)
            messages += self._find_hang() if self._journal.ranks else self._find_silence()
        self._ended = self._ended or any(isinstance(message, GroupExited) for message in found)
        return [*messages, *found]

    def stop(self, group: int | None = None) -> None:
        """Ask what trains to end: its launcher ends when that has ended. Where nothing counts steps or has a rank, all
        processes are asked."""
        if group is None:
            note_stop(self._job.run, self._generation)
        members = self._processes.members()
        counted = {trainer.pid for trainer in self._journal.trainers}
        trainers = processes.workers_among(members) or [member for member in members if member.pid in counted]
        processes.terminate(trainers or members)
        for member in trainers or members:  # a stopped one hears nothing until it goes on
            _resume(member)

    def kill(self, group: int) -> None:
        self._processes.kill(group)

    def close(self) -> tuple[int, ...]:
        left_behind = self._processes.close()
        self._journal.close()
        return left_behind

    def record_hang(self, late: tuple[int, ...]) -> None:
        """Write where each rank of this node stands to its events."""
        if self._stands is None:
            return
        standing = {rank.rank: rank for rank in self._stands.ranks if not rank.ended}
        for rank in self._journal.ranks:
            stands = standing.get(rank.number)
            if stands and rank.trainer and stands.stopped:
                stands = read_stopped(stands, rank.trainer)
            if stands:
                rank.write(hang_event(stands, self._stands, late))

    def _count(self) -> list[ProcessMessage]:
        self._journal.poll()
        if self._journal.made <= self._made:
            return []
        self._made = self._journal.made
        return [StepsMade(self._group, self._number, self._made)]

    def _find_hang(self) -> list[ProcessMessage]:
        hang = self._hang_watch.look(self._journal.ranks)
        if hang:
            waited_s, deadline_s, ranks = hang
            self._stands = NodeStands(self._group, self._number, waited_s, deadline_s, ranks)
            return [self._stands]
        if self._stands and self._hang_watch.quiet_s < self._stands.waited_s:
            self._stands = None
            return [NodeWorks(self._group, self._number)]
        return []

    def _find_silence(self) -> list[ProcessMessage]:
        """Where no step is counted, or none yet, it is looked at whether any of the processes works."""
        silence = self._silence_watch.look(self._processes.members)
        if silence:
            self._silent = NodeSilent(self._group, self._number, *silence)
            return [self._silent]
        messages: list[ProcessMessage] = []
        if self._silent and self._silence_watch.quiet_s < self._silent.waited_s:
            self._silent = None
            messages.append(NodeWorks(self._group, self._number))
        if not self._worked_long and self._silence_watch.worked_s >= self._work_s:
            self._worked_long = True
            messages.append(WorkedLong(self._group, self._number))
        return messages


def _resume(process: psutil.Process) -> None:
    try:
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()
    except psutil.Error:
        return
