"""The supervisor: it feeds what the backend observes to `policy.recovery`, does what that decides, and leaves nothing
running."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.recipe.canonical import ABSENT
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import OpenBackend, RunBackend
from trainspec_cli.run.backend.node_processes import ranks_of, start_folder
from trainspec_cli.run.backend.observe import newest_checkpoint, newest_step
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.folder.event_types.decisions import MemoryEvent
from trainspec_cli.run.folder.event_types.failures import EndedMark, FailureMark, LaunchMark, RecoveryEvent
from trainspec_cli.run.folder.events import EventWriter, read_sound
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import Fence, was_stop_noted
from trainspec_cli.run.folder.record import NodeErrorRecord, write_error
from trainspec_cli.run.job.job import Job, torchrun_command
from trainspec_cli.run.recovery import recovery, run_state
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.run.slow_nodes import Replan, SlowNodes

SUPERVISOR = -1
"""Stands for a rank in the supervisor's marks."""
TOOL = ResilienceSpec(mode="none")
"""The resilience of a job without a plan."""


@dataclass(frozen=True)
class Ending:
    """The end of the processes; what it means for the run is decided by `outcome.conclude`."""

    job: Job
    """The job of the last generation."""
    exit_code: int | None
    """torchrun's; None when it was still there and had to be killed. Of several replica groups 0."""
    stop_requested: bool
    """True where a person or a scheduler has asked the supervisor, or a node's agent, to stop."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be ended (stuck in the kernel)."""
    given_up: str = ""
    """Why the supervisor ended the run, where it did (too few replica groups were left)."""
    generation: int | None = None
    """The number of the generation that ended."""


