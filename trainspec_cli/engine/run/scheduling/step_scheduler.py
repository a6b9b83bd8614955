"""The live scheduler of a run. Ranks report their speeds in each step's regular exchange, and sample shares change
between steps.

All ranks see the same speeds and decide with the same function, so a directive needs no additional exchange. Rank 0
records it before it takes effect. A resumed run follows the recorded directives at the same steps, so its results are
bitwise identical.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median

from trainspec_cli.balance.batch.batch import (
    EQUIVALENT_FRACTION,
    BatchPace,
    NoiseAverage,
    PartSquares,
    StepBatch,
    learning_rate,
    measure_noise,
    next_size,
    outgrows_noise,
    schedule_batches,
    step_batch,
)
from trainspec_cli.balance.batch.division import Division, OwnSamples, even_division_of, lr_factor
from trainspec_cli.balance.decisions.balance import LayerChange, LayerScheduler
from trainspec_cli.balance.decisions.shares import (
    ChangeCost,
    ShareChange,
    ShareScheduler,
    counts_updates,
    exchange_each_s,
    reporting_interval,
    samples_per_s,
)
from trainspec_cli.balance.decisions.ski_rental import patience_s
from trainspec_cli.balance.decisions.speeds import (
    CONFIRMING_STEPS,
    SETTLING_S,
    SKIPPED_STEPS,
    WARM_STEPS,
    BucketTries,
    Speed,
    SpeedTracker,
    computing_s,
    sizes_to_try,
    slowest,
)
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.parallel.gradient_sums import GradientSums
from trainspec_cli.engine.run.scheduling.directives import Directives, largest_stage_layers, watches_speeds
from trainspec_cli.engine.run.step_report import BucketFigures, SpeedFigures
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.planner.pipeline import LayerTimes
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.events import AchievedEvent, BucketsEvent, BucketTry, DirectiveEvent

# Determine the next steps' samples and learning rate according to the recipe's batch schedule.


class StepPace:
    """The schedule of samples and learning rate is the same on every rank, because they get the gradient noise in the
    steps' regular exchange."""

    def __init__(self, spec: RunSpec):
        self._spec = spec
        self._schedule = schedule_batches(spec)
        self.follows_noise = spec.batching.schedule.kind == "noise"
        self.state = BatchPace(spec.batching.global_batch_size, NoiseAverage())
        self._warned = False

    @property
    def kept(self) -> BatchPace | None:
        """Return the state that a checkpoint stores, so that a resumed run makes the same decisions."""
        return self.state if self.follows_noise else None

    def batch(self, progress: TrainProgress) -> StepBatch | None:
        """Return the step that begins at `progress`; None at the end of the run.

        With a constant batch size, the run's length is counted in steps, unless the recipe specifies tokens or epochs.
        Steps may have fewer samples while a replica group is absent.
        """
        if self._spec.ends_by_samples:
            size = self.state.size if self.follows_noise else None
            over = progress.samples >= self._schedule.run_samples
            return None if over else step_batch(self._schedule, progress.samples, size)
        if progress.step >= self._spec.train.max_steps:
            return None
        optim = self._spec.optim
        rate = learning_rate(optim.schedule, optim.lr, progress.step, self._spec.train.max_steps)
        return StepBatch(self._spec.batching.global_batch_size, rate)

    def coming(self, progress: TrainProgress, steps: int) -> list[tuple[int, int]]:
        """Return (first position, samples) for the next `steps` steps after `progress`, as far as they are known."""
        found = list[tuple[int, int]]()
        while len(found) < steps and (batch := self.batch(progress)):
            found.append((progress.samples, batch.samples))
            progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)
        return found

    def note_step(self, step: int, samples: int, squares: Sequence[PartSquares]) -> float | None:
        """Record the squared gradient norms of a step with `samples` samples.

        Return the noise scale in samples, averaged over the steps so far; None if nothing was measured.
        """
        if min(of.parts for of in squares) < 2:
            return None
        batching = self._spec.batching
        size = self.state.size
        noise = self.state.noise
        noise = noise.updated(measure_noise(samples, squares), batching.schedule.smoothing_steps)
        if self.follows_noise and step % batching.schedule.interval_steps == 0:
            size = next_size(batching, size, noise.noise_scale)
        self.state = BatchPace(size, noise)
        return noise.noise_scale

    def warning(self, samples: int) -> str | None:
        """Return the warning for a step with `samples` samples if the batch has outgrown the noise; None if it has not,
        or if this was reported before."""
        batching = self._spec.batching
        noise = self.state.noise
        if self._warned or not outgrows_noise(batching, samples, noise):
            return None
        self._warned = True
        measured = f"{noise.noise_scale:.3g} over {batching.schedule.smoothing_steps} steps"
        return (
            f"the batch has grown to {samples} samples, more than half the gradient noise scale ({measured}), "
            f"which tends to worsen the loss. {self._remedy()}"
        )

    def _remedy(self) -> str:
        """Return advice for the next run: a slower growth of the batch, or a smaller first batch."""
        batching = self._spec.batching
        scale = self.state.noise.noise_scale or 0.0
        allowed = batching.sizes_up_to(EQUIVALENT_FRACTION * scale)
        first = batching.global_batch_size
        if batching.schedule.kind == "ramp":
            return "In the next run, let batching.schedule.stages grow later or less"
        if len(allowed) > 1:
            return f"In the next run, set batching.schedule.max_global_batch_size={allowed[-1]}"
        smaller = max(1, math.floor(min(scale, first) / 4))
        steps = round(self._schedule.run_samples / smaller)
        lr = self._spec.optim.lr * lr_factor(self._schedule.lr_rule, smaller, first)
        return (
            f"In the next run, start with a smaller batch: set batching.global_batch_size={smaller} "
            f"train.max_steps={steps} optim.lr={lr:.3g}, or batching.schedule.kind=constant"
        )


