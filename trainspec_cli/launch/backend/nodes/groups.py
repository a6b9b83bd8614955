"""Replica groups on several hosts, as the first of them sees them: begun, watched and ended through the agents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.launch.backend.executor import Presence
from trainspec_cli.launch.backend.family import Family
from trainspec_cli.launch.backend.local import end_launch
from trainspec_cli.launch.backend.nodes.agents import Agents
from trainspec_cli.launch.backend.nodes.hub import Member
from trainspec_cli.launch.backend.part import ranks_of, start_folder
from trainspec_cli.launch.backend.spawn import start_guard
from trainspec_cli.launch.failure import WorkerFailure
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.rendezvous.address import Rendezvous
from trainspec_cli.spec.results.plan import Plan


class NodesGroups:
    def __init__(self, agents: Agents, job: Job, plan: Plan, return_timeout_s: float):
        self._agents, self._members = agents, agents.hub.members
        self._job, self._plan, self._return_timeout_s = job, plan, return_timeout_s
        self._starts: dict[int, NodesStart] = {}
        self._guard, self._family = start_guard(job), Family(job)

    @property
    def generation(self) -> int:
        return self._agents.generation

    @property
    def rendezvous(self) -> Rendezvous:
        return self._agents.rendezvous

    def poll(self) -> Sequence[str]:
        news = self._agents.poll()
        for member in self._members:
            for words in member.told:
                if start := self._starts.get(int(words[1])):
                    start.hear(member, words)
            member.told.clear()
        if not self._starts:
            self._refuse_unfit()
        return news

    def presence(self, group: int) -> Presence:
        members = self._members_of(group)
        if all(member.admitted and not member.gone for member in members):
            return "there"
        return "awaited" if all(self._may_come(member) for member in members) else "away"

    def start(self, group: int, number: int) -> NodesStart:
        logs, ranks = self._job.logs / start_folder(group, number), ranks_of(self._plan, group)
        job = replace(self._job, world_size=self._plan.group_size, logs=logs, ranks=ranks)
        started = self._starts[group] = NodesStart(job, group, number, self._members_of(group))
        started.begin()
        return started

    def ask_to_stop(self) -> None:
        self._agents.hub.tell("stop")

    def note_losses(self) -> None:
        self._agents.note_losses()

    def end(self) -> tuple[int, ...]:
        self._agents.end()
        return end_launch(self._family, self._guard)

    def _members_of(self, group: int) -> list[Member]:
        return [self._members[node] for node in self._plan.nodes_of_group(group)]

    def _may_come(self, member: Member) -> bool:
        return not member.gone or time.monotonic() < member.lost_at + self._return_timeout_s

    def _refuse_unfit(self) -> None:
        """Before anything was started, a host that cannot take part ends the run. Raises MachineError."""
        for member in self._members:
            if member.complaint:
                raise MachineError(Problem("unfit_host", f"{member.name}: {member.complaint}", environment=True))
        if code := self._agents.failed_to_start:
            message = f"what starts the hosts' agents ended with exit code {code}"
            hint = f"look at {self._job.torchrun_log}"
            raise MachineError(Problem("agents_failed", message, hint=hint, environment=True))


class NodesStart:
    """One start of a group."""

    def __init__(self, job: Job, group: int, number: int, members: Sequence[Member]):
        """`members`: of its hosts; who comes back after a loss is another one."""
        self.job, self._name, self._members = job, f"{group} {number}", members
        self._failure: WorkerFailure | None = None
        self._done: set[int] = set()
        self._dropped: set[int] = set()

    def begin(self) -> None:
        self._tell(f"begin {self._name}")

    def hear(self, member: Member, words: Sequence[str]) -> None:
        """What is said of an earlier start is passed over."""
        kind, name = words[0], " ".join(words[1:3])
        if name != self._name:
            return
        if kind == "lost" and self._failure is None:
            self._failure = WorkerFailure(int(words[3]), member.host, " ".join(words[4:]))
        elif kind == "done":
            self._done.add(member.node)
        elif kind == "dropped":
            self._dropped.add(member.node)

    def failure(self) -> WorkerFailure | None:
        lost = next((member for member in self._members if member.gone), None)
        if lost is None:
            return self._failure
        words = lost.loss or lost.complaint or "has left"
        return WorkerFailure(lost.node, lost.host, words, time=0.0, whole_node=True)

    def is_done(self) -> bool:
        return len(self._done) == len(self._members)

    def end(self) -> None:
        self._tell(f"drop {self._name}")

    def is_gone(self) -> bool:
        """A lost host ends what it runs by itself."""
        return all(member.gone or member.node in self._dropped for member in self._members)

    def _tell(self, order: str) -> None:
        for member in self._members:
            member.say(order)
