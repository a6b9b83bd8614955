"""Take one training step: forward and backward passes over the micro-batches, exchange between replica groups, commit,
update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.build.train_state import LateSum, TrainState
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.data.loader import Traffic
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.observe.clock import Segments
from trainspec_cli.engine.optim.optimizer import clear_gradients, guarded_update, squared_norm
from trainspec_cli.engine.parallel.noise import SampleParts
from trainspec_cli.engine.parallel.pipeline import forget_visits, scale_balance_loss, update_balance
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples
from trainspec_cli.engine.run.pipeline_run import PipelineRun
from trainspec_cli.engine.run.shortage import PassesOutOfMemory, is_out_of_memory
from trainspec_cli.engine.run.step_report import StepReport
from trainspec_cli.planner.pipeline import actions
from trainspec_cli.recipe.keys.run import DataSpec
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.folder.event_types.events import StepEvent

NOTHING_TO_REPORT = StepReport()
MakeReport = Callable[[], StepReport]


@dataclass(frozen=True)
class StepOutcome:
    """Scalars and reports on the device, identical on every rank. They are read later, so that the host does not
    wait."""

    loss: Tensor
    """Mean loss over the global batch's tokens, in nats."""
    grad_norm: Tensor
    skipped: Tensor
    """1 if the update was skipped because a value was not finite."""
    stop: Tensor
    """The number of ranks that received a request to stop."""
    writing: Tensor
    """The number of ranks that were writing a checkpoint."""
    steps_to_sample: Tensor
    """The number of steps until the links are next sampled; 0 if no rank has set it."""
    noise: Tensor
    """(5,): the sums of `NoiseProbe` over all ranks, and the part of the full gradient's |g|^2 that is due to experts
    spread over ep; zeros if the noise is not measured."""
    figures: Tensor
    """(ranks, F): the parts of each rank's report; F is 0 if there are none."""
    own: StepReport
    """This rank's report, whose parts show how the rows of `reports` are read."""

    def reports(self) -> list[StepReport]:
        """Wait for the device, and return the parts reported by all ranks, by rank, or []."""
        return [self.own.like(row) for row in self.figures.tolist()] if self.figures.numel() else []

    def on_host(self) -> StepOutcome:
        """Start copying to the host; the copies are complete when the device has reached this point."""
        scalars = (self.loss, self.grad_norm, self.skipped, self.stop, self.writing, self.steps_to_sample)
        together = torch.stack([scalar.to(self.loss.device, torch.float64) for scalar in scalars])
        copied, noise, figures = (
            tensor.to("cpu", non_blocking=True) for tensor in (together, self.noise, self.figures)
        )
        loss, norm, skipped, stop, writing, to_sample = copied.unbind()
        return StepOutcome(loss, norm, skipped, stop, writing, to_sample, noise, figures, self.own)


def train_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    *,
    global_tokens: int,
    clip_norm: float | None,
    groups: Coordinator | None = None,
    make_report: MakeReport = lambda: NOTHING_TO_REPORT,
    parts: SampleParts | None = None,
) -> StepOutcome | None:
    """Make one update. Return None if the replica groups did not agree on the step; nothing is updated then.

    `groups`: None if there is only one group. `make_report` returns this rank's report, which is sent to all ranks; on
    an accelerator, it is called once the passes have been queued. `parts`: set if the gradient noise is measured.
    """
    if groups is not None:
        groups.begin_passes(state, len(micro_batches))
    try:
        loss = compute_gradients(state, micro_batches, global_tokens, parts)
    except PassesOutOfMemory:
        if groups is not None:
            groups.abandon_passes(state)
        raise
    if groups is not None:
        groups.reduce(state, loss)
        if not groups.commit():
            clear_gradients(state.shares)
            state.compression.discard()
            forget_visits(state.routers)
            return None
    return _update(state, loss, clip_norm, make_report)


def _update(state: TrainState, loss: Tensor, clip_norm: float | None, make_report: MakeReport) -> StepOutcome:
    """Agree on loss, norm and reports in one exchange, clip by the norm over all ranks, and update.

    `loss` is this rank's share of the mean.
    """
    with state.clock.part("optimizer"):
        squared = squared_norm(state.shares).to(loss.device)
        experts = [one for one in state.shares if one.name in state.spread_experts]
        of_experts = squared_norm(experts).to(loss.device) if experts else squared.new_zeros(())
    report = make_report()
    # Numbers are filled in on the device, because a copy from the host would wait for all queued work.
    sums = [loss.double(), squared, *(squared.new_full((), number) for number in report.sums)]
    noise = torch.cat([state.stages.noise.sums, of_experts[None]])
    row = report.row
    reported = squared.new_zeros(
        (dist.get_world_size(), len(row))
    )  # the sum with the other ranks' zeros gathers the rows
    for place, figure in enumerate(row):
        reported[dist.get_rank(), place].fill_(figure)
    agreed = torch.cat([torch.stack(sums), noise, reported.flatten()])
    with state.clock.agreeing():
        dist.all_reduce(agreed)
    mean_loss = agreed[0].float()
    norm = agreed[1].sqrt().float()
    with state.clock.part("optimizer"):
        skipped = guarded_update(state.optimizer, state.shares, norm, mean_loss, clip_norm)
    state.compression.end_step(skipped)
    if state.routers:
        update_balance(state.routers, Peers(state.mesh.stage.get_group(), state.clock.collective))
    noise, figures_of_all = agreed[len(sums) :].split([len(noise), reported.numel()])
    return StepOutcome(
        mean_loss,
        norm,
        skipped,
        stop=agreed[2],
        writing=agreed[3],
        steps_to_sample=agreed[4],
        noise=noise,
        figures=figures_of_all.view_as(reported),
        own=report,
    )


