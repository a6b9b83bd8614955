"""Step times of a layout on ranks with measured speeds, given the best sample shares and layer split, and a lower bound
on these times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trainspec_cli.balance.batch.division import Division, even_division
from trainspec_cli.balance.cluster import Cluster, Condition, Floats
from trainspec_cli.balance.decisions.balance import best_division
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.planner.pipeline import Counts, LayerTimes, Room, cut_by_times
from trainspec_cli.planner.search.search import Steps
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.samples import StepParts, Tier, assemble_parts, fixed_part_s
from trainspec_cli.planner.time.step import PASSES, MicroBatch, planned_times, recompute_part_s, waiting_share
from trainspec_cli.recipe.keys.layout import Layout


@dataclass(frozen=True)
class PacedStep:
    """A step on ranks with measured speeds."""

    setup: Setup
    """The layout, including its split into stages."""
    division: Division
    step_s: float
    largest_micro_batch: int
    """Maximum number of samples in a micro-batch, for the division."""


class Paces:
    """Slowdown of each global rank's compute and exchanges."""

    def __init__(self, paces: Sequence[float], links: LinkPaces | None = None):
        """`links`: slowdown of exchanges; without it, exchanges take their usual time."""
        usual = (1.0,) * len(paces)
        self.compute, self.links = tuple(paces), links or LinkPaces(usual, usual)
        self._by_part = {
            part: np.asarray(of_ranks, float) for part, of_ranks in [("compute", paces), *vars(self.links).items()]
        }
        self._grids: dict[tuple[str, int, int], Floats] = {}
        self._rows: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    def grid(self, layout: Layout, part: Literal["compute"] | Tier = "compute") -> Floats:
        """Return the pace of each pipeline and data-parallel rank, as (pp, dp). Ranks that share the work on the same
        samples (in tensor and context parallelism) are as slow as the slowest of them."""
        key = part, layout.pp, layout.tp * layout.cp
        if key not in self._grids:
            self._grids[key] = self._by_part[part].reshape(layout.pp, -1, key[2]).max(2)
        return self._grids[key]

    def condition(self, layout: Layout, parts: StepParts) -> Condition:
        """Return the slowdown of each part of a step."""
        return Condition(
            compute=self.grid(layout),
            scaleup=self.grid(layout, "scaleup"),
            network=self.grid(layout, "network"),
            sends=self.grid(layout, parts.sends_tier).max(0),
            gradients=float(self.grid(layout, parts.gradients_tier).max()),
        )

    def rows(self, layout: Layout) -> tuple[Floats, Floats, Floats]:
        """Return the distinct kinds of data-parallel ranks: the sum of their pipeline ranks' speeds, the smallest of
        their paces, and the number of ranks of each kind."""
        key = layout.pp, layout.tp * layout.cp
        if key not in self._rows:
            grid = self.grid(layout)
            kinds = np.stack([(1 / grid).sum(0), grid.min(0)])
            found, numbers = np.unique(kinds, axis=1, return_counts=True)
            self._rows[key] = found[0], found[1], numbers.astype(float)
        return self._rows[key]


