"""The situation that each step of a disturbed run meets, whoever decides, and the best that could be made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainspec_cli.balance.disturbance import Disturbance, Event, Leave, groups_of_node
from trainspec_cli.balance.ideal import Ideal, best_step
from trainspec_cli.balance.job import DisturbedJob, seconds_of, take


@dataclass(frozen=True)
class Situation:
    """The circumstances of a step, whoever decides."""

    events: tuple[Event, ...]
    """Events that are felt."""
    present: tuple[int, ...]
    """These replica groups take part."""
    samples: int
    even_s: float
    ideal: Ideal


class Situations:
    def __init__(self, job: DisturbedJob, disturbance: Disturbance):
        self._job, self._events = job, disturbance.events
        self._known: dict[tuple[int, ...], Situation] = {}

    def at(self, step: int) -> Situation:
        holding = tuple(number for number, event in enumerate(self._events) if event.holds(step))
        if holding not in self._known:
            self._known[holding] = self._describe(holding)
        return self._known[holding]

    def _describe(self, holding: Sequence[int]) -> Situation:
        job, events = self._job, tuple(self._events[number] for number in holding)
        away = {
            group
            for event in events
            if isinstance(event, Leave)
            for group in groups_of_node(event.node, job.num_nodes, len(job.groups))
        }
        present = tuple(group for group in range(len(job.groups)) if group not in away)
        portions = job.portions((1.0,) * len(present))
        taken = take(portions, [job.even] * len(present))
        even_s = seconds_of(job, job.cluster.condition(events), present, taken).total_s
        samples = portions[0].step_samples
        return Situation(events, present, samples, even_s, self._ideal(events, present, samples, even_s))

    def _ideal(self, events: Sequence[Event], present: Sequence[int], samples: int, even_s: float) -> Ideal:
        """Return the best of shares in the planned layout, in its best cut, and in the layout that is worth a change.
        A run is taken to be planned well: what another layout would win beyond an undisturbed step does not count."""
        if not events:
            return Ideal(even_s, even_s)
        own = _best_step(self._job, events, present, samples)
        least_s = self.at(0).even_s if self._job.layouts else 0.0  # no event holds before the first step
        others = [_best_step(job, events, present, samples) for job in self._others(events)]
        whole_s = min([own.whole_s, *(max(least_s, one.whole_s) for one in others)])
        real_s = min([own.real_s, *(max(least_s, one.real_s) for one in others)])
        return Ideal(min(even_s, whole_s), min(even_s, whole_s, real_s))

    def _others(self, events: Sequence[Event]) -> Iterator[DisturbedJob]:
        """Yield the job in its best cut and in its best other layout, where there are."""
        layouts, cluster = self._job.layouts, self._job.cluster
        paces, links = cluster.paces(events).tolist(), cluster.link_paces(events)
        if layouts is None or (max(paces) == min(paces) and links.is_usual):
            return
        if (counts := layouts.best_cut(paces, links)) and counts != self._job.layout.stage_layers:
            yield layouts.with_cut(counts)
        if proposal := layouts.propose(paces, links):
            yield layouts.with_layout(proposal)


def _best_step(job: DisturbedJob, events: Sequence[Event], present: Sequence[int], samples: int) -> Ideal:
    return best_step(
        job.cluster,
        job.cluster.condition(events),
        [job.groups[group] for group in present],
        samples,
        job.even,
        job.largest_micro_batch,
        keeps_micro_batches=job.keeps_micro_batches,
    )
