"""What an agent runs of replica groups, one start after another, as the hub orders it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.launch.backend import processes
from trainspec_cli.launch.backend.family import Family
from trainspec_cli.launch.backend.local import end_launch, generation_of
from trainspec_cli.launch.backend.nodes.wire import Wire
from trainspec_cli.launch.backend.part import Part, devices_of, ranks_of, start_folder
from trainspec_cli.launch.backend.spawn import start_guard
from trainspec_cli.launch.job.command import node_command
from trainspec_cli.launch.job.environment import group_environment
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.job.place import NodePlace
from trainspec_cli.rundir.stops import note_stop
from trainspec_cli.spec.results.plan import Plan


class Parts:
    """It waits for orders until the hub says `end`, whatever became of what it ran."""

    def __init__(self, hub: Wire, orders: deque[list[str]], plan: Plan, job: Job, node: int, head: str):
        """`orders`: what the hub has said, as words; taken from here. `job`: this host's, as of a run of one group.
        `head`: the first host's name or address.

        Where the agent dies its workers are killed without being asked to stop: they would ask all groups to.
        """
        self._hub, self._orders, self._plan, self._node, self._head = hub, orders, plan, node, head
        self._job = replace(job, stop_grace_s=0.0)
        self._parts: dict[str, Part] = {}
        """By group and number of the start, as the wire has them."""
        self._told: set[str] = set()
        self._dropped: dict[str, Part] = {}
        """Parts that were told to end and have processes left."""
        processes.kill(job.launch_id)  # what an agent that was killed here has left
        self._guard, self._family = start_guard(self._job), Family(self._job)

    def exit_code(self) -> int:
        """How each start ends is told as it ends."""
        return 0

    def anything_left(self) -> bool:
        """Also obeys, and tells what became of the workers: it is asked about ten times a second."""
        while self._orders:
            self._obey(self._orders.popleft())
        for name in self._parts.keys() - self._told:
            self._tell_end(name, self._parts[name])
        for name in [name for name, part in self._dropped.items() if part.is_gone()]:
            del self._dropped[name]
            self._hub.say(f"dropped {name}")
        return True

    def ask_to_stop(self) -> None:
        note_stop(self._job.run, generation_of(self._job))
        self._family.ask_to_stop()

    def end(self) -> tuple[int, ...]:
        return end_launch(self._family, self._guard)

    def _obey(self, words: Sequence[str]) -> None:
        name = " ".join(words[1:3])
        if words[0] == "begin":
            group, number = words[1:]
            self._parts[name] = self._start(int(group), int(number))
        elif words[0] == "drop":
            if part := self._parts.pop(name, None):
                part.end()
                self._dropped[name] = part
            elif name not in self._dropped:
                self._hub.say(f"dropped {name}")

    def _start(self, group: int, number: int) -> Part:
        nodes, name = self._plan.nodes_of_group(group), start_folder(group, number)
        place, size = NodePlace(self._node - nodes.start, len(nodes), self._head), self._plan.group_size // len(nodes)
        logs = self._job.logs.parent / name / self._job.logs.name
        own = group_environment(group, number) | devices_of(self._plan, group)
        job = replace(
            self._job,
            command=node_command(place, name, size, logs, self._job.worker),
            environment={**self._job.environment, **own},
            logs=logs,
            ranks=ranks_of(self._plan, group)[place.node * size : (place.node + 1) * size],
        )
        return Part(job, group)

    def _tell_end(self, name: str, part: Part) -> None:
        failure = part.failure()
        if failure:
            self._hub.say(f"lost {name} {failure.rank} {failure.summary}")
        elif part.is_done():
            self._hub.say(f"done {name}")
        if failure or part.is_done():
            self._told.add(name)
