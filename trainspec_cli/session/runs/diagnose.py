"""Diagnoses of a run, for `trainspec diagnose`, `report`, and the live view of a run supervised by this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainspec_cli.recipe.results.verdict import LookOrder, RunVerdict
from trainspec_cli.reporter.collect import Report
from trainspec_cli.reporter.verdicts import describe_event
from trainspec_cli.run.folder.event_types.events import EvalEvent, StepEvent, VerdictEvent
from trainspec_cli.run.folder.events import EventTail, read_sound
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import has_plan, read_composed
from trainspec_cli.run.job.folder import is_running
from trainspec_cli.session.runs.find import collect_run, find_run, refusing_closed, status_of_run

if TYPE_CHECKING:
    from trainspec_cli.reporter.diagnosis.watch import DiagnosisWatch

FOLLOW_S = 0.5


def diagnose_run(name: str) -> tuple[RunVerdict, ...]:
    """Return the current verdicts on a run, most severe first. Raises the same errors as `find_run`."""
    run = find_run(name)
    with refusing_closed(name):
        return verdicts_of(run, asks_planner=True)


def follow_verdicts(name: str) -> Iterator[VerdictEvent]:
    """Yield the verdicts of a run's supervisor from the first one until the run ends, including those that no longer
    hold. Raises the same errors as `find_run`."""
    run = find_run(name)
    tail = EventTail(run.verdicts, None)
    goes_on = True
    while goes_on:
        goes_on = status_of_run(run) == "running"
        yield from (event for event in tail.read() if isinstance(event, VerdictEvent))
        if goes_on:
            time.sleep(FOLLOW_S)


def report_of(name: str) -> Report:
    """Return the current report of a run, with its verdicts. Raises the same errors as `find_run`."""
    return replace(collect_run(name), verdicts=diagnose_run(name))


def composed_of(report: Report) -> str:
    """Return the composed recipe of a reported run. Raises MachineError if it cannot be read."""
    with refusing_closed(report.path):
        return read_composed(RunDir(report.path))


def verdicts_of(run: RunDir, *, asks_planner: bool = False) -> tuple[RunVerdict, ...]:
    """Return the verdicts on a run; none if it has not been planned yet. If nothing is slowing the run down, the
    planner searches for a better layout; this takes some time."""
    planned = has_plan(run)
    if planned and not run.plan_json.is_file():
        return ()
    from trainspec_cli.reporter.diagnosis.conclude import conclude, with_evaluations
    from trainspec_cli.reporter.diagnosis.gather import read_run  # deferred: loads numpy
    from trainspec_cli.session.planning.outlook import outlook_of

    reader = read_run(run)
    evidence = reader.evidence(time.time() if is_running(run) else None)
    asks_planner = asks_planner and planned
    verdicts = conclude(evidence, partial(outlook_of, run, reader)) if asks_planner else conclude(evidence)
    if planned:
        steps = 0
        steps_s = 0.0
        evaluations = []
        for event in read_sound(run.events(0)):
            if isinstance(event, StepEvent):
                steps += 1
                steps_s += event.step_time_s
            elif isinstance(event, EvalEvent):
                evaluations.append((event.step, event.seconds))
        verdicts = with_evaluations(verdicts, evaluations, steps, steps_s)
    if not (last := reader.forgotten_until):
        return verdicts
    note = f"based on the steps after {last:,}; earlier steps were not read"
    return tuple(replace(one, evidence=(*one.evidence, note)) for one in verdicts)


def trace_to(name: str, file: Path) -> None:
    """Write the trace of a run. Raises the same errors as `find_run`, and OSError if the file cannot be written."""
    from trainspec_cli.reporter.diagnosis.gather import shape_of
    from trainspec_cli.reporter.diagnosis.trace import trace_run

    run = find_run(name)
    with refusing_closed(name):
        write_json(file, trace_run(run, shape_of(run), verdicts_of(run)))


class VerdictLines:
    """Reports verdicts in the live view, each on one line. A thread diagnoses the run: a diagnosis takes seconds on a
    busy node, and a supervisor that is silent for that long loses its nodes."""

    def __init__(self, run: RunDir, ask: Callable[[LookOrder], None] | None):
        """`ask`: see DiagnosisWatch."""
        self._run = run
        self._ask = ask
        self._orders: list[LookOrder] = []
        """What the thread would ask for."""
        self._watch: DiagnosisWatch | None = None
        self._executor = ThreadPoolExecutor(1, "diagnosis")
        self._diagnosing: Future[list[VerdictEvent]] | None = None

    def look(self, say: Callable[[str], None]) -> None:
        """Report what the last diagnosis has found, and start the next one if it is due. This does not block."""
        if self._watch is None:
            if not self._run.events(0).is_file():  # the workers have not started
                return
            from trainspec_cli.reporter.diagnosis.watch import DiagnosisWatch

            self._watch = DiagnosisWatch(self._run, self._orders.append if self._ask else None)
        if self._diagnosing is not None:
            if not self._diagnosing.done():
                return
            for event in self._diagnosing.result():
                self._say(event, say)
            if self._ask:
                for order in self._orders:
                    self._ask(order)
            self._orders.clear()
            self._diagnosing = None
        if self._watch.is_due:
            self._diagnosing = self._executor.submit(_diagnose, self._watch)

    @staticmethod
    def _say(event: VerdictEvent, say: Callable[[str], None]) -> None:
        """Report a verdict. `noise` verdicts need no action, and are left to `diagnose` and `report`."""
        if event.verdict.cause != "noise":
            say(f"diagnosis: {describe_event(event)}")


def _diagnose(watch: DiagnosisWatch) -> list[VerdictEvent]:
    events: list[VerdictEvent] = []
    watch.update(events.append)
    return events