class PacedSteps:
    """The planner's `steps` on ranks with measured speeds, with `samples` samples per step."""

    def __init__(self, steps: Steps, samples: int, *, keeps_micro_batches: bool):
        """`keeps_micro_batches`: the result of a step depends on which samples share a micro-batch (batch norm)."""
        self._steps = steps
        self._samples = samples
        self._keeps = keeps_micro_batches
        self._planned_s: dict[tuple[Layout, float], float] = {}

    def best(self, setup: Setup, paces: Paces, largest: int) -> PacedStep:
        """Return the step in the setup's layout and layer split, with the best sample shares in micro-batches of at
        most `largest` samples. It is never shorter than a step with the planned split on ranks running at their usual
        speed."""
        layout = setup.layout
        fabric = setup.fabric
        parts = assemble_parts(setup, *self._once_and_twice(setup), self._steps.eff)
        cluster = Cluster(parts, layout, fabric.num_devices // fabric.devices_per_node, fabric.devices_per_node, 1)
        condition = paces.condition(layout, parts)
        ranks = layout.data_parallel_size
        even = even_division(layout, int(setup.micro_batch_size), keeps_micro_batches=self._keeps)
        number = even.count_micro_batches(self._samples)
        fixed_s, each_s = cluster.lines(condition, number, self._samples / ranks)
        # Ranks of equal speed share one object, because even thousands of ranks have only a few distinct speeds.
        kinds, places = np.unique(np.stack([(fixed_s / number), each_s]), axis=1, return_inverse=True)
        known = [Speed(fixed, each) for fixed, each in kinds.T.tolist()]
        speeds = [known[place] for place in places.ravel().tolist()]
        # The live scheduler would choose the same division at these speeds, because it calls the same function.
        division = best_division(
            even, self._samples, speeds, largest, parts.gradients_each_s, keeps_micro_batches=self._keeps
        ).division
        counts = np.array(division.counts(self._samples), float)
        turns = np.full(ranks, float(division.count_micro_batches(self._samples)))
        step_s = cluster.seconds(condition, counts, turns, in_step=even.in_step).total_s
        # The linear model has a small error. Without this lower limit, an undisturbed run might appear to gain from a
        # change.
        uncut = replace(setup, layout=replace(layout, stage_layers=None))
        return PacedStep(setup, division, max(step_s, self.planned_s(uncut)), largest)

    def cuts(self, setup: Setup, paces: Paces, room: Room) -> Iterator[Counts]:
        """Yield the best layer splits with one stage per rank, judged by the slowest rank of each stage and by the
        mean."""
        grid = paces.grid(setup.layout)
        times = self.layer_times(setup)
        for own in (grid.max(1), grid.mean(1)):
            if counts := cut_by_times(times, setup.layout, (1 / own).tolist(), room):
                yield counts

    def layer_times(self, setup: Setup) -> LayerTimes:
        """Return the planned times of a micro-batch in each layer, the embedding and the head."""
        return planned_times(self._steps.micro_batch(setup), setup)

    def _once_and_twice(self, setup: Setup) -> tuple[MicroBatch, MicroBatch]:
        """Return the step times of a micro-batch with the setup's size, and of one with twice that size."""
        twice = replace(setup, micro_batch_size=2 * setup.micro_batch_size)
        return self._steps.micro_batch(setup), self._steps.micro_batch(twice)

    def bound_s(self, setup: Setup, paces: Paces, largest: int) -> float:
        """Return a lower bound on the duration of a step in seconds in the setup's layout, for any layer split and any
        sample shares: the compute of all ranks together, without waits, in micro-batches of `largest` samples."""
        compute_s, comm_s = self._least_each_s(setup, largest)
        speeds, least, numbers = paces.rows(setup.layout)
        rates = np.minimum(speeds / compute_s, setup.layout.pp / (least * compute_s + comm_s))
        return self._samples / float((numbers * rates).sum()) * (1 + waiting_share(setup, self._steps.eff))

    def planned_s(self, setup: Setup) -> float:
        """Return the step time in seconds that the planner predicts for ranks running at their usual speed. If the
        setup does not specify a layer split, layers are divided as if all took the same time."""
        key = setup.layout, setup.micro_batch_size
        if key not in self._planned_s:
            self._planned_s[key] = self._steps.step_s(setup)
        return self._planned_s[key]

    def _least_each_s(self, setup: Setup, largest: int) -> tuple[float, float]:
        """Return the minimum times of a sample's forward and backward pass through the full model: the compute time,
        and the time of exchanges in layers."""
        once, twice = self._once_and_twice(setup)
        size = setup.micro_batch_size
        most = max(largest, setup.micro_batch_size)
        compute_s = comm_s = 0.0
        parts = [
            (before[-1], one, two, True) for before, one, two in zip(once.before, once.kinds, twice.kinds, strict=True)
        ]
        # Embedding and head are not recomputed in the backward pass.
        parts += [(1, once.embedding, twice.embedding, False), (1, once.head, twice.head, False)]
        for number, one, two, again in parts:
            once_s, twice_s = (
                part.forward + part.backward + (recompute_part_s(part, setup.recompute) if again else 0.0)
                for part in (one, two)
            )
            compute_s += number * _least_s(once_s, twice_s, size, most)
            for axis, passes in PASSES.items():
                once_s, twice_s = (passes * getattr(part, axis) for part in (one, two))
                comm_s += number * _least_s(once_s, twice_s, size, most)
        return compute_s, comm_s


def _least_s(once_s: float, twice_s: float, size: float, most: float) -> float:
    """Return a lower bound on the time of a sample in micro-batches of `most` samples, from the line through the times
    of `size` and twice as many samples."""
    return once_s / size - fixed_part_s(once_s, twice_s) * (1 / size - 1 / most)


def describe(paces: Paces, before: PacedStep, found: PacedStep) -> str:
    """Explain why another layout is faster, for example `the computation of rank 5 takes 2.1 times as long as usual; as
    tp=2 dp_shard=4, 2 instead of 8 ranks wait for it in every layer`."""
    ways = [
        ("the computation of rank {} takes", paces.compute),
        ("the exchanges of rank {} inside its scale-up domain take", paces.links.scaleup),
        ("the exchanges of rank {} between scale-up domains take", paces.links.network),
    ]
    odds = [_describe_odd(what, of_ranks) for what, of_ranks in ways if set(of_ranks) != {1.0}]
    odd = odds[0][0]  # name the rank that differs most; compute comes before exchanges
    before_layout = before.setup.layout
    layout = found.setup.layout
    waiting = (before_layout.tp * before_layout.cp, layout.tp * layout.cp)
    row = odd // (layout.tp * layout.cp) % layout.data_parallel_size
    share = found.division.weights[row] * layout.data_parallel_size / sum(found.division.weights)
    effects = []
    if waiting[1] < waiting[0]:
        effects.append(f"{waiting[1]} instead of {waiting[0]} ranks wait for it in every layer")
    if share < 1:
        effects.append(f"its share of the samples shrinks to {share:.0%} of an even one")
    if layout.stage_layers and layout.num_stages == layout.pp:
        rank = odd // (layout.world_size // layout.pp)
        effects.append(f"its stage has {layout.stage_layers[rank]} of {sum(layout.stage_layers)} layers")
    why = "; ".join(effects) or "it delays a smaller part of a step"
    return f"{' and '.join(text for _, text in odds)}; as {layout.describe()}, {why}"


def _describe_odd(what: str, paces: Sequence[float]) -> tuple[int, str]:
    odd = max(range(len(paces)), key=lambda rank: max(paces[rank], 1 / paces[rank]))
    slow = sum(pace > 1 for pace in paces)
    pace = paces[odd]
    others = f", and {slow - 1:,} more are slow" if slow > 1 else ""
    return odd, f"{what.format(odd)} {pace:{'.2g' if pace < 100 else ',.0f'}} times as long as usual{others}"
