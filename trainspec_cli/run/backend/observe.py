"""Turn the nodes' reports and the content of the run folder into the events that `run.recovery` bases its decisions
on."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import parse_faults
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage
from trainspec_cli.run.channel.messages import GroupExited, ProcessMessage, WorkerExited
from trainspec_cli.run.failure import WorkerFailure, explain, explain_end, find_failures, first_causes, with_faults
from trainspec_cli.run.folder.accounting import read_sound_reliefs
from trainspec_cli.run.folder.event_types.events import DirectiveEvent, Event, RetryEvent, StepEvent
from trainspec_cli.run.folder.events import EventTail, read_sound
from trainspec_cli.run.folder.memory import newest_copy
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_result
from trainspec_cli.run.job.job import Job, group_job
from trainspec_cli.run.recovery import run_state
from trainspec_cli.run.recovery.memory import apply_reliefs
from trainspec_cli.run.rendezvous.address import Rendezvous


class RunningStart(Protocol):
    """One start of a replica group, on one or several nodes. The start has ended once all of these nodes have reported
    its end."""

    group: int
    number: int

    def hear(self, node: int, hostname: str, message: ProcessMessage) -> list[run_state.Event]:
        """Return the run event that follows from a message of one of its nodes."""

    def lose(self, node: int, number: int, hostname: str, why: str) -> None:
        """Record that a node is lost; its processes end by themselves. `number`: the node's number in the job."""

    def poll(self) -> Iterator[run_state.Event]:
        """Yield new events; the last one reports the end of the start."""

    @property
    def has_ended(self) -> bool: ...


class GroupStart:
    """A start of a replica group in the run of a recipe."""

    def __init__(self, job: Job, plan: Plan | None, group: int, number: int, nodes: Sequence[int] = (0,)):
        self.group = group
        self.number = number
        self.job = group_job(job, plan, group, number)
        self._is_alone = self.job.ranks is None
        self._exit_codes: dict[int, int | None] = dict.fromkeys(nodes)
        self._running = set(nodes)
        self._left_behind: list[int] = []
        self._plan = plan
        self._oom_kills = 0
        self._memory_bytes = 0
        self._faults: list[run_state.HostFault] = []
        self._failure: WorkerFailure | None = None
        """A failure detected from outside the worker."""
        self._events = EventTail(job.run.events(0) if self._is_alone else job.run.group_events(group, 0))
        self._has_begun = self._has_failed = False
        self._step = 0
        """The newest step of this start."""

    def hear(self, node: int, hostname: str, message: ProcessMessage) -> list[run_state.Event]:
        if isinstance(message, WorkerExited):
            self._failure = self._failure or WorkerFailure(
                message.rank, hostname, message.summary, was_killed=message.was_killed
            )
            return self._fail()
        if isinstance(message, GroupExited):
            self._exit_codes[node] = message.exit_code
            self._left_behind += message.left_behind
            self._oom_kills += message.oom_kills
            self._faults += [run_state.HostFault(hostname, fault) for fault in message.faults]
            self._memory_bytes = message.memory_bytes if message.oom_kills else self._memory_bytes
            self._running.discard(node)
            return []
        return [run_state.Orphaned(self.group)]

    def lose(self, node: int, number: int, hostname: str, why: str) -> None:
        """Record the loss of a node, without which a single-group run cannot continue."""
        self._failure = WorkerFailure(number, hostname, why, time=0.0, whole_node=True, foreseen=self._is_alone)
        self._running.discard(node)

    def poll(self) -> Iterator[run_state.Event]:
        events = self._events.read()
        if events and not self._has_begun:
            self._has_begun = True
            yield run_state.Begun(self.group)
        if any(isinstance(event, StepEvent) for event in events):
            self._step = newest_step(events)
            yield run_state.Stepped(self.group)
        if any(isinstance(event, RetryEvent) for event in events):
            yield run_state.Retried(self.group)
        if self._is_alone and not self._has_failed and any(self.job.run.errors_folder.glob("*.json")):
            yield from self._fail()
        if self.has_ended:
            yield self._end()

    @property
    def has_ended(self) -> bool:
        return not self._running

    def _fail(self) -> list[run_state.Event]:
        if self._has_failed:
            return []
        self._has_failed = True
        return [run_state.WorkerFailed(self.group)]

    def _end(self) -> run_state.GroupEnded:
        codes = self._exit_codes.values()
        exit_code = next((code for code in codes if code), None if None in codes else 0)
        failures = self.failures()
        causes = [failure for failure in failures if not failure.consequence]
        own_error = any(failure.self_reported for failure in causes)
        from_outside = (bool(causes) or (exit_code or 0) < 0) and not own_error
        shortage = next((failure.shortage for failure in causes if failure.shortage), None)
        if self._is_alone:
            headline = explain_end(self.job, exit_code, failures).headline
        else:
            headline = (
                explain(failures).headline if failures else "it is alive, and the others had to continue without it"
            )
        killed = [failure for failure in causes if failure.was_killed]
        was_killed = from_outside and (bool(killed) or -signal.SIGKILL in codes)
        if self._oom_kills and was_killed:
            # Memory ran out with the current setting.
            if self._plan is not None:
                step = max(self._step, newest_checkpoint(self.job.run))
                layout, setting = _in_force(self.job.run, self._plan, step)
                shortage = Shortage(setting, layout, limit_bytes=self._memory_bytes or None, was_killed=True)
            who = f"{killed[0].who} ({killed[0].host or 'hostname unknown'})" if killed else "torchrun"
            headline = f"{who} was killed by the kernel, because the host's memory had run out"
        headline = with_faults(headline, self._faults)
        result = read_result(self.job.run) if self._is_alone else None
        return run_state.GroupEnded(
            group=self.group,
            # A result with the status `stopped` does not mean success, because the stop may not have been requested.
            done=bool(result and result.status == "done") if self._is_alone else exit_code == 0,
            headline=headline,
            exit_code=exit_code,
            own_error=own_error,
            foreseen=any(failure.foreseen for failure in causes),
            from_outside=from_outside,
            was_killed=was_killed,
            checkpoint_step=newest_checkpoint(self.job.run),
            left_behind=tuple(self._left_behind),
            shortage=shortage,
            faults=tuple(self._faults),
        )

    def failures(self) -> list[WorkerFailure]:
        """Return why the start failed, as reported by its workers if they could report it. If a node was lost, the
        failure started there."""
        reported = find_failures(self.job)
        seen = self._failure
        if seen is not None and seen.whole_node:  # the failure may already be recorded in the folder
            return [seen, *(other for other in reported if not (other.whole_node and other.rank == seen.rank))]
        if seen is None or self._is_alone:
            return reported
        if any(failure.rank == seen.rank for failure in reported):
            return reported
        return first_causes([seen, *reported])