def supervise(
    job: Job,
    plan: Plan | None,
    backend: OpenBackend,
    watch: Callable[[bool], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
    requests: StopRequests | None = None,
    replan: Replan | None = None,
) -> Ending:
    """Run `job` until all its processes have ended, and start again what fails where `plan` wants that.

    `watch` is called about ten times a second, with whether a stop has been asked for; `report` hears of every failure
    that does not end the run, and what follows. Without a plan the job is started again after failures as often as its
    `max_restarts` allow, and a tool's never. `replan` finds the plan of a run that leaves a slow node out; without it
    only a spare node can take its place.

    A first request to stop asks the workers to write a checkpoint and end, within the job's `stop_grace_s`; before
    they have written an event there is nothing to save, and they are killed. A second request kills at once.

    Raises TrainspecError where the run cannot begin, or was begun anew elsewhere.
    """
    requests = requests or StopRequests()
    with on_stop_signal(requests.add):
        supervisor = Supervisor(job, plan, backend, report, replan)
        supervisor.open()
        try:
            while not supervisor.state.is_over:
                watch(supervisor.state.stop_requested)
                supervisor.turn(time.monotonic(), requests)
                time.sleep(POLL_S)
        finally:
            supervisor.close()
        watch(supervisor.state.stop_requested)
    return supervisor.ending()


class Supervisor:
    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        backend: OpenBackend,
        report: Callable[[str], None],
        replan: Replan | None = None,
    ):
        self._job, self._plan, self._open_backend, self._report = job, plan, backend, report
        self._first_logs = job.logs
        self.state = recovery.begin(
            plan.spec.resilience if plan else TOOL,
            plan.replica_groups if plan else 1,
            job.stop_grace_s,
            max(job.earlier_steps, newest_checkpoint(job.run)),
            memory_ladder=plan.memory_ladder if plan else (),
            restarts_left=job.max_restarts,
        )
        self._backend: RunBackend | None = None
        self._marks: EventWriter | None = None
        self._generation: int | None = None
        self._left_behind: tuple[int, ...] = ()
        self._has_named_missing = False
        self._losses: dict[int, run_state.NodeLost | run_state.NodeUnfit] = {}
        self._slow_nodes = SlowNodes(job, plan, replan, report) if plan else None

    def open(self) -> None:
        """Begin a generation of the run."""
        if self._slow_nodes and self._plan:
            self._slow_nodes.open(self._job, self._plan)
        self._marks = EventWriter(self._job.run.supervisor_events, SUPERVISOR)
        self._marks.write(LaunchMark())
        self._backend = self._open_backend(self._job, self._plan)
        self._generation = self._backend.generation

    def close(self) -> None:
        """End a generation, where one is open: nothing of it is left."""
        backend, marks = self._backend, self._marks
        self._backend = self._marks = None
        if marks is None:
            return
        try:
            if backend:
                self._left_behind = backend.kill()
        finally:
            marks.write(EndedMark(exit_code=self._exit_code))
            marks.close()

    def turn(self, now_s: float, requests: StopRequests) -> None:
        """Take in what has happened, and do what follows."""
        self._take(run_state.Tick(now_s))
        if self._backend:
            for event in self._backend.poll():
                self._take(event)
        for event in self._slow_nodes.poll() if self._slow_nodes else ():
            self._take(event)
        if requests.count:
            self._take(run_state.StopRequested(requests.count))

    def ending(self) -> Ending:
        noted = self._generation is not None and was_stop_noted(self._job.run, self._generation)
        return Ending(
            self._job,
            self._exit_code,
            self.state.stop_requested or noted,
            self._left_behind,
            self.state.given_up,
            self._generation,
        )

    @property
    def _exit_code(self) -> int | None:
        return self.state.exit_code if self.state.is_alone else 0

    def _take(self, event: run_state.Event) -> None:
        if isinstance(event, (run_state.NodeLost, run_state.NodeUnfit)):
            self._losses[event.node] = event
        elif isinstance(event, run_state.NodeBack):
            self._losses.pop(event.node, None)
        elif isinstance(event, run_state.NodesSeen):
            if self._slow_nodes:
                self._slow_nodes.see(event.hostnames)
            if event.waiting and not self._has_named_missing and not any(group.starts for group in self.state.groups):
                self._has_named_missing = True
                self._report(event.waiting)
        self.state, actions = recovery.next_action(self.state, event)
        for action in actions:
            self._apply(action)

    def _apply(self, action: run_state.Action) -> None:
        backend, run = self._backend, self._job.run
        assert backend is not None, "a generation is open"
        match action:
            case run_state.Launch(group, number):
                backend.start(group, number)
            case run_state.Stop(group):
                backend.stop(group)
            case run_state.Kill(group):
                backend.kill(group)
            case run_state.BeginGeneration():
                self._begin_generation()
            case run_state.TakeSetting():
                self._take_setting(action)
            case run_state.LeaveOut(node):
                assert self._slow_nodes is not None, "it has found the node"
                self._job, self._plan = self._slow_nodes.leave_out(node)
            case run_state.Inform(text):
                self._report(text)
            case run_state.MarkFailure():
                assert self._marks is not None, "a generation is open"
                self._marks.write(FailureMark())
            case run_state.ArchiveErrors(group):
                self._archive_errors(group)
            case run_state.RecordLosses():
                self._record_losses()
            case run_state.Expect(groups):
                write_json(run.groups_json, {"expected": groups})
            case run_state.Refuse(code, message):
                hint = f"look at {self._job.torchrun_log}" if code == "agents_failed" else ""
                raise MachineError(Problem(code, message, hint=hint, environment=True))

    def _begin_generation(self) -> None:
        self._job.run.result_json.unlink(missing_ok=True)  # other nodes take part until there is one
        self.close()
        self._note_restart()
        self._losses.clear()
        number = self.state.groups[0].starts + 1
        logs = self._first_logs.with_name(f"{self._first_logs.name}_start{number:03d}")
        worker = self._job.worker
        command = torchrun_command(self._job.world_size, logs, worker) if worker else self._job.command
        self._job = replace(self._job, logs=logs, command=command)
        self.open()

    def _note_restart(self) -> None:
        """Move the failed start's error reports to its logs, and write to the run's events what is lost."""
        run = self._job.run
        for path in run.errors_folder.glob("*.json"):
            path.rename(self._job.logs / path.name)
        step = newest_step(read_sound(run.events(0)))
        # Without a plan the checkpoints are the program's own: its next start shows from where it continues.
        lost_steps = step - newest_checkpoint(run) if self._plan else None
        events = EventWriter(run.events(0), rank=0)
        events.write(RecoveryEvent(step=step, change="restart", group=None, stall_s=None, lost_steps=lost_steps))
        events.close()

    def _take_setting(self, action: run_state.TakeSetting) -> None:
        """Write down with what the next start takes less memory: its workers follow that."""
        shortage, alone = action.shortage, self.state.is_alone
        step = newest_step(read_sound(self._job.run.events(0)))
        directives = EventWriter(self._job.run.directives, SUPERVISOR)
        directives.write(
            MemoryEvent(
                step=step,
                layout=shortage.layout,
                failed=shortage.failed,
                taken=action.taken,
                restarts=True,
                was_killed=shortage.was_killed,
                reason=action.reason,
                lost_steps=max(0, step - newest_checkpoint(self._job.run)) if alone else 0,
                used_bytes=shortage.used_bytes,
                limit_bytes=shortage.limit_bytes,
                group=ABSENT if alone else action.group,
            )
        )
        directives.close()

    def _archive_errors(self, group: int) -> None:
        assert self._plan is not None, "replica groups have a plan"
        logs = self._job.logs / start_folder(group, self.state.groups[group].starts)
        logs.mkdir(parents=True, exist_ok=True)
        for rank in ranks_of(self._plan, group):
            path = self._job.run.error(rank)
            if path.exists():
                path.rename(logs / path.name)

    def _record_losses(self) -> None:
        """Write down the nodes that are lost or unfit, unless a newer start of the run has nodes of its own."""
        run = self._job.run
        for node, event in self._losses.items():
            if run.node_error(node).exists() or Fence(run, self._generation).is_closed():
                continue
            lost = isinstance(event, run_state.NodeLost)
            record = NodeErrorRecord(node=node, host=event.hostname, message=event.why, lost=lost, time=time.time())
            write_error(run.node_error(node), record)