# Measure the effect of directives in the steps after them, and record it together with the expected effect.


MEASURED_STEPS = 5
"""The effect of a directive is measured as the median over this number of steps."""
SETTLED_STEPS = 10
"""Number of steps after which sample shares have adapted to the known speeds in a new layout."""


@dataclass
class Watched:
    """A directive whose effect is being measured."""

    directive: DirectiveEvent
    before_s: float
    skipped: int
    """Number of initial steps whose reports still contain measurements from before the directive."""
    seen_s: list[float] = field(default_factory=list)

    @property
    def is_of_layout(self) -> bool:
        return self.directive.kind == "layout"


class Effects:
    """Measures the effects of directives within one layout, and of the directive that introduced the layout."""

    def __init__(self, directives: Directives):
        self._directives = directives
        self._slowest_s: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._watched: list[Watched] = []

    def watch(self, directive: DirectiveEvent) -> None:
        """Start measuring the effect of a directive, which takes effect in the next step. The effect of a new layout is
        measured once its speeds are known and the sample shares have adapted to them."""
        if directive.kind == "shares":
            before_s = median(list(self._slowest_s)[-CONFIRMING_STEPS:])
            skipped = SKIPPED_STEPS
        else:
            before_s = directive.before_s
            skipped = SKIPPED_STEPS + (SETTLED_STEPS if directive.kind == "layout" else 0)
        self._watched = [one for one in self._watched if one.is_of_layout]
        self._watched.append(Watched(directive, before_s, skipped))

    def note_step(self, step: int, slowest_s: float, whole_s: float, *, knows_speeds: bool) -> None:
        """Record the compute time of the slowest rank in the previous step. The total time of the step is recorded too,
        because layouts also differ in communication and waiting. `knows_speeds`: whether the speeds of all ranks are
        known."""
        self._slowest_s.append(slowest_s)
        for watched in list(self._watched):
            if knows_speeds or not watched.is_of_layout:
                watched.seen_s.append(whole_s if watched.is_of_layout else slowest_s)
            if len(watched.seen_s) == watched.skipped + MEASURED_STEPS:
                self._watched.remove(watched)
                self._write(step, watched)

    def _write(self, step: int, watched: Watched) -> None:
        given = watched.directive
        self._directives.note(
            AchievedEvent(
                step=step,
                number=given.number,
                before_s=watched.before_s,
                expected_s=given.expected_s,
                achieved_s=median(watched.seen_s[watched.skipped :]),
                group=given.group,
            )
        )


