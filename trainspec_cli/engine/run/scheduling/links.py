"""Measure link speeds by mesh axis, in sampled steps, and exchange the measurements in the steps after them.

Like the ranks' speeds, a sample's measurements are sent with the exchange that every step needs for its loss. Rank 0
computes the link speeds, and announces the next sample in the following step's exchange. The next sample comes soon if
a link or the step time has changed. Otherwise, the highest cost on any rank limits how often links are sampled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from trainspec_cli.balance.decisions.links import (
    FIRST_SAMPLE_STEPS,
    AxisLinks,
    LinkSpeed,
    SampleTimes,
    Transfer,
    sampling_interval,
)
from trainspec_cli.balance.decisions.shares import reporting_interval
from trainspec_cli.engine.digest import MicroBatch, Span, elapsed_s
from trainspec_cli.engine.observe.links import GROUPS, LinkSample
from trainspec_cli.engine.parallel.pipeline import neighbours, time_messages
from trainspec_cli.engine.run.step_report import LinkFigures
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.verdict import MeasuredLink
from trainspec_cli.run.folder.event_types.events import LinkEvent, LinkRate, LinksEvent

AHEAD, BACK = "pp", "pp back"
"""Axis names for a pipeline rank's messages to the next and the previous stage. A link connects two neighbours, in both
directions."""
REMEMBERED = 5
FIRST_WRITTEN, WRITTEN_SAMPLES = 8, 50
"""(first, interval): link speeds are recorded after `first` samples, then every `interval` samples, after a change, and
at the end."""


@dataclass(frozen=True)
class SampledStep:
    step: int
    exchanges: LinkSample
    messages: Mapping[str, Span | None]
    """Time of the message to each of this rank's neighbours in the pipeline."""
    message_bytes: int
    messaging: Span
    """The combined time of all messages in the sample."""


