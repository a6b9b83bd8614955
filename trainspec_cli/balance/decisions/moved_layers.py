"""Decide when layers move between pipeline stages: what the ranks' speeds would win, against what a change costs.

As with shares, the decision is a pure function of what all ranks know. It holds for all pipelines of a run at once,
since their ranks of one stage share its parameters; within what shares of the samples can still even out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median_low

from trainspec_cli.balance.batch.division import Division, largest_that_fits
from trainspec_cli.balance.decisions.balance import best_division, compute_s
from trainspec_cli.balance.decisions.ski_rental import SkiRental
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.plan.partition.cut import Counts, cut_by_times, cut_evenly, rank_times_s
from trainspec_cli.plan.partition.problem import LayerTimes, Room
from trainspec_cli.recipe.field_types import AUTO, AutoInt
from trainspec_cli.recipe.keys.layout import Layout

WORTHWHILE = 0.05
"""Layers move where that saves at least this fraction of the computing: planned times of layers are rough."""
PAUSE_STEPS, PAUSE_S = 0.5, 2.0
"""The time for which a change of layout holds a run up, until one has been measured. On CPUs changes took 0.03 to 0.08
of a step and the first step after them 0.2 of a step longer at most (`tests/bench/relayout.py`); connections between
many ranks, and a GPU's allocator, take longer."""

PipelineSpeeds = Sequence[Sequence[Speed | None]]
"""The speed of each pipeline rank, for each data-parallel rank; None: not known yet."""


def expected_pause_s(step_s: float) -> float:
    """Return the time for which a change of layout is taken to hold a run up whose steps take `step_s`."""
    return PAUSE_S + PAUSE_STEPS * step_s


@dataclass(frozen=True)
class LayerChange:
    """Another cut into stages, and what it is expected to save."""

    stage_layers: Counts
    before_s: float
    """The slowest rank's computing in a step as it is."""
    after_s: float
    """As it is expected to be, with the shares that are best then."""
    reason: str