class StepScheduler:
    """Called collectively by all ranks of the replica group."""

    def __init__(self, run: TrainingRun, directives: Directives, link: SupervisorLink):
        """Start without speeds, which depend on the current layout. Runs with replica groups are not resumed
        bit-exactly: their earlier directives are not followed, and their speeds are not reported to the supervisor.
        """
        plan = run.plan
        self._run = run
        self._directives = directives
        self._link = link
        spec = plan.spec.scheduler
        self._mode = spec.mode if watches_speeds(plan, run.group) else "off"
        keeps_micro_batches = plan.spec.model.unit == "samples"
        self._even = even_division_of(plan)
        self._largest = largest_micro_batch(plan)
        self._shares = ShareScheduler(
            *(self._even, self._largest, spec.change),
            keeps_micro_batches=keeps_micro_batches,
            patience_s=patience_s(spec.mode),
        )
        self._may_change = spec.may_change
        self._layers: LayerScheduler | None = None
        most_layers = largest_stage_layers(plan)
        if "layers" in spec.may_change and most_layers is not None and run.group is None:
            times = LayerTimes(plan.layer_flops, 0.0, plan.head_flops)
            self._layers = LayerScheduler(
                plan.layout, times, most_layers, self._even, self._largest, spec.change, patience_s(spec.mode)
            )
        self.decided_layers: LayerChange | None = None
        """A change of the layer split to make before the next step."""
        self.is_proposed = False
        """True if the supervisor has proposed a layout that has not been sent to the ranks yet."""
        self._pipelines = ranks_of_pipelines(run.state)
        self._rows = [list(chain.from_iterable(row)) for row in self._pipelines]
        """For each data-parallel rank, the ranks that work on its samples."""
        self._interval_steps = reporting_interval(plan.group_size)
        self._tracker = SpeedTracker(spec.change, SETTLING_S)
        self._change_cost = ChangeCost()
        self._last_s = (0.0, 0.0)
        self.rate = 0.0
        """The replica group's samples per second, from its confirmed speeds, if the groups' sample shares depend on it;
        0 if unknown."""
        self._decided: tuple[ShareChange, int] | None = None
        """The change to make at the beginning of the next step, and the number of samples per step that it was decided
        for."""
        self._effects = Effects(self._directives)
        self._ahead = list[DirectiveEvent]()
        """Sample shares recorded by an earlier start, for steps that are repeated."""
        if self._mode != "off" and run.group is None:
            self._ahead = self._directives.shares_of_layout(len(self._even.weights), applied=self._mode == "auto")

    # Before a step

    def divide(self, step: int) -> Division:
        """Return how samples are divided in the step after update `step`."""
        reached = [directive for directive in self._ahead if directive.step <= step]
        if reached:
            self._ahead = [directive for directive in self._ahead if directive.step > step]
            self._shares.follow(division_of(self._even, reached[-1], self._largest))
        elif self._decided is not None:
            change, samples = self._decided
            self._decided = None
            division = change.division
            directive = DirectiveEvent(
                step=step,
                number=0,
                applied=self._mode == "auto",
                counts=division.counts(samples),
                micro_batch_size=division.micro_batch_size,
                micro_batches=division.count_micro_batches(samples),
                reason=change.reason,
                before_s=change.before_s,
                expected_s=change.after_s,
                group=self._run.group_field,
            )
            directive = self._directives.write(directive)
            if directive.applied:
                self._effects.watch(directive)
        return self._shares.division if self._mode == "auto" else self._even

    def limit(self, micro_batch_size: int) -> None:
        """Limit the micro-batches of all ranks from now on, because a rank ran out of memory."""
        self._even = replace(self._even, micro_batch_size=min(self._even.micro_batch_size, micro_batch_size))
        self._largest = min(self._largest, micro_batch_size)
        self._shares.limit(micro_batch_size)

    def report(self, step: int) -> SpeedFigures | None:
        """Return this rank's part of the report for the step after update `step`; None if it does not report."""
        if self._mode == "off" or step % self._interval_steps:
            return None
        speed = self._tracker.estimate or Speed(0.0, 0.0)
        proposal = self._link.newest_number() if self._run.group is None else 0
        change_s = self._change_cost.seconds
        own = speed.fixed_s, speed.per_sample_s, speed.noise
        is_settled = float(speed.is_settled)
        return SpeedFigures(*own, change_s, *self._last_s, proposal, speed.shown_steps, is_settled, speed.update_s)

    # After a step

    def note_step(
        self,
        step: int,
        own: OwnSamples,
        parts_s: Mapping[str, float],
        samples: int,
        reported: Sequence[SpeedFigures],
        *,
        shows_speed: bool = True,
        garbage_s: float = 0.0,
    ) -> None:
        """Record this rank's step time, by part, and the values that all ranks `reported` in the step.

        `samples`: the samples of the replica group. On a GPU, the next step has already begun. `shows_speed`: False for
        a step that took unusually long, such as a profiled one. `garbage_s`: seconds of garbage collection in its
        passes.
        """
        if self._mode == "off":
            return
        micro_batches = len(own.sizes)
        compute_s = parts_s["forward"] + parts_s["backward"]
        update_s = parts_s["optimizer"] if counts_updates(self._run.plan.layout, self._even) else 0.0
        if shows_speed:
            own_s = computing_s(parts_s, garbage_s)
            self._tracker.note(own.samples, micro_batches, own_s, parts_s["exposed_comm"], update_s)
            self._change_cost.note(own.samples, micro_batches, parts_s["data_wait"] + compute_s)
        self._last_s = compute_s + update_s, parts_s["exposed_comm"] / micro_batches
        if not reported:
            return
        exchange_s = exchange_each_s(self._run.plan.layout, min(one.waited_s for one in reported))
        slowest_s = max(one.last_s for one in reported)
        whole_s = sum(seconds for part, seconds in parts_s.items() if part != "checkpoint")
        counts = self._shares.division.counts(samples)
        known = [read_speed(*one[:3], one.shown_steps, one.is_settled, one.update_s) for one in reported]
        settled = [speed if speed is not None and speed.is_settled else None for speed in known]
        slowest_step_s = slowest_s + micro_batches * exchange_s
        self._effects.note_step(step, slowest_step_s, whole_s, knows_speeds=None not in settled)
        speeds = [slowest([known[rank] for rank in row], n) for row, n in zip(self._rows, counts, strict=True)]
        if self._mode == "auto" and self._run.group is not None and "shares" in self._may_change:
            self.rate = 0.0 if None in settled else samples_per_s(speeds)
        if self._ahead or self._directives.layouts_ahead:
            return
        if self._run.group is None and self._link.writes:  # the supervisor decides about layouts and nodes
            samples_of = {rank: count for row, count in zip(self._rows, counts, strict=True) for rank in row}
            of_ranks = [samples_of[rank] for rank in range(len(samples_of))]
            self._link.report(step, slowest_step_s, self._run.plan.layout, micro_batches, of_ranks, settled)
        self.is_proposed = int(reported[0].proposal) > self._link.received
        steps = self._interval_steps
        change_s = max(one.change_s for one in reported)
        self._interval_steps = reporting_interval(self._run.plan.group_size, slowest_s)
        division = self._shares.division
        decides_shares = "shares" in self._may_change
        if decides_shares and (change := self._shares.note_step(samples, speeds, exchange_s, steps, change_s)):
            self._decided = change, samples
        if self._layers is not None:
            stages = [
                [slowest([settled[rank] for rank in ranks], n) for ranks in row]
                for row, n in zip(self._pipelines, counts, strict=True)
            ]
            left = self._run.plan.total_steps - step
            pause_s = self._directives.last_pause_s
            self.decided_layers = self.decided_layers or self._layers.note_step(
                samples, division, stages, left, pause_s, steps
            )

    def watch(self, directive: DirectiveEvent) -> None:
        """Measure the effect of a directive that introduced the current layout."""
        self._effects.watch(directive)


