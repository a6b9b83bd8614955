"""Runs the replica groups of a job: starts again what died and nothing else, and gives up in order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from trainspec_cli.launch.backend.executor import Executor, GroupExecutor
from trainspec_cli.launch.backend.processes import POLL_S
from trainspec_cli.launch.failure import Explanation, WorkerFailure, explain, find_failures, first_causes
from trainspec_cli.launch.group import ReplicaGroup, State
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.signals import StopRequests, on_stop_signal
from trainspec_cli.launch.supervise import SUPERVISOR, Ending, was_stopped
from trainspec_cli.policy.recovery import enough_groups, may_restart, pause_s
from trainspec_cli.rundir.event_types import EndedMark, LaunchMark, StepEvent
from trainspec_cli.rundir.events import EventTail, EventWriter
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.recipe.fault import parse_faults
from trainspec_cli.spec.results.plan import Plan

Watch = Callable[[bool], None]
STUCK = 0.9
"""Part of `resilience.exchange_timeout_s` that the others must have waited: clocks are read ten times a second."""
ANSWER_S = 2.0
"""A group whose exchange failed says so within this time."""


def supervise_groups(
    job: Job,
    plan: Plan,
    executor: Executor,
    watch: Watch,
    say: Callable[[str], None],
    requests: StopRequests | None = None,
) -> Ending:
    """As `supervise`, for a plan of several replica groups. `say` hears of every failure and what follows."""
    requests, marks = requests or StopRequests(), EventWriter(job.run.supervisor_events, SUPERVISOR)
    with on_stop_signal(requests.add):
        marks.write(LaunchMark())
        groups = executor.submit_groups(job, plan)
        try:
            run = _Run(job, plan, groups, requests, say)
            while run.anything_left() and not run.killed:
                watch(run.stop_requested)
                run.act()
                time.sleep(POLL_S)
        finally:
            left_behind = groups.end()
            marks.write(EndedMark(exit_code=0))
            marks.close()
        watch(run.stop_requested)
    stopped = was_stopped(job.run, groups.generation, requests)
    return Ending(0, stopped, run.killed, left_behind, run.given_up, groups.generation)


class _Run:
    def __init__(
        self, job: Job, plan: Plan, executor: GroupExecutor, requests: StopRequests, say: Callable[[str], None]
    ):
        self._job, self._resilience, self._requests, self._say = job, plan.spec.resilience, requests, say
        job.logs.mkdir(parents=True, exist_ok=True)
        self._executor = executor
        self._groups = [ReplicaGroup(number, job.run) for number in range(plan.replica_groups)]
        self._faults = [fault for fault in parse_faults(plan.spec.fault) if fault.kind == "lighthouse"]
        self._faults.sort(key=lambda fault: fault.step)
        self._log = EventTail(job.run.events(0))
        self._deadline = math.inf
        self._expected = 0
        self._last_failure = "their hosts did not come"
        self.stop_requested = self.killed = self._stopping = False
        self.given_up = ""
        self._has_stepped = False
        self._count_groups()

    def anything_left(self) -> bool:
        return any(group.state in ("running", "ending", "waiting") for group in self._groups)

    def act(self) -> None:
        now_s = time.monotonic()
        for news in self._executor.poll():
            self._say(news)
        if self._requests.count and not self.stop_requested:
            self.stop_requested = True
            self._stop()
        for group in self._groups:
            self._look_after(group, now_s)
        self._count_groups()
        self._keep_rendezvous()
        if self._requests.count > 1 or now_s > self._deadline:
            self.killed = True

    def _look_after(self, group: ReplicaGroup, now_s: float) -> None:
        if group.state == "waiting" and now_s >= group.start_at and self._executor.presence(group.number) == "there":
            group.start(self._executor)
        if group.state == "running":
            self._check(group, now_s)
        if group.state == "ending" and group.running.is_gone():
            self._recover(group, now_s)

    def _check(self, group: ReplicaGroup, now_s: float) -> None:
        group.look(now_s)
        self._has_stepped = self._has_stepped or group.stepped_at > 0
        failure = group.running.failure()
        if failure is not None or self._is_stuck(group, now_s):
            group.end(failure)
        elif group.running.is_done():
            group.state = "done"
            self._set_states("waiting", "gone")

    def _is_stuck(self, group: ReplicaGroup, now_s: float) -> bool:
        """The others have waited for it as long as they may, and it has said nothing all the while.

        They may not be able to go on without it: a quorum is more than half of those that live.
        """
        others = [other for other in self._groups if other is not group]
        patience_s = STUCK * self._resilience.exchange_timeout_s
        allowed_until = max(group.stepped_at, group.retried_at) + patience_s
        went_on = max(other.stepped_at for other in others) > allowed_until
        asked_at = max(other.retried_at for other in others)
        return group.stepped_at > 0 and (went_on or (asked_at > allowed_until and now_s - asked_at > ANSWER_S))

    def _recover(self, group: ReplicaGroup, now_s: float) -> None:
        """Start it again, or go on without it, or end the run."""
        failures = failures_of(group)
        explanation = explain(failures) if failures else Explanation("it lives, and the others had to go on without it")
        self._last_failure, group.state = explanation.headline, "gone"
        group.failures_in_a_row += 1
        if self._is_final(failures):
            self._say(f"group {group.number}: {explanation.headline}")
            self._stop()
            return
        group.put_errors_away()
        if self._ending():
            return
        if may_restart(self._resilience, group.starts_s[1:], now_s):
            pause = pause_s(group.failures_in_a_row)
            group.state, group.start_at = "waiting", now_s + pause
            follows = self._what_follows(group, pause)
        else:
            follows = "it stays away, it failed too often"
        self._say(f"group {group.number}: {explanation.headline}; {follows}")

    def _what_follows(self, group: ReplicaGroup, pause: float) -> str:
        if self._executor.presence(group.number) != "there":
            return "it starts again when its hosts are back"
        return f"it starts again after {pause:.0f} s" if pause else "it starts again"

    def _is_final(self, failures: list[WorkerFailure]) -> bool:
        """An error that was foreseen would come again, and so would one before the run's first step."""
        causes = [failure for failure in failures if not failure.consequence]
        return any(failure.foreseen or (failure.own_words and not self._has_stepped) for failure in causes)

    def _count_groups(self) -> None:
        """A run that has not stepped yet waits for those that may come; with too few of them a run ends."""
        if self._ending():
            return
        left = sum(self._may_come(group) for group in self._groups)
        if left != self._expected:
            self._expected = left
            write_json(self._job.run.groups_json, {"expected": left})
        if not enough_groups(self._resilience, left):
            self.given_up = (
                f"{left} of {len(self._groups)} replica groups are left, and resilience.min_groups is "
                f"{self._resilience.min_groups}; the last failure: {self._last_failure}"
            )
            self._executor.note_losses()
            self._stop()

    def _may_come(self, group: ReplicaGroup) -> bool:
        awaited = group.state == "waiting" and self._executor.presence(group.number) != "away"
        return awaited or group.state in ("running", "ending")

    def _ending(self) -> bool:
        return self._stopping or any(group.state == "done" for group in self._groups)

    def _stop(self) -> None:
        """Ask the workers to write a checkpoint and end; groups that wait stay away."""
        self._stopping = True
        self._set_states("waiting", "gone")
        self._executor.ask_to_stop()
        self._deadline = min(self._deadline, time.monotonic() + self._job.stop_grace_s)

    def _set_states(self, before: State, after: State) -> None:
        for group in self._groups:
            if group.state == before:
                group.state = after

    def _keep_rendezvous(self) -> None:
        """Start the rendezvous server again where it has ended, and end it where the recipe asks for that."""
        step = max((event.step for event in self._log.read() if isinstance(event, StepEvent)), default=0)
        while self._faults and step >= self._faults[0].step:
            self._faults.pop(0)
            self._executor.rendezvous.kill()
        if self._executor.rendezvous.keep_alive():
            self._say("the rendezvous server ended; it starts again")


def failures_of(group: ReplicaGroup) -> list[WorkerFailure]:
    """Why its last start failed, told by the workers where they could; a host that is lost is where it began."""
    told, now = find_failures(group.running.job), group.running.failure()
    if now is not None and now.whole_node:
        return [now, *told]
    seen = group.failure
    if seen is None or any(failure.rank == seen.rank for failure in told):
        return told
    return first_causes([seen, *told])