class LayerScheduler:
    """Follows the speeds of the pipeline ranks, step by step."""

    def __init__(
        self,
        layout: Layout,
        times: LayerTimes,
        most_layers: int,
        even: Division,
        largest_micro_batch: int,
        change: float,
    ):
        """`times` are planned ones, in any unit. `most_layers`: that a pipeline rank may hold. `change`: ranks whose
        speed differs from the median by no more than this fraction are equally fast."""
        self._layout, self._times, self._change = layout, times, change
        self._even, self._largest = even, largest_micro_batch
        rows = [[1.0] * len(times.layers_s)] * layout.pp
        self._room = Room(rows, [float(most_layers)] * layout.pp)
        self._counts = layout.stage_layers or cut_evenly(len(times.layers_s), layout.num_stages)
        self._known: tuple[object, ...] | None = None
        self._wanted: LayerChange | None = None
        self._rental = SkiRental[Counts]()

    def note_step(
        self,
        samples: int,
        division: Division,
        speeds: PipelineSpeeds,
        remaining_steps: int,
        pause_s: float | None = None,
        steps: int = 1,
    ) -> LayerChange | None:
        """Take in that a step of so many samples, divided so, was made at these speeds; `pause_s` is what the last
        change of layout took, `steps` how many steps ago this was called before.

        Return the change that is to be made: once what was lost without it has come to what it costs (as in the
        ski-rental problem), and where the remaining steps win that back.
        """
        known = samples, division, tuple(map(tuple, speeds))
        if any(speed is None for row in speeds for speed in row):
            return None
        if known != self._known:
            measured = [[speed for speed in row if speed is not None] for row in speeds]
            self._known, self._wanted = known, self._consider(samples, division, measured)
        wanted = self._wanted
        if wanted is None:
            self._rental.forget()
            return None
        saved_s = wanted.before_s - wanted.after_s
        cost_s = expected_pause_s(wanted.before_s) if pause_s is None else pause_s
        pays = self._rental.note_steps(wanted.stage_layers, saved_s, cost_s, steps, remaining_steps)
        return wanted if pays else None

    def _consider(self, samples: int, division: Division, speeds: Sequence[Sequence[Speed]]) -> LayerChange | None:
        """Return the best cut, by the slowest rank of each stage or by their mean, where it is worth the change."""
        before_s = compute_s(division, samples, [_slowest(row, samples) for row in speeds], 0.0)
        found: dict[Counts, float] = {}
        # A stage waits for its slowest data-parallel rank, but samples move between those ranks: try the mean too.
        paces = self._paces(speeds, samples)
        for of_stages in (list(map(max, paces)), list(map(mean, paces))):
            counts = cut_by_times(self._times, self._layout, self._equalised(of_stages), self._room)
            if counts is not None and counts != self._counts:
                found[counts] = self._expected_s(counts, samples, speeds)
        if not found:
            return None
        best = min(found, key=lambda counts: found[counts])
        if found[best] >= before_s * (1 - WORTHWHILE):
            return None
        return LayerChange(best, before_s, found[best], self._describe(speeds, samples))

    def _paces(self, speeds: Sequence[Sequence[Speed]], samples: int) -> list[list[float]]:
        """Return for each pipeline rank the measured time over the planned one on each data-parallel rank."""
        planned = rank_times_s(self._times, self._counts, self._layout)
        share = samples / len(speeds)
        return [[row[rank].time_s(share, 1) / planned[rank] for row in speeds] for rank in range(self._layout.pp)]

    def _equalised(self, paces: Sequence[float]) -> list[float]:
        usual = median_low(paces)
        return [1.0 if abs(pace / usual - 1) <= self._change else usual / pace for pace in paces]

    def _expected_s(self, counts: Counts, samples: int, speeds: Sequence[Sequence[Speed]]) -> float:
        """Return the slowest rank's time with another cut, and the shares that are best then."""
        now, then = (rank_times_s(self._times, cut, self._layout) for cut in (self._counts, counts))
        rows = [
            _slowest([speed.scaled(new / old) for speed, old, new in zip(row, now, then, strict=True)], samples)
            for row in speeds
        ]
        return best_division(self._even, samples, rows, self._largest, 0.0).compute_s

    def _describe(self, speeds: Sequence[Sequence[Speed]], samples: int) -> str:
        paces = list(map(max, self._paces(speeds, samples)))
        usual = median_low(paces)
        odd = max(range(len(paces)), key=lambda rank: max(paces[rank] / usual, usual / paces[rank]))
        if abs(paces[odd] / usual - 1) <= self._change:
            return "the stages' measured times are not as even as their cut was planned"
        return f"pipeline rank {odd} takes {paces[odd] / usual:.2g} times the usual time for its layers"


def largest_stage(layout: Layout, num_layers: int, wanted: AutoInt, fits: Callable[[Layout], bool]) -> int | None:
    """Return the layers of the fullest pipeline rank that `fits`, wherever in the pipeline it is, up to `wanted`
    (`scheduler.max_stage_layers`); None where no layers move, for there is one rank, or each has several stages."""
    if layout.pp == 1 or layout.num_stages > layout.pp:
        return None
    most = num_layers - layout.pp + 1

    def all_fit(held: int) -> bool:
        others = cut_evenly(num_layers - held, layout.pp - 1)
        cuts = ((*others[:rank], held, *others[rank:]) for rank in range(layout.pp))
        return all(fits(replace(layout, stage_layers=cut)) for cut in cuts)

    usual = max(layout.stage_layers or cut_evenly(num_layers, layout.pp))
    return largest_that_fits(usual, most if wanted == AUTO else min(most, int(wanted)), all_fit)


def with_stages(layout: Layout, counts: Counts) -> Layout:
    """Return the layout with another cut; the even one has no list of layers, as the planner has it."""
    even = counts == cut_evenly(sum(counts), layout.num_stages)
    return replace(layout, stage_layers=None if even else counts)


def _slowest(row: Sequence[Speed], samples: int) -> Speed:
    """Ranks of one pipeline that work on the same samples are as slow as the slowest."""
    return max(row, key=lambda speed: speed.time_s(samples, 1))