def largest_micro_batch(plan: Plan) -> int:
    """Return the largest micro-batch per rank that the recipe and memory allow; if memory was not predicted, the
    recipe's micro-batch."""
    if plan.largest_micro_batch_size is not None:
        return plan.largest_micro_batch_size
    wanted = plan.spec.scheduler.max_micro_batch_size
    return plan.micro_batch_size if wanted == AUTO else max(plan.micro_batch_size, int(wanted))


def division_of(even: Division, directive: DirectiveEvent, largest_micro_batch: int) -> Division:
    """Return the division specified by a directive, with any additional micro-batches that memory and the schedule
    require now. Equal shares remain equal for any batch size."""
    assert isinstance(directive.micro_batch_size, int) and isinstance(directive.micro_batches, int)
    samples = sum(directive.counts)
    if (directive.counts, directive.micro_batches) == (even.counts(samples), even.count_micro_batches(samples)):
        return even
    return replace(
        even,
        weights=tuple(map(float, directive.counts)),
        micro_batch_size=min(directive.micro_batch_size, largest_micro_batch),
        micro_batches=math.ceil(directive.micro_batches / even.turns) * even.turns,
    )


def read_speed(
    fixed_s: float,
    per_sample_s: float,
    noise: float = 0.0,
    shown_steps: float = 0.0,
    is_settled: float = 1.0,
    update_s: float = 0.0,
) -> Speed | None:
    """Return a reported speed; None if the rank does not know its speed yet."""
    if not 0 < per_sample_s < math.inf:
        return None
    return Speed(fixed_s, per_sample_s, noise, int(shown_steps), bool(is_settled), update_s)


