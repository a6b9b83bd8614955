"""What each step of a disturbed run meets, whoever decides, and the best that could be made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainspec_cli.scheduler.cluster import Condition
from trainspec_cli.scheduler.disturbance import Disturbance, Leave, groups_of_node
from trainspec_cli.scheduler.ideal import Ideal, best_step
from trainspec_cli.scheduler.job import DisturbedJob, seconds_of, take


@dataclass(frozen=True)
class Situation:
    """The circumstances of a step, whoever decides."""

    condition: Condition
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
        job, events = self._job, [self._events[number] for number in holding]
        away = {
            group
            for event in events
            if isinstance(event, Leave)
            for group in groups_of_node(event.node, job.num_nodes, len(job.groups))
        }
        present = tuple(group for group in range(len(job.groups)) if group not in away)
        condition = job.cluster.condition(events)
        portions = job.portions((1.0,) * len(present))
        even_s = seconds_of(job, condition, present, take(portions, [job.even] * len(present))).total_s
        samples = portions[0].step_samples
        return Situation(condition, present, samples, even_s, self._ideal(condition, present, samples, even_s, holding))

    def _ideal(
        self, condition: Condition, present: Sequence[int], samples: int, even_s: float, holding: Sequence[int]
    ) -> Ideal:
        """An undisturbed run is taken to be planned well."""
        if not holding:
            return Ideal(even_s, even_s)
        job = self._job
        best = best_step(
            job.cluster,
            condition,
            [job.groups[group] for group in present],
            samples,
            job.even,
            job.largest_micro_batch,
            keeps_micro_batches=job.keeps_micro_batches,
        )
        return Ideal(min(even_s, best.whole_s), min(even_s, best.whole_s, best.real_s))
