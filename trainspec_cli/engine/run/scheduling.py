"""The scheduler at work: every rank's speed travels with the step's own exchange, and shares change between steps.

All ranks see the same speeds and decide the same by the same function, so a directive needs no exchange of its own.
Rank 0 writes it down before it takes effect. A resumed run follows what stands there, at the same steps, and so
computes the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.policy.division import Division, OwnSamples, even_division
from trainspec_cli.policy.scheduling import (
    ShareChange,
    ShareScheduler,
    exchange_each_s,
    reporting_interval,
    samples_per_s,
)
from trainspec_cli.policy.speeds import SKIPPED_STEPS, Speed, SpeedTracker, slowest
from trainspec_cli.rundir.event_types import AchievedEvent, DirectiveEvent
from trainspec_cli.rundir.events import EventWriter, read_sound
from trainspec_cli.rundir.fields import read_record
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.results.plan import Plan

FIGURES = 4
"""Numbers that a rank reports in each step: its speed (fixed_s, per_sample_s), and how long it computed and waited for
exchanges in its last step."""
MEASURED_STEPS = 5
"""What a directive achieves is the median over so many steps."""


@dataclass
class Watched:
    """A directive whose effect is being measured."""

    directive: DirectiveEvent
    before_s: float
    skip: int = SKIPPED_STEPS
    seen_s: tuple[float, ...] = ()


class StepScheduler:
    """Called by every rank of the replica group together."""

    def __init__(
        self, plan: Plan, run_dir: RunDir, state: TrainState, journal: Journal | GroupJournal, group: int | None
    ):
        """`group`: the replica group, where there are several; their runs are not resumed to the bit, so none of their
        directives is followed again."""
        self._plan, self._run_dir, self._journal, self._group = plan, run_dir, journal, group
        self._mode = plan.spec.scheduler.mode
        self._even = even_division(plan.layout, plan.micro_batch_size)
        self._shares = ShareScheduler(
            self._even, largest_micro_batch(plan), keeps_micro_batches=plan.spec.model.unit == "samples"
        )
        self._rows = ranks_of_data(state)
        self._interval = reporting_interval(plan.group_size)
        self._tracker = SpeedTracker(plan.spec.scheduler.change)
        self._last_s = (0.0, 0.0)
        self._slowest_s: deque[float] = deque(maxlen=MEASURED_STEPS)
        self.rate = 0.0
        """Samples that the replica group computes a second by its confirmed speeds; 0 where they are not known."""
        self._due: tuple[ShareChange, int] | None = None
        """The change that the next step begins with, and the samples of the last one."""
        self._watched: Watched | None = None
        self._written = self._read() if self._mode != "off" and group is None else []
        self._writer: EventWriter | None = None

    def _read(self) -> list[DirectiveEvent]:
        """Return the directives of the run so far, as rank 0 reads them."""
        found = [
            event
            for event in read_sound(self._run_dir.directives)
            if isinstance(event, DirectiveEvent) and event.kind == "shares"
        ]
        plain = [to_plain(event) for event in found]
        return broadcast_json(plain, lambda lines: [read_record(DirectiveEvent, line) for line in lines])

    # Before a step

    def divide(self, step: int) -> Division:
        """Return how the samples of the step after update `step` are divided."""
        applied = [
            d for d in self._written if d.applied and d.step <= step and len(d.counts) == len(self._even.weights)
        ]
        if self._due is not None:
            self._give(step, *self._due)
            self._due = None
        elif applied and division_of(self._even, applied[-1]) != self._shares.division:
            self._shares.follow(division_of(self._even, applied[-1]))
        return self._shares.division if self._mode == "auto" else self._even

    def figures(self, step: int) -> list[float]:
        """Return what this rank reports in the exchange of the step after update `step`: `FIGURES` numbers, or none."""
        if self._mode == "off" or step % self._interval:
            return []
        speed = self._tracker.speed or Speed(0.0, 0.0)
        return [speed.fixed_s, speed.per_sample_s, *self._last_s]

    # After it

    def note_step(
        self, step: int, own: OwnSamples, parts_s: Mapping[str, float], samples: int, figures: Tensor
    ) -> None:
        """Take in where this rank's time of a step went, and the `figures` (ranks, `FIGURES`) of all ranks."""
        if self._mode == "off":
            return
        compute_s = parts_s["forward"] + parts_s["backward"]
        self._tracker.note(own.samples, len(own.sizes), compute_s)
        self._last_s = compute_s, parts_s["exposed_comm"]
        if not figures.numel():
            return
        reported = figures.tolist()
        micro_batches = len(own.sizes)
        exchange_s = exchange_each_s(self._plan.layout, min(waited_s for *_, waited_s in reported), micro_batches)
        self._measure(step, max(last_s for _, _, last_s, _ in reported) + micro_batches * exchange_s)
        counts = self._shares.division.counts(samples)
        known = [read_speed(*own_figures[:2]) for own_figures in reported]
        speeds = [slowest([known[rank] for rank in row], n) for row, n in zip(self._rows, counts, strict=True)]
        if self._mode == "auto":
            self.rate = samples_per_s(speeds)
        if any(d.applied and d.step > step for d in self._written):
            return  # what follows was decided before the run was resumed
        if change := self._shares.note_step(samples, speeds, exchange_s, self._interval):
            self._due = change, samples

    def _give(self, step: int, change: ShareChange, samples: int) -> None:
        division = change.division
        directive = DirectiveEvent(
            step=step,
            number=1 + max((d.number for d in self._written), default=0),
            applied=self._mode == "auto",
            counts=division.counts(samples),
            micro_batch_size=division.micro_batch_size,
            micro_batches=division.micro_batches,
            reason=change.reason,
            before_s=change.before_s,
            expected_s=change.after_s,
        )
        self._written.append(directive)
        self._write(directive)
        if directive.applied:
            self._watched = Watched(directive, median(self._slowest_s or [change.before_s]))

    def _measure(self, step: int, slowest_s: float) -> None:
        """The figures are those of the step before; the first ones after a change still bring the old shares'."""
        self._slowest_s.append(slowest_s)
        watched = self._watched
        if watched is None:
            return
        if watched.skip:
            watched.skip -= 1
            return
        watched.seen_s += (slowest_s,)
        if len(watched.seen_s) == MEASURED_STEPS:
            self._watched = None
            given = watched.directive
            self._write(
                AchievedEvent(
                    step=step,
                    number=given.number,
                    before_s=watched.before_s,
                    expected_s=given.expected_s,
                    achieved_s=median(watched.seen_s),
                )
            )

    def _write(self, event: DirectiveEvent | AchievedEvent) -> None:
        if dist.get_rank() != 0:
            return
        if self._group is not None and isinstance(event, DirectiveEvent):
            event = replace(event, group=self._group)
        self._writer = self._writer or EventWriter(self._run_dir.directives, rank=0)
        self._writer.write(event)
        self._journal.write(event)

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def largest_micro_batch(plan: Plan) -> int:
    """Return the samples that a rank may process together: what the recipe allows, else what memory does."""
    wanted = plan.spec.scheduler.max_micro_batch_size
    return (plan.largest_micro_batch_size or plan.micro_batch_size) if wanted == AUTO else int(wanted)


def division_of(even: Division, directive: DirectiveEvent) -> Division:
    """Return the division that a directive on shares asks for."""
    assert isinstance(directive.micro_batch_size, int) and isinstance(directive.micro_batches, int)
    return replace(
        even,
        weights=tuple(map(float, directive.counts)),
        micro_batch_size=directive.micro_batch_size,
        micro_batches=directive.micro_batches,
    )


def read_speed(fixed_s: float, per_sample_s: float) -> Speed | None:
    """Return a speed as it was reported; None for a rank that does not know its own yet."""
    return Speed(fixed_s, per_sample_s) if per_sample_s > 0 else None


def ranks_of_data(state: TrainState) -> list[list[int]]:
    """Return the ranks of each data-parallel rank: all that work on the same samples."""
    mesh = state.mesh.axes.mesh  # (pp, dp_replicate, dp_shard, cp, tp)
    rows = mesh.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    return [[int(rank) for rank in row] for row in rows.tolist()]
