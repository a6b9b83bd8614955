"""Tries sizes of the buckets in which gradients are summed, in a run's first steps, and keeps the best.

What a step has waited for gradients travels with the exchange that the next step makes for its loss. A size changes no
bit of the sums, so that a run may try them whatever `scheduler.mode` is, but for off.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from trainspec_cli.balance.decisions.buckets import WARM_STEPS, BucketTries, sizes_to_try
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.parallel.gradient_sums import GradientSums
from trainspec_cli.engine.run.scheduling.directives import Directives
from trainspec_cli.engine.run.step_report import BucketFigures
from trainspec_cli.recipe.canonical import ABSENT
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.decisions import BucketsEvent, BucketTry


class StepBuckets:
    """Called by every rank of the replica group together. On a GPU, where FSDP2 sums each block's gradients, and where
    no two blocks' can go together, nothing is tried."""

    def __init__(self, plan: Plan, state: TrainState, directives: Directives, group: int | None):
        """Begin with the layout of `plan`, which is in force; another layout has its own sizes."""
        self._directives, self._group = directives, group
        self._sums, self._layout = state.sums, plan.layout.describe()
        self._planned_bytes = _planned_bytes(plan)
        self._tries: BucketTries | None = None
        self._warm_steps = 0
        self.report: BucketFigures | None = None
        """This rank's part of the next step's report; None where nothing is tried."""
        self._is_on = False
        if self._sums is None:
            return
        known = self._directives.buckets.get(self._layout)
        chosen = known if plan.spec.comm.bucket_bytes is None else plan.spec.comm.bucket_bytes
        self._sums.bucket_bytes = chosen or 0
        self._is_on = chosen is None and plan.spec.scheduler.mode != "off"

    def begin(self) -> None:
        """Begin a step, or begin it again."""
        if self._sums is not None and self._tries is not None and self._is_on:
            self._sums.bucket_bytes = self._tries.size

    def note_step(self, step: int, step_s: float, reported: Sequence[BucketFigures]) -> None:
        """Take in the step that made update `step` in `step_s`, and what all ranks reported of the one before it."""
        if not self._is_on or self._sums is None:
            return
        if reported:
            self._learn(step, reported, self._sums)
        self.report = None
        if self._sums.holds_back or not self._is_on:
            return  # a step that waits for each exchange, to show the links, says nothing
        sizes = self._sums.sizes_bytes if self._sums.can_join else []
        self.report = BucketFigures(
            self._sums.bucket_bytes, self._sums.waited_s, step_s, sum(sizes), max(sizes, default=0)
        )

    def _learn(self, step: int, reported: Sequence[BucketFigures], sums: GradientSums) -> None:
        if self._tries is None:
            self._warm_steps += 1
            if self._warm_steps < WARM_STEPS:
                return
            gradient_bytes = round(max(one.gradient_bytes for one in reported))
            block_bytes = round(max(one.largest_block_bytes for one in reported))
            sizes = sizes_to_try(gradient_bytes, block_bytes, self._planned_bytes)
            self._tries, self._is_on = BucketTries(sizes), bool(sizes)
            return
        waited_s, step_s = fmean(one.waited_s for one in reported), max(one.step_s for one in reported)
        self._tries.note(round(reported[0].bucket_bytes), waited_s, step_s)
        if self._tries.is_done:
            self._is_on, sums.bucket_bytes = False, self._tries.best
            self._settle(step, self._tries)

    def _settle(self, step: int, tries: BucketTries) -> None:
        usual = tries.usual_s
        self._directives.buckets[self._layout] = tries.best
        if len(usual) > 1:
            self._directives.note_buckets(
                BucketsEvent(
                    step=step,
                    layout=self._layout,
                    bucket_bytes=tries.best,
                    tries=tuple(BucketTry(size, usual[size]) for size in tries.sizes),
                    group=ABSENT if self._group is None else self._group,
                )
            )


def _planned_bytes(plan: Plan) -> float | None:
    """Return the blueprint's size for gradients, where there is one: of the axis over which they are summed first."""
    exchanges = plan.blueprint.exchanges if plan.blueprint else ()
    summed = (one for one in exchanges if one.operation in ("reduce_scatter", "all_reduce"))
    return next((one.bucket_bytes for one in summed if one.bucket_bytes is not None), None)
