"""A simulated run and the supervisor of a real one see the same speeds, and change to the same layouts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from balance.test_advisor import AtOnce, a_plan
from balance.test_simulated_layouts import SLOW, TENSOR, job_of, run
from lab.events import DIRECTIVE, stepped, write_event

from trainspec_cli.balance import live, live_layouts
from trainspec_cli.balance.advisor import LayoutAdvisor
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.decisions.speeds import PaceTracker
from trainspec_cli.balance.job import JobLayouts, RankCounts
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.results.plan import LayoutProposal, Plan
from trainspec_cli.run.channel.messages import SpeedsReport
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.paths import RunDir

LAG_STEPS = 3
"""The supervisor reads a report, then the result of its search, a step later each."""


class Found:
    """The layouts that the simulated run knows, as the supervisor asks for them."""

    def __init__(self, layouts: JobLayouts):
        self._layouts = layouts

    def after(self, layout: Layout, micro_batch_size: int) -> Found:
        return Found(replace(self._layouts, others=self._layouts.others.after(layout, micro_batch_size)))

    def propose(self, paces: Sequence[float], links: LinkPaces) -> LayoutProposal | None:
        step = live_layouts.STEP
        return self._layouts.propose(tuple(round(pace / step) * step for pace in paces), links)


class Supervisor:
    """The advisor of a run that makes the steps of the simulated one."""

    def __init__(self, folder: Path, plan: Plan, layouts: JobLayouts):
        self.run = RunDir(folder)
        self.mail = WorkerMail()
        self.advisor = LayoutAdvisor(self.run, plan, lambda _: Found(layouts), self.mail, AtOnce())
        self.proposed: list[tuple[int, Layout]] = []
        self.changes: list[DirectiveEvent] = []
        """Changes of the simulated run that the supervisor has not seen yet."""
        self.reported: tuple[Layout, list[str]] | None = None

    def report(self, step: int, step_s: float, layout: Layout, taken: RankCounts, times_s: Sequence[float]) -> None:
        """Report the ranks' speeds, as rank 0 does: when they have changed."""
        reported = layout, [f"{time_s:.2g}" for time_s in times_s]
        if self.reported == reported:
            return
        self.reported = reported
        ranks = len(times_s)
        samples = sum(taken.counts) // len(taken.counts)
        self.mail.speeds = SpeedsReport(
            step=step,
            step_s=step_s,
            layout=layout,
            micro_batches=taken.micro_batches,
            samples=(samples,) * ranks,
            fixed_s=(0.0,) * ranks,
            per_sample_s=tuple(time_s / samples for time_s in times_s),
        )

    def make_step(self, step: int, step_s: float) -> None:
        if self.changes and step >= self.changes[0].step + LAG_STEPS:
            write_event(self.run.events(0), self.changes.pop(0))
        write_event(self.run.events(0), replace(stepped(step), step_time_s=step_s))
        self.advisor.look(pytest.fail)
        for message, _ in self.mail.unsent:
            self.proposed.append((step, message.proposal.layout))  # type: ignore[union-attr]
        self.mail.unsent.clear()

    def change(self, step: int, before: Layout, after: Layout, pause_s: float) -> None:
        change = replace(DIRECTIVE, step=step, kind="layout", before=before, layout=after, pause_s=pause_s)
        self.changes.append(change)


@pytest.mark.parametrize(
    ("planned", "slow"),
    [
        pytest.param(TENSOR, SLOW, id="a slow rank"),
        pytest.param(TENSOR, replace(SLOW, steps=120), id="one that recovers", marks=pytest.mark.slow),
    ],
)
def test_the_supervisor_proposes_what_the_simulated_run_changes_to(
    planned: LayoutSpec, slow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(planned, "layout")
    assert job.layouts is not None
    plan = replace(a_plan(steps=320), layout=job.layout, num_nodes=job.num_nodes, devices_per_node=8)
    supervisor = Supervisor(tmp_path, plan, job.layouts)
    changed: list[tuple[int, Layout]] = []
    times: list[tuple[Layout, Sequence[float]]] = []

    class Paces(PaceTracker):
        def note(self, layout: Layout, times_s: Sequence[float]) -> tuple[float, ...]:
            times.append((layout, times_s))
            return super().note(layout, times_s)

    class Both(live_layouts.LiveLayouts):
        def begin_step(self) -> live_layouts.Moved | None:
            before = self._job.layout
            moved = super().begin_step()
            if moved is not None:
                supervisor.change(self.step, before, moved.job.layout, moved.pause_s)
                changed.append((self.step, moved.job.layout))
            return moved

        def note_step(self, step: int, group: Any, taken: RankCounts, seconds: Any) -> None:
            self.step = step
            times.clear()
            super().note_step(step, group, taken, seconds)
            if times:
                layout, times_s = times[-1]
                supervisor.report(step, seconds.total_s, layout, taken, times_s)
            supervisor.make_step(step, seconds.total_s)

        step = 0

    monkeypatch.setattr(live_layouts, "PaceTracker", Paces)
    monkeypatch.setattr(live, "LiveLayouts", Both)
    run(job, slow_devices=(slow,), noise=0.0)
    assert changed, "a slow rank leads to another layout"
    assert [layout for _, layout in supervisor.proposed] == [layout for _, layout in changed]
    lags = [proposed - step for (proposed, _), (step, _) in zip(supervisor.proposed, changed, strict=True)]
    assert all(0 <= lag <= LAG_STEPS for lag in lags)
