"""Diagnose a run in progress: verdicts are written and reported when they are found and when they no longer hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.core.reading.files import read_object
from trainspec_cli.recipe.records import read_record
from trainspec_cli.recipe.results.verdict import LookOrder, RunVerdict
from trainspec_cli.reporter.diagnosis.conclude import conclude
from trainspec_cli.reporter.diagnosis.gather import RunReader, shape_of
from trainspec_cli.reporter.diagnosis.looks import next_look
from trainspec_cli.run.folder.event_types.events import VerdictEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.paths import RunDir

SUPERVISOR = -1
REMEMBERED_STEPS = 512
LOOK_S, COST_SHARE, LONGEST_S = 1.0, 5e-3, 5.0
"""Between two passes, the diagnosis waits at least this many seconds, and long enough to use at most this fraction of a
processor, but never more than 5 s."""
SEEN_TWICE = 2
"""A verdict is reported once this many consecutive diagnoses have found it."""


class DiagnosisWatch:
    """Diagnoses a run repeatedly: call `update` regularly. If the diagnosis fails, the run continues."""

    def __init__(
        self,
        run: RunDir,
        ask: Callable[[LookOrder], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`ask`: asks a suspected rank to profile itself because of a new verdict; None if ranks are never asked."""
        self._run = run
        self._clock = clock
        self._ask = ask
        self._orders: list[LookOrder] | None = None
        """The looks taken so far in this run; None until the first one is needed."""
        self._reader: RunReader | None = None
        self._due_s = clock() + LOOK_S
        self._is_over = False
        self._seen: dict[tuple[object, ...], int] = {}
        self._reported: dict[tuple[object, ...], RunVerdict] = {}

    @property
    def is_due(self) -> bool:
        return not self._is_over and self._clock() >= self._due_s

    def update(self, report: Callable[[VerdictEvent], None]) -> None:
        """Read new events, and call `report` for each verdict that is new or no longer holds. After a failure, such as
        a damaged file, the diagnosis stops."""
        if not self.is_due:
            return
        began_s = time.thread_time()
        try:
            self._diagnose(report)
        except Exception:  # a failing diagnosis must not end the training; `trainspec diagnose` reports the error
            self._is_over = True
        # The supervisor shares the node with the workers, so the diagnosis must not slow them down.
        cost_s = time.thread_time() - began_s
        self._due_s = self._clock() + min(LONGEST_S, max(LOOK_S, cost_s / COST_SHARE))

    def _diagnose(self, report: Callable[[VerdictEvent], None]) -> None:
        if self._reader is None:
            self._reader = RunReader(self._run, shape_of(self._run), REMEMBERED_STEPS)
        self._reader.read()
        found = {one.place: one for one in conclude(self._reader.evidence(time.time())) if one.cause != "as_planned"}
        going_on = {place: one for place, one in found.items() if one.until_step is None}
        self._seen = {place: self._seen.get(place, 0) + 1 for place in going_on}
        for place, one in going_on.items():
            # A single diagnosis may only see temporary load on the machine, so verdicts need confirmation. Hangs do
            # not: the ranks have confirmed them.
            if place not in self._reported and (self._seen[place] >= SEEN_TWICE or one.cause == "hang"):
                self._reported[place] = one
                self._write(one, report, is_over=False)
                # Ask a rank to profile itself because of a new verdict.
                if self._ask is not None:
                    if self._orders is None:  # count the looks of earlier starts by the traces that they left
                        traces = [read_object(path)["order"] for path in sorted(self._run.looks_folder.glob("*.json"))]
                        self._orders = [read_record(LookOrder, order) for order in traces if isinstance(order, dict)]
                    if (order := next_look(one, self._reader.shape.nodes, self._orders)) is not None:
                        self._orders.append(order)
                        self._ask(order)
            # Once a look has found the line of code, report the verdict again.
            elif place in self._reported and one.code and not self._reported[place].code:
                self._reported[place] = one
                self._write(one, report, is_over=False)
        for place in [place for place in self._reported if place not in going_on]:
            known = self._reported.pop(place)
            ended = found.get(place) or replace(known, until_step=self._reader.step)
            self._write(ended, report, is_over=True)

    def _write(self, verdict: RunVerdict, report: Callable[[VerdictEvent], None], *, is_over: bool) -> None:
        assert self._reader is not None, "events were read before"
        event = VerdictEvent(step=self._reader.step, is_over=is_over, verdict=verdict)
        writer = EventWriter(self._run.verdicts, SUPERVISOR)
        writer.write(event)
        writer.close()
        report(event)
