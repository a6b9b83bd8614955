"""A backend whose processes are entries of a set: tests say what happens to them."""

from __future__ import annotations

from collections.abc import Callable

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.channel.messages import SpeedsReport, WorkerMessage
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import Event, GroupEnded, PresenceChanged


class World:
    """All that lives, over the generations of a run."""

    def __init__(self, groups: int = 1, presence: str = "there"):
        self.groups, self.presence = groups, presence
        self.live: dict[int, int] = {}
        """Group -> the number of its start."""
        self.killed: set[int] = set()
        self.starts: list[tuple[int, int, int]] = []
        """(generation, group, number)"""
        self.stops: list[int | None] = []
        self.jobs: list[Job] = []
        self.backends: list[MemoryBackend] = []
        self.checkpoint = 0
        self.answers_stop = False
        """True if workers stop on request."""

    def open(self, job: Job, plan: Plan | None) -> MemoryBackend:
        assert not self.live, "a generation begins before the last one has ended"
        self.jobs.append(job)
        self.backends.append(MemoryBackend(self, len(self.jobs)))
        return self.backends[-1]

    @property
    def backend(self) -> MemoryBackend:
        return self.backends[-1]

    def end(self, group: int, *, done: bool = False, **about: object) -> None:
        """Nothing is left of a group."""
        del self.live[group]
        self.killed.discard(group)
        given = {"headline": "it broke", "exit_code": 0 if done else 1, "checkpoint_step": self.checkpoint, **about}
        self.backend.queue.append(GroupEnded(group, done=done, **given))  # type: ignore[arg-type]


class MemoryHub:
    def __init__(self) -> None:
        self.told: list[tuple[WorkerMessage, int | None]] = []
        self.speeds: SpeedsReport | None = None
        """What rank 0 reports."""

    def send_to_workers(self, message: WorkerMessage, rank: int | None = None) -> None:
        self.told.append((message, rank))

    def take_speeds(self) -> SpeedsReport | None:
        speeds = self.speeds
        self.speeds = None
        return speeds


class MemoryBackend:
    def __init__(self, world: World, generation: int):
        self.world, self.generation, self.hub = world, generation, MemoryHub()
        self.queue: list[Event] = [PresenceChanged(group, world.presence) for group in range(world.groups)]  # type: ignore[arg-type]
        self.on_poll: Callable[[], None] = lambda: None
        self.closed = 0

    def start(self, group: int, number: int) -> None:
        assert not self.closed, "started after the end"
        assert group not in self.world.live, "started twice"
        self.world.live[group] = number
        self.world.starts.append((self.generation, group, number))

    def poll(self) -> list[Event]:
        assert not self.closed
        self.on_poll()
        for group in sorted(self.world.killed & self.world.live.keys()):
            self.world.end(group, exit_code=None, from_outside=True)
        events, self.queue = self.queue, []
        return events

    def stop(self, group: int | None = None) -> None:
        self.world.stops.append(group)
        if self.world.answers_stop:
            for live in [live for live in self.world.live if group in (None, live)]:
                self.world.end(live)

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        if group is None:
            self.closed += 1
            self.world.live.clear()
            self.world.killed.clear()
        else:
            self.world.killed.add(group)
        return ()