def _in_force(run: RunDir, plan: Plan, step: int) -> tuple[str, MemorySetting]:
    """Return the axes of a run's layout after `step` updates, and the memory setting that the run uses in this
    layout."""
    layout = plan.layout
    setting = apply_reliefs(plan.memory_setting, read_sound_reliefs(run, layout.describe()))
    for event in read_sound(run.directives):
        if not isinstance(event, DirectiveEvent) or not event.applied or event.step > step:
            continue
        if event.before == layout and isinstance(event.layout, Layout):
            layout = event.layout
            if not isinstance(event.micro_batch_size, Absent):
                setting = replace(setting, micro_batch_size=event.micro_batch_size)
            setting = apply_reliefs(setting, read_sound_reliefs(run, layout.describe()))
    return layout.describe(), setting


def poll_starts(starts: dict[int, RunningStart]) -> list[run_state.Event]:
    """Return the events of all starts, and remove ended starts from `starts`."""
    events = [event for start in starts.values() for event in start.poll()]
    for group in [group for group, start in starts.items() if start.has_ended]:
        del starts[group]
    return events


class RendezvousWatch:
    """Keeps the rendezvous server alive, and kills it if the recipe injects this fault."""

    def __init__(self, rendezvous: Rendezvous, run: RunDir, plan: Plan):
        self._rendezvous, self._events = rendezvous, EventTail(run.events(0))
        faults = parse_faults(plan.spec.fault)
        self._kill_at_steps = sorted(fault.step for fault in faults if fault.kind == "lighthouse")

    def poll(self) -> list[run_state.Event]:
        step = newest_step(self._events.read())
        while self._kill_at_steps and step >= self._kill_at_steps[0]:
            self._kill_at_steps.pop(0)
            self._rendezvous.kill()
        return [run_state.RendezvousRestarted()] if self._rendezvous.keep_alive() else []


def newest_step(events: Iterable[Event]) -> int:
    """Return the newest step in the events, or 0."""
    return max((event.step for event in events if isinstance(event, StepEvent)), default=0)


def newest_checkpoint(run: RunDir) -> int:
    """Return the step of the newest checkpoint, on disk or in this node's memory, or 0."""
    return max(newest_copy(run), *run.checkpoint_steps(), 0)
