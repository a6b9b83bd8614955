"""`launch --sweep`: one run per combination of the swept values, either one after another or side by side on this
node."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.live import Live
from rich.text import Text

from trainspec_cli.core import environment_names
from trainspec_cli.core.errors import EXIT_DONE, MachineError, Problem, RecipeError, Stopped, WorkerError
from trainspec_cli.core.printable import aligned, format_duration
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.console import RunConsole, make_console
from trainspec_cli.reporter.progress import Progress
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.folder.accounting import read_heldout_losses
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.events import EventTail
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult, read_result
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.session.launching.session import Session, spawn_resume, write_down
from trainspec_cli.session.launching.sweep import Sweep, load_points
from trainspec_cli.session.planning.predict import probe_after_run
from trainspec_cli.session.recipe.load import load, plan_on, this_machine

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
NOT_STARTED = "not started"
REDRAWN_S = 0.5
"""Interval in seconds between redraws of the table. It is long because drawing the table slows the workers down on a
small machine."""


@dataclass(eq=False)
class SweptRun:
    """One run of a sweep."""

    values: Mapping[str, str]
    """The swept values by key."""
    run: RunDir
    process: subprocess.Popen[bytes] | None = None
    slot: int = 0
    """Index of this run's group of devices among the groups on this node."""
    progress: Progress = field(default_factory=lambda: Progress(None))
    heldout_loss: float | None = None
    begun_s: float = 0.0
    """Start time (`time.monotonic`)."""
    took_s: float | None = None
    """Duration in seconds; None until the run has finished."""
    result: SweptResult | None = None
    """The outcome of the run; None until it has ended."""

    def __post_init__(self) -> None:
        self._tail = EventTail(self.run.events(0))

    def look(self) -> None:
        """Read the run's new events."""
        for event in self._tail.read():
            self.progress.add(event)
            if isinstance(event, EvalEvent):
                self.heldout_loss = event.heldout_loss

    def describe(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class SweptResult:
    """The outcome of one run in the sweep; missing metrics are None."""

    values: Mapping[str, str]
    run: RunDir
    status: str
    steps: int
    loss: float | None
    heldout_loss: float | None

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: finished runs first, by held-out loss or, if there is none, by training loss."""
        loss = self.loss if self.heldout_loss is None else self.heldout_loss
        return self.status != "done", math.inf if loss is None or math.isnan(loss) else loss


def launch_sweep(
    arguments: Sequence[str],
    sweeps: Sequence[Sweep],
    notify: Notify = NOBODY,
    *,
    side_by_side: int,
    force: bool,
    as_json: bool,
) -> int:
    """Record all runs, train them, and print a table with the best run first. Return the exit code: that of a failure
    if a run failed, otherwise that of a stop if one was requested. Raises TrainspecError if a run is rejected."""
    console = make_console(as_json=as_json)
    sessions = list(_sessions(arguments, sweeps, console, force=force, as_json=as_json))
    for _, session in sessions:
        size = session.plan.devices_per_node
        on_gpus = session.plan.device == "cuda"
        there_is = len(session.machine.gpu_names) if on_gpus else session.machine.cpu_cores
        if side_by_side > 1 and side_by_side * size > there_is:
            needed = f"{side_by_side} runs of {size} processes need {side_by_side * size}"
            hint = f"pass --at-once {max(1, there_is // size)}, or fewer devices per run: cluster.devices_per_node=1"
            message = f"{needed} {'GPUs' if on_gpus else 'cores'}, and this node has {there_is}"
            raise MachineError(Problem("no_room", message, "--at-once", hint))
    runs = [
        SweptRun(values, write_down(session), progress=Progress(session.plan.total_steps))
        for values, session in sessions
    ]
    console.report(f"{len(runs)} runs, {side_by_side} at a time; trainspec watch RUN shows one")
    # Every run gets the number of devices that the largest run needs, so the division of the devices never changes.
    largest = max((session.plan for _, session in sessions), key=lambda plan: plan.devices_per_node)
    train = _Training(runs, console, largest, side_by_side, notify, force=force)
    stopped = train.run()
    results = sorted((one.result or _result(one) for one in runs), key=lambda result: result.order)
    if as_json:
        print(json_text([{**vars(one), "values": dict(one.values), "run": str(one.run.root)} for one in results]))
    else:
        console.report("", render_results(results))
    unfinished = [result for result in results if result.status != "done"]
    if unfinished:
        console.report(
            "", "to continue:", *(f"  trainspec resume {shlex.quote(str(one.run.root))}" for one in unfinished)
        )
    if any(result.status not in ("done", "stopped", NOT_STARTED) for result in results):
        return WorkerError.exit_code
    if not stopped:
        probe_after_run(largest, sessions[0][1].machine, console)
    return Stopped.exit_code if stopped and unfinished else EXIT_DONE


def _sessions(
    arguments: Sequence[str], sweeps: Sequence[Sweep], console: RunConsole, *, force: bool, as_json: bool
) -> Iterator[tuple[Mapping[str, str], Session]]:
    """Yield (swept values, session of the run). Raises RecipeError if runs would share a folder, or need several
    nodes."""
    keys = [key for key, _ in sweeps]
    for values, loaded in load_points(arguments, sweeps, lambda _, point: load(point)):
        if loaded.spec.run.dir != AUTO and "run.dir" not in keys:
            message = f"`run.dir` is {loaded.spec.run.dir}, and each run of a sweep needs a separate folder"
            raise RecipeError(Problem("usage", message, "run.dir", "leave run.dir out"))
        if loaded.spec.cluster.num_nodes > 1:
            message = f"`cluster.num_nodes` is {loaded.spec.cluster.num_nodes}, and a sweep runs on this node"
            raise RecipeError(
                Problem("several_hosts", message, "cluster.num_nodes", "run trainspec sbatch ... --sweep")
            )
        machine = this_machine(loaded.spec)
        session = Session(plan_on(loaded, machine), machine, loaded, console, force=force, as_json=as_json)
        yield dict(zip(keys, values, strict=True)), session


class _Training:
    """Trains the runs of a sweep until all have ended or a stop is requested."""

    def __init__(
        self,
        runs: Sequence[SweptRun],
        console: RunConsole,
        plan: Plan,
        side_by_side: int,
        notify: Notify = NOBODY,
        *,
        force: bool = False,
    ):
        """`plan`: plan of the run with the most devices on this node; each run gets that number of devices."""
        self._runs = list(runs)
        self._waiting = list(runs)
        self._console = console
        self._plan = plan
        self._options = notify.options
        self._force = force
        self._side_by_side = side_by_side
        self._running: list[SweptRun] = []
        self._free = list(range(side_by_side))

    def run(self) -> bool:
        """Train all runs; return True if a stop was requested. In that case active runs write a checkpoint and stop,
        and no other run starts."""
        requests = StopRequests()
        passed_on = 0
        try:
            with on_stop_signal(requests.add), self._table() as show:
                while self._running or (self._waiting and not requests.count):
                    if requests.count > passed_on:
                        passed_on = requests.count
                        self._stop_running()
                    while self._waiting and self._free and not requests.count:
                        self._begin(self._waiting.pop(0), self._free.pop(0))
                    show()
                    time.sleep(POLL_S)
                    for one in [one for one in self._running if one.process and one.process.poll() is not None]:
                        self._end(one)
                show()
        except BaseException:  # no run may outlive the sweep
            self._stop_running()
            raise
        return requests.count > 0

    @contextmanager
    def _table(self) -> Iterator[Callable[[], None]]:
        """Show a table of all runs on a terminal, until the table of results replaces it. Without a terminal, print a
        line when each run starts and when it ends."""
        if not self._console.is_terminal:
            yield lambda: None
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            drawn_s = -math.inf

            def show() -> None:
                nonlocal drawn_s
                for one in self._running:
                    one.look()
                now_s = time.monotonic()
                if now_s - drawn_s >= REDRAWN_S or not self._running:
                    drawn_s = now_s
                    table = "\n".join(filter(None, (render_results(self._rows()), self._describe_left())))
                    live.update(Text(table, no_wrap=True, overflow="ellipsis"), refresh=True)

            yield show

    def _rows(self) -> list[SweptResult]:
        """Return the current state of the runs, in the order in which they are trained."""
        rows = []
        for one in self._runs:
            left_s = one.progress.time_left_s
            status = NOT_STARTED if one.process is None else f"{format_duration(left_s)} left" if left_s else "running"
            now = (status, one.progress.step, one.progress.loss, one.heldout_loss)
            rows.append(one.result or SweptResult(one.values, one.run, *now))
        return rows

    def _describe_left(self) -> str:
        """Return the estimated time left, based on finished runs if there are any, otherwise on active ones; empty if
        unknown or if all runs have ended."""
        now_s = time.monotonic()
        going = [(now_s - one.begun_s, one.progress.time_left_s) for one in self._running]
        whole_s = [one.took_s for one in self._runs if one.took_s is not None]
        whole_s = whole_s or [since_s + left_s for since_s, left_s in going if left_s is not None]
        if not whole_s or not (self._running or self._waiting):
            return ""
        mean_s = sum(whole_s) / len(whole_s)
        running_s = [max(0.0, mean_s - since_s) if left_s is None else left_s for since_s, left_s in going]
        left_s = max(running_s, default=0.0) + len(self._waiting) * mean_s / self._side_by_side
        ended = len(self._runs) - len(self._running) - len(self._waiting)
        return f"{ended} of {len(self._runs)} runs have ended, about {format_duration(left_s)} left"

    def _begin(self, one: SweptRun, slot: int) -> None:
        one.slot = slot
        one.begun_s = time.monotonic()
        environment = {environment_names.PROBE: "off", **self._gpus(slot)}
        one.process = spawn_resume(one.run, self._options, force=self._force, environment=environment)
        # macOS has no CPU affinity, so its scheduler distributes the runs over the cores.
        if self._plan.device == "cpu" and self._side_by_side > 1 and hasattr(os, "sched_setaffinity"):
            # Without affinity, all runs would share all cores, and each would start as many threads as there are cores.
            cores = sorted(os.sched_getaffinity(0))
            size = len(cores) // self._side_by_side
            with suppress(ProcessLookupError):  # a run that has already ended
                os.sched_setaffinity(one.process.pid, cores[slot * size : (slot + 1) * size])
        self._running.append(one)
        if not self._console.is_terminal:
            self._console.report(f"{one.describe()}: starts in {one.run.root}")

    def _gpus(self, slot: int) -> dict[str, str]:
        """Return the environment variable that limits a run to its group of the visible GPUs."""
        if self._plan.device != "cuda" or self._side_by_side == 1:
            return {}
        size = self._plan.devices_per_node
        seen = os.environ.get(VISIBLE_GPUS)
        ids = seen.split(",") if seen else [str(number) for number in range(size * self._side_by_side)]
        return {VISIBLE_GPUS: ",".join(ids[slot * size : (slot + 1) * size])}

    def _stop_running(self) -> None:
        self._console.report(f"stopping {len(self._running)} runs, with a checkpoint (Ctrl-C again: at once)")
        for one in self._running:
            if one.process:
                one.process.send_signal(signal.SIGTERM)

    def _end(self, one: SweptRun) -> None:
        self._running.remove(one)
        self._free.append(one.slot)
        result = _result(one)
        one.result = result
        if result.status == "done":
            one.took_s = time.monotonic() - one.begun_s
        if self._console.is_terminal and result.status == "done":
            return
        figures = [f"loss {result.loss:.4f}"] if result.loss is not None else []
        figures += [f"held out {result.heldout_loss:.4f}"] if result.heldout_loss is not None else []
        where = [] if result.status == "done" else [f"see {one.run.run_log}"]
        left = [self._describe_left()] if self._waiting and not self._console.is_terminal else []
        self._console.report(f"{one.describe()}: {', '.join(filter(None, [result.status, *figures, *where, *left]))}")


def _result(one: SweptRun) -> SweptResult:
    result = read_result(one.run) or RunResult(status=NOT_STARTED if one.process is None else "failed")
    losses = list(read_heldout_losses(one.run).values())
    heldout = losses[-1] if losses else None
    return SweptResult(one.values, one.run, result.status, result.steps, result.final_loss, heldout)


def render_results(results: Sequence[SweptResult]) -> str:
    """Return the table of a sweep, in the order of `results`."""
    keys = list(results[0].values)
    rows = [(*keys, "held out", "loss", "steps", "status", "run")]
    for one in results:
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (one.heldout_loss, one.loss))
        rows.append((*one.values.values(), *losses, str(one.steps), one.status, str(one.run.root)))
    return "\n".join(aligned(rows))
