"""The supervisor's part of the scheduler: track the speeds of a run's ranks, and propose another layout if a change
pays off.

The workers measure and report their speeds. The planner, which runs only here, finds the fastest layout at these
speeds. The workers switch to it between two steps (messages: `run/channel/messages.py`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Protocol

from trainspec_cli.balance.decisions.links import LinkPaces, LinkPaceTracker
from trainspec_cli.balance.decisions.other_layout import LayoutScheduler
from trainspec_cli.balance.decisions.ski_rental import patience_s
from trainspec_cli.balance.decisions.speeds import PaceTracker
from trainspec_cli.core.printable import format_duration
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.plan import LayoutProposal, Plan
from trainspec_cli.run.channel.messages import Proposal, SpeedsReport
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder.event_types.events import AchievedEvent, DirectiveEvent, Event, StartEvent, StepEvent
from trainspec_cli.run.folder.events import EventTail
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan

MEASURED_STEPS = 5
"""The current step time is the median over this many of the latest steps."""


class Layouts(Protocol):
    """The layouts that a run may use, including the current one and the planned one."""

    def after(self, layout: Layout, micro_batch_size: int) -> Layouts:
        """Return the same layouts with this one as the current layout."""

    def propose(self, paces: Sequence[float], links: LinkPaces) -> LayoutProposal | None:
        """Return the layout that is worth switching to, given the pace (slowdown) of each global rank; None if there is
        none. If all paces are 1, return the planned layout."""


def decides_layouts(plan: Plan) -> bool:
    """Return whether the scheduler may change the run's layout. Runs with replica groups or several sites keep their
    layout."""
    scheduler = plan.spec.scheduler
    alone = plan.replica_groups == 1 and not plan.spec.resilience.keeps_layout
    return scheduler.mode != "off" and "layout" in scheduler.may_change and alone and plan.world_size > 1


class LayoutAdvisor:
    """Proposes other layouts. Call `look` periodically. The search for layouts runs in a separate thread, and nothing
    waits for it."""

    def __init__(
        self,
        run: RunDir,
        plan: Plan,
        layouts: Callable[[Plan], Layouts],
        mail: WorkerMail,
        executor: Executor | None = None,
    ):
        """`layouts`: creates the search for other layouts of a plan. It is called when the first slow rank appears."""
        self._run = run
        self._plan = plan
        self._make = layouts
        self._executor = executor or ThreadPoolExecutor(1, "other layouts")
        self._events = EventTail(run.events(0))
        self._mail = mail
        self._speeds: SpeedsReport | None = None
        """The latest report that was processed."""
        self._number = 0
        self._home = plan
        """The plan whose layout the run returns to when all ranks and links are at their usual speed again."""
        self._layouts: dict[Layout, Layouts] = {}
        """The searches for other layouts, keyed by the layout that the run returns to."""
        self._timing = LayoutScheduler(patience_s(plan.spec.scheduler.mode))
        self._is_over = False
        self._begin()

    def _begin(self) -> None:
        """Forget all measurements. Called when the workers start again, because they may run on other devices at other
        speeds."""
        spec = self._plan.spec
        self._paces = PaceTracker(spec.scheduler.change)
        domain_ranks = spec.cluster.scaleup_devices or self._plan.devices_per_node
        self._links = LinkPaceTracker(spec.scheduler.change, domain_ranks)
        self._in_force: Layout | None = None
        """Layout in the last report; None after a change until the next report."""
        self._changed_to: Layout | None = None
        """The layout adopted by the latest change since this start."""
        self._wanted: Callable[[], LayoutProposal | None] | None = None
        """The next search to be run in the search thread."""
        self._searching: Future[LayoutProposal | None] | None = None
        self._proposed: Layout | None = None
        """The layout proposed last, until it takes effect or is rejected."""
        self._watched: DirectiveEvent | None = None
        """The change whose effect is being measured."""
        self._is_usual = True
        """True if all ranks and links have their usual speed."""
        self._home_s = math.inf
        """Measured step time in the planned layout at usual speeds."""
        self._lost: AchievedEvent | None = None
        """The measured effect of the change to the current layout, if the change was not an improvement."""
        self._step = 0
        self._new_steps = 0
        self._step_s: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._pause_s: float | None = None
        self._timing.want(None)

    def look(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Process new events and reports, and send a proposal if one is due. The run does not depend on this: if it
        fails, the error is passed to `report`, and no more layouts are proposed."""
        if self._is_over:
            return
        try:
            for event in self._events.read():
                self._process(event)
            speeds = self._mail.speeds
            if speeds is not None and speeds is not self._speeds:
                self._speeds = speeds
                self._process_speeds(speeds)
            if self._searching is not None and self._searching.done():
                found = self._searching.result()
                self._searching = None
                if self._wanted is None:  # otherwise speeds have changed since the search, and the next search decides
                    self._timing.want(found)
            if self._searching is None and self._wanted is not None:
                self._searching = self._executor.submit(self._wanted)
                self._wanted = None
            self._propose()
        except Exception as error:  # not even a bug in the search may end the training
            self._is_over = True
            report(f"the search for other layouts failed: {type(error).__name__}: {error}")

    # Process the workers' events

    def _process(self, event: Event) -> None:
        match event:
            case StartEvent():
                if event.world_size != self._plan.world_size:  # because a node was dropped
                    self._plan = self._home = read_plan(self._run)
                    self._layouts.clear()
                self._begin()
            case StepEvent():
                self._step = event.step
                self._new_steps = self._new_steps + 1
                self._step_s.append(event.step_time_s - event.time_s.get("checkpoint", 0.0))
            case DirectiveEvent(kind="layers" | "layout"):
                if event.applied:
                    self._watched = event if event.layout == self._proposed else None
                    self._pause_s = event.pause_s or None
                    self._in_force = self._wanted = self._searching = self._proposed = self._lost = None
                    self._changed_to = event.layout or None
                    self._new_steps = 0
                    self._step_s.clear()
                    self._timing.want(None)
                elif self._plan.spec.scheduler.mode == "auto" and event.layout == self._proposed:
                    self._timing.refuse(_layout(event.layout))
                    self._proposed = None
            case AchievedEvent() if self._watched and event.number == self._watched.number:
                # A layout whose measured step time was no improvement is not proposed again, and `_consider_home`
                # returns to the planned one.
                layout = _layout(self._watched.layout)
                self._watched = None
                if event.achieved_s >= event.before_s and not _is_alike(layout, self._home.layout):
                    self._lost = event
                    self._timing.refuse(layout)

    # Find the best layout for the reported speeds

    def _process_speeds(self, report: SpeedsReport) -> None:
        if self._changed_to not in (None, report.layout):
            return  # the report is from before the change
        paces = self._paces.note(report.layout, report.even_s)
        links = self._links.note(report.layout, report.links)
        self._in_force, self._is_usual = report.layout, set(paces) == {1.0} and links.is_usual
        # After a layout change that the recipe schedules, the new layout is the planned one.
        planned = [change for change in self._plan.changes if _is_alike(change.layout, report.layout)]
        if planned and not self._is_home:
            self._home = self._plan.with_layout(planned[-1])
            self._home_s = math.inf
        self._wanted = self._searching = None
        if self._is_usual and (self._is_home or self._home_s < math.inf):
            self._timing.want(None)
        else:
            self._wanted = partial(self._find, self._home, report, paces, links)

    @property
    def _is_home(self) -> bool:
        return self._in_force is not None and _is_alike(self._in_force, self._home.layout)

    def _find(
        self, home: Plan, report: SpeedsReport, paces: Sequence[float], links: LinkPaces
    ) -> LayoutProposal | None:
        """Return the layout that is worth switching to. Called in the search thread."""
        layouts = self._layouts.get(home.layout) or self._layouts.setdefault(home.layout, self._make(home))
        # Assume even sample shares, because the search finds the shares itself.
        even = math.ceil(sum(report.samples) / len(report.samples))
        return layouts.after(report.layout, math.ceil(even / report.micro_batches)).propose(paces, links)

    def _propose(self) -> None:
        """Send the pending proposal to rank 0."""
        steps = self._new_steps
        self._new_steps = 0
        if not steps or self._in_force is None:
            return
        step_s = median(self._step_s)
        if self._is_usual and self._is_home and len(self._step_s) == MEASURED_STEPS:
            self._home_s = min(self._home_s, step_s)
        self._consider_home(step_s)
        due = self._timing.note_steps(steps, step_s, self._plan.total_steps - self._step, self._pause_s)
        if due is not None:
            self._number = self._number + 1
            self._proposed = due.layout
            self._mail.send(Proposal(self._number, self._in_force, due), rank=0)

    def _consider_home(self, step_s: float) -> None:
        """Request a return to the planned layout if its measured steps were faster than those of the current one
        (`step_s`)."""
        layout = self._in_force
        home = self._home.layout.describe()
        if layout is None or self._is_home:
            return
        if self._lost is not None:
            expected_s = self._lost.before_s
            was_s = format_duration(self._lost.before_s)
            reason = (
                f"a step takes {format_duration(step_s)} in {layout.describe()}; before that change it took {was_s}"
            )
        elif self._is_usual and self._home_s < math.inf:
            expected_s = self._home_s
            reason = f"all ranks have their usual speed again; the planned layout is {home}"
        else:
            return
        self._timing.want(_home(self._home, step_s, expected_s, reason) if expected_s < step_s else None)


def _home(plan: Plan, step_s: float, expected_s: float, reason: str) -> LayoutProposal:
    return LayoutProposal(
        layout=plan.layout,
        micro_batch_size=plan.micro_batch_size,
        grad_accum_steps=plan.grad_accum_steps,
        largest_micro_batch_size=plan.largest_micro_batch_size or plan.micro_batch_size,
        largest_stage_layers=plan.largest_stage_layers,
        before_s=step_s,
        expected_s=expected_s,
        reason=reason,
    )


def _is_alike(one: Layout, other: Layout) -> bool:
    """Return whether two layouts differ at most in how they split the layers into stages."""
    return replace(one, stage_layers=other.stage_layers) == other


def _layout(layout: Layout | Absent) -> Layout:
    assert isinstance(layout, Layout), "a layout change names a layout"
    return layout