def ranks_of_pipelines(state: TrainState) -> list[list[list[int]]]:
    """Return the groups of ranks that share a stage's work, by data-parallel rank (outer) and pipeline rank (inner)."""
    mesh = state.mesh.axes.mesh  # (pp, dp_replicate, dp_shard, cp, tp)
    rows = mesh.permute(1, 2, 0, 3, 4).flatten(3).flatten(0, 1)
    return [[[int(rank) for rank in ranks] for ranks in row] for row in rows.tolist()]


# Try several bucket sizes for the gradient sums in a run's first steps, and keep the best one.
#
# The time that a step waited for gradients is sent with the exchange of the next step's loss. The sums are bitwise
# identical for all sizes, so a run may try sizes in any `scheduler.mode` except off.


class StepBuckets:
    """Called collectively by all ranks of the replica group. No sizes are tried on a GPU, where FSDP2 sums each block's
    gradients separately, or if no two blocks can share a bucket."""

    def __init__(self, run: TrainingRun, directives: Directives):
        """Start trying sizes in the current layout. Each layout needs a new instance."""
        self._run = run
        self._directives = directives
        self._sums = run.state.sums
        self._layout = run.plan.layout.describe()
        self._tries: BucketTries | None = None
        self._warm_steps = 0
        self.report: BucketFigures | None = None
        """This rank's part of the next step's report; None if nothing is tried."""
        self._is_on = False
        if self._sums is None:
            return
        known = directives.buckets.get(self._layout)
        wanted = run.plan.spec.comm.bucket_bytes
        chosen = known if wanted is None else wanted
        self._sums.bucket_bytes = chosen or 0
        self._is_on = chosen is None and run.plan.spec.scheduler.mode != "off"

    def begin(self) -> None:
        """Begin a step; called again if the step is repeated."""
        if self._sums is not None and self._tries is not None and self._is_on:
            self._sums.bucket_bytes = self._tries.size

    def note_step(self, step: int, step_s: float, reported: Sequence[BucketFigures]) -> None:
        """Record the step that made update `step` and took `step_s`, and the reports of all ranks on the previous
        step."""
        if not self._is_on or self._sums is None:
            return
        if reported:
            self._learn(step, reported, self._sums)
        self.report = None
        if self._sums.holds_back or not self._is_on:
            return  # a step that measures links waits for each exchange, so its times are not comparable
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
            # Use the blueprint's bucket size, if any, for the axis over which gradients are summed first.
            blueprint = self._run.plan.blueprint
            exchanges = blueprint.exchanges if blueprint else ()
            summed = (one.bucket_bytes for one in exchanges if one.operation in ("reduce_scatter", "all_reduce"))
            planned_bytes = next((size for size in summed if size is not None), None)
            sizes = sizes_to_try(gradient_bytes, block_bytes, planned_bytes)
            self._tries = BucketTries(sizes)
            self._is_on = bool(sizes)
            return
        waited_s = fmean(one.waited_s for one in reported)
        step_s = max(one.step_s for one in reported)
        tries = self._tries
        tries.note(round(reported[0].bucket_bytes), waited_s, step_s)
        if not tries.is_done:
            return
        self._is_on = False
        sums.bucket_bytes = tries.best
        self._directives.buckets[self._layout] = tries.best
        usual = tries.usual_s
        if len(usual) > 1:
            self._directives.note(
                BucketsEvent(
                    step=step,
                    layout=self._layout,
                    bucket_bytes=tries.best,
                    tries=tuple(BucketTry(size, usual[size]) for size in tries.sizes),
                    group=self._run.group_field,
                )
            )