class StepLinks:
    """Called collectively by all ranks of the replica group. With `scheduler=off`, nothing is measured."""

    def __init__(self, run: TrainingRun, supervisor: SupervisorLink):
        """Find the links of the current layout. Each layout needs a new instance. In runs with replica groups, links
        are not reported to the supervisor."""
        plan = run.plan
        state = run.state
        self._run = run
        self._supervisor = supervisor
        self._links: dict[str, list[tuple[int, ...]]] = {}
        """The ranks of each link by axis: process groups, pairs of pipeline neighbours, and, with several replica
        groups, ranks with the same number in each group."""
        if plan.spec.scheduler.mode != "off":
            self._links |= state.mesh.links()
            layout = state.mesh.layout
            if layout.pp > 1:
                pipelines = state.mesh.axes.mesh.flatten(1).T.tolist()
                self._links[AHEAD] = [
                    (ranks[low], ranks[high]) for ranks in pipelines for low, high in neighbours(layout)
                ]
            if run.group is not None:
                self._links[GROUPS] = [(rank,) for rank in range(dist.get_world_size())]
        self._columns = [*self._links, *([BACK] if AHEAD in self._links else [])]
        change = plan.spec.scheduler.change
        self._axes = [AxisLinks(axis, links, change) for axis, links in self._links.items() if dist.get_rank() == 0]
        planned = plan.prediction.links if plan.prediction else ()
        self._planned = {link.axis: link.bytes_per_s for link in planned}
        self._due: int | None = None
        """Number of updates after which the next sampled step begins."""
        state.links.is_due = lambda step: step == self._due
        self._is_sampled = False
        """True if the current step is sampled."""
        self._on_gpu = state.clock.on_gpu
        self._delay_steps = int(self._on_gpu and run.group is None)
        """Number of steps that begin between the end of a step and its `note_step` call."""
        self._sampled: SampledStep | None = None
        """The last sampled step."""
        self._reported_step = 0
        self._is_report_sent = False
        self._is_announced = False
        """True between the end of a step whose exchange contained reports, or rank 0's announcement, and its
        `note_step` call."""
        self.report: LinkFigures | None = None
        """This rank's part of the next step's report; None if there is no sample."""
        self.steps_to_sample = 0
        """Number of steps until the next sample, as rank 0 will announce in the next step's exchange; 0 for no
        announcement, and on all other ranks."""
        self._times = SampleTimes(change)
        self._steps_s, self._costs_s = deque[float](maxlen=REMEMBERED), deque[float](maxlen=REMEMBERED)
        self._learning_s = 0.0
        self._samples = 0
        self._supervisor.links = ()
        self._confirmed = list[list[LinkSpeed]]()

    def begin(self, step: int) -> None:
        """Begin the step after update `step`; called again if the step is repeated."""
        if not self._links:
            return
        is_unread = self._sampled is not None and step <= self._sampled.step
        is_pending = self.report is not None or self._is_report_sent or is_unread
        if self._due is None or (step > self._due and not is_pending):
            self._due = step + FIRST_SAMPLE_STEPS
        self._is_sampled = step == self._due
        self._run.state.links.begin(self._is_sampled)
        if self._run.state.sums is not None:
            self._run.state.sums.holds_back = self._is_sampled

    def finish(self, micro_batches: Sequence[MicroBatch]) -> None:
        """End the step."""
        if not self._links:
            return
        self._is_report_sent |= self.report is not None
        self._is_announced |= self.steps_to_sample > 0
        self.report = None
        self.steps_to_sample = 0
        exchanges = self._run.state.links.end()
        if not self._is_sampled:
            return
        assert self._due is not None, "the step is sampled"
        messages: dict[str, Span | None] = {}
        message_bytes = 0
        began = self._run.state.clock.mark()
        if AHEAD in self._links:
            stages = self._run.state.stages
            message = torch.zeros_like(stages.hidden.like(micro_batches[0][0]), device=self._run.state.device)
            message_bytes = message.nbytes
            with self._run.state.clock.collective():
                messages[AHEAD], messages[BACK] = time_messages(stages.layout, stages.lines, message)
        messaging = began, self._run.state.clock.mark()
        self._sampled = SampledStep(self._due + 1, exchanges, messages, message_bytes, messaging)
        if not self._on_gpu:
            self._read(self._sampled)

    def _read(self, sampled: SampledStep) -> None:
        """Prepare the report on a sampled step, for the next step's exchange."""
        of_axis = {axis: sampled.exchanges.transfer(axis) for axis in self._links}
        for way, span in sampled.messages.items():
            of_axis[way] = Transfer() if span is None else Transfer(sampled.message_bytes, elapsed_s(*span))
        cost_s = sampled.exchanges.cost_s + self._learning_s + elapsed_s(*sampled.messaging)
        transfers = tuple(of_axis[column] for column in self._columns)
        self.report = LinkFigures(transfers, cost_s, median(self._steps_s or [0.0]))
        self._reported_step = sampled.step

    def note_step(self, step: int, step_s: float, reported: Sequence[LinkFigures], steps_to_sample: int) -> None:
        """Record the step that made update `step`: its time, all ranks' link reports in it, and the next sample
        announced by rank 0."""
        if not self._links:
            return
        newest_step = step + self._delay_steps
        sampled = self._sampled
        is_sampled = sampled is not None and sampled.step == step
        if sampled is not None and is_sampled and self._on_gpu:
            self._read(sampled)
        if steps_to_sample:
            self._due = newest_step + steps_to_sample - 1
            self._is_announced = False
        if not is_sampled:
            self._steps_s.append(step_s)
        if not reported:
            # Request a sample if step times have changed and no sample is planned.
            is_measured = is_sampled or self.report is not None or self._is_report_sent
            is_coming = self._due in (step, newest_step) or self.steps_to_sample or self._is_announced
            if self._axes and not is_measured and not is_coming and self._times.note_step(step_s):
                self.steps_to_sample = 1
            return
        started_s = time.perf_counter()
        self._costs_s.append(max(one.cost_s for one in reported))
        steps_s = max(one.step_s for one in reported)
        self._is_report_sent = False
        if self._axes:
            self._learn(self._reported_step, reported)
            usual = sampling_interval(self._costs_s, steps_s)
            least = reporting_interval(len(reported), steps_s)
            is_undecided = any(axis.is_undecided for axis in self._axes)
            self.steps_to_sample = self._times.steps_to_next(usual, least, is_undecided=is_undecided)
        self._learning_s = time.perf_counter() - started_s

    def _learn(self, step: int, reported: Sequence[LinkFigures]) -> None:
        of_ranks = zip(*(one.transfers for one in reported), strict=True)
        by_column = dict(zip(self._columns, map(list, of_ranks), strict=True))
        has_changed = False
        for axis in self._axes:
            if axis.axis == AHEAD:  # a pipeline link has messages in both directions
                pairs = self._links[AHEAD]
                transfers = [[by_column[AHEAD][first], by_column[BACK][second]] for first, second in pairs]
            else:
                transfers = [[by_column[axis.axis][rank] for rank in ranks] for ranks in self._links[axis.axis]]
            change = axis.note(step, transfers)
            if change is not None:
                has_changed = True
                self._run.journal.write(
                    LinkEvent(
                        step=step,
                        since_step=change.since_step,
                        axis=axis.axis,
                        ranks=change.ranks,
                        before_bytes_per_s=change.before_bytes_per_s,
                        now_bytes_per_s=change.now_bytes_per_s,
                        changed_links=change.links,
                        group=self._run.group_field,
                    )
                )
        self._samples += 1
        confirmed = [axis.confirmed for axis in self._axes]
        if self._run.group is None and confirmed != self._confirmed:
            self._confirmed = confirmed
            self._supervisor.links = tuple(
                MeasuredLink(
                    axis=axis.axis,
                    ranks=link.ranks,
                    bytes_per_s=link.bytes_per_s,
                    noise=link.noise,
                    sent_bytes=link.sent_bytes,
                )
                for axis, links in zip(self._axes, confirmed, strict=True)
                for link in links
            )
        if has_changed or self._samples == FIRST_WRITTEN or self._samples % WRITTEN_SAMPLES == 0:
            self.write_speeds(step)

    def write_speeds(self, step: int) -> None:
        """Record the speed of the slowest link of each axis, if known."""
        rates = tuple(
            LinkRate(
                axis=one.axis,
                links=len(one),
                planned_bytes_per_s=self._planned.get(one.axis, ABSENT),
                **vars(one.slowest),
            )
            for one in self._axes
            if one.slowest is not None
        )
        if rates:
            self._run.journal.write(LinksEvent(step=step, links=rates, group=self._run.group_field))