def compute_gradients(
    state: TrainState, micro_batches: Sequence[MicroBatch], global_tokens: int, parts: SampleParts | None = None
) -> Tensor:
    """Compute the gradients of the global batch's mean loss, and return this rank's share of that loss. The ranks'
    shares sum to the loss.

    `parts`: set if the gradient noise is measured. Raises PassesOutOfMemory.
    """
    layout = state.mesh.layout
    noise = state.stages.noise
    noise.begin(parts)
    scale_balance_loss(state.routers, global_tokens)
    schedule = actions(layout, len(micro_batches))
    if state.sums is not None:
        state.sums.begin()
    try:
        loss = PipelineRun(state.stages, schedule, micro_batches, global_tokens).run()
        if state.sums is not None:
            state.sums.finish()
    except Exception as error:
        cause = (state.sums and state.sums.take_error()) or error
        if is_out_of_memory(cause):
            raise PassesOutOfMemory(max(len(tokens) for tokens, *_ in micro_batches)) from cause
        if cause is error:
            raise
        raise cause from error
    noise.end(
        every_micro_batch=layout.exchanges_every_backward,
        ranks_of_part=layout.cp * layout.tp * layout.pp,
        ranks_of_experts=layout.ep * layout.pp,
    )
    for late in state.late_sums:
        sum_late(late)
    return loss / layout.tp  # all tp ranks computed the same loss


def sum_late(late: LateSum) -> None:
    """Sum the gradients of `late` in one exchange, in place. Shares with the same name on this rank are summed as
    one."""
    by_name: dict[str, list[Tensor]] = {}
    for share in late.shares:
        if share.gradient is not None:
            by_name.setdefault(share.name, []).append(share.gradient)
    flat = torch.cat([torch.stack(gradients).sum(0).flatten() for gradients in by_name.values()])
    late.peers.sum_(flat)
    parts = flat.split([gradients[0].numel() for gradients in by_name.values()])
    for gradients, part in zip(by_name.values(), parts, strict=True):
        for gradient in gradients:
            gradient.copy_(part.view_as(gradient))


# A completed step and its event, which is written once the step's results have arrived from the device.


@dataclass(frozen=True)
class DoneStep:
    """A step whose results have not been read from the device yet."""

    step: int
    outcome: StepOutcome
    lr: float
    segments: Segments
    samples: StepSamples
    traffic: Traffic
    """Counts for the copies of the step's batch to the device, including the number of buffer allocations: 0 after the
    first steps."""
    noise_scale: float | None
    """The gradient noise scale up to this step, if the next batch depends on it."""
    garbage_s: float
    """Garbage collection time in seconds; 0 on a GPU, which computes meanwhile."""

    def event(self, data: DataSpec, noise_scale: float | None) -> StepEvent:
        """Return the step's event, after reading its results from the device. `noise_scale`: the gradient noise scale
        up to this step."""
        parts_s = self.segments.parts_s()
        exchanged = self.segments.exchange_time()
        outcome = self.outcome
        samples = self.samples.step_samples
        return StepEvent(
            step=self.step,
            loss=outcome.loss.item(),
            grad_norm=outcome.grad_norm.item(),
            lr=self.lr,
            tokens=samples * data.seq_len if data.unit == "tokens" else ABSENT,
            samples=samples,
            step_time_s=sum(parts_s.values()),
            time_s=parts_s,
            exchange_s=exchanged[0] if exchanged else ABSENT,
            exposed_s=exchanged[1] if exchanged else ABSENT,
            queued_s=self.segments.queued.own_s,
            skipped=bool(outcome.skipped.item()),
            noise_scale=ABSENT if noise_scale is None else noise_scale,
            group=self.samples.group,
            groups=self.samples.groups,
            took=self.samples.took,
            h2d_copies=self.traffic.h2d_copies,
            h2d_bytes=self.traffic.h2d_bytes,
            allocations=self.traffic.allocations,
        )
