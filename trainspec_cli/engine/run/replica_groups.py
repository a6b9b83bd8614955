"""The coordinator for runs with several replica groups; each group has one.

Before each step, the groups agree on which of them take part. A group that is behind heals from one that is up to date.
Each group reads its portion of the samples, and gradients are summed over the groups. If no exchange fails, the step
counts; otherwise the remaining groups repeat it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import lr_factor, take_portion, weighted_counts
from trainspec_cli.balance.decisions.shares import describe_rates, group_weights
from trainspec_cli.core.environment_names import START
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.exchange import sent_bytes
from trainspec_cli.engine.comm.forking import Background
from trainspec_cli.engine.digest import diverging_groups, local_digest
from trainspec_cli.engine.elastic.cross_group import GradientPackets, names_outside_blocks, packets_in_order, sum_as_one
from trainspec_cli.engine.elastic.membership import NOBODY, GroupRank, Membership, Participation
from trainspec_cli.engine.observe.journal import DirectiveLog
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples, StepStart
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.run.channel.messages import ExpectGroups
from trainspec_cli.run.folder.event_types.events import DirectiveEvent, RecoveryEvent, RetryEvent, WarningEvent
from trainspec_cli.run.recovery.recovery import enough_groups

WAIT_S = 0.1
HEALS_WITHOUT_LOST = "no other replica group has this group's compression errors: error feedback starts from zero"
STAGED = "replica groups exchange data through host memory, over gloo, which predictions do not include: "
USUAL_STEPS = 20
"""A step's stall is the amount by which its time exceeds the median over this many previous steps."""


class ReplicaGroups(Coordinator):
    waits_for_groups = True

    def __init__(self, run: TrainingRun, source: DataSource):
        super().__init__(run, source)
        assert run.group is not None, "the launcher numbers the groups"
        self._own = GroupRank(run.group, dist.get_rank(), dist.get_world_size())
        self._directives = DirectiveLog(run.run_dir, run.journal)
        self.restores_at_start = os.environ[START] == "1"
        """A returning group heals from the others. It restores a checkpoint only if no group holds the state any
        more."""
        self._has_restored = self.restores_at_start
        self.leads = False
        self._progress = TrainProgress()
        self._samples = torch.tensor([0])
        """`TrainProgress.samples` as a tensor, so that a healing group copies it with the state."""
        self._rates: tuple[float, ...] = ()
        """Each group's speed in samples per second; 0 if unknown."""
        self._weights: tuple[float, ...] = ()
        device = run.state.device

        def healed() -> Sequence[Tensor]:
            """Return all tensors that a healing group copies from another, always in the same order."""
            return [self._samples, *run.state.held.tensors()]

        self._membership = Membership(self._own, healed, self._spec.resilience.exchange_timeout_s, device)
        self._is_staged = False
        self._beside = Background(device, run.state.clock.note_beside)
        self._packets: tuple[TrainState, GradientPackets] | None = None
        self._holds_back = False
        """True if any group measures its links in this step. All groups then exchange gradients only after their
        passes."""
        self._taking_part = NOBODY
        self._committed: Participation | None = None
        """The groups of the last step that counted."""
        self._committed_at = time.perf_counter()
        self._recent_s: deque[float] = deque(maxlen=USUAL_STEPS)
        self._failed_tries = 0
        self._expected_groups = run.plan.replica_groups
        """Number of groups that the supervisor expects, as last reported. Smaller if some groups are not expected to
        join."""
        self._tenure_steps = 0
        """Number of steps that this group has taken part in. The group with the most steps leads."""

    @property
    def stop_flag(self) -> bool:
        """Always False, because all groups agree on requests to stop before the step."""
        return False

    # Agree on the groups that take part

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        while True:
            self._go_on_from(progress)
            self._taking_part = self._membership.agree(progress.step)
            if self._taking_part.healed:
                progress = TrainProgress(self._taking_part.step, int(self._samples))
                # This group's compression errors are lost; the other groups keep theirs.
                self._run.state.compression.clear()
                if self._run.state.compression.feeds_back:
                    self._run.journal.write(WarningEvent(step=progress.step, message=HEALS_WITHOUT_LOST))
                self._go_on_from(progress)
            elif not self._taking_part.step and not self._has_restored:  # all groups had failed
                self._has_restored = True
                progress = restore()
                continue
            is_enough, stop = self._call_roll()
            if self._membership.failed_anywhere:
                self.commit()
            elif is_enough:
                self._run.journal.lead(self.leads, progress.step)
                why = self._membership.staged_because
                if why and not self._is_staged:
                    self._run.journal.write(WarningEvent(step=progress.step, message=STAGED + why))
                self._is_staged = bool(why)
                return StepStart(progress, stop)
            else:
                self.finished_without = self._committed is None and self._run.run_dir.result_json.exists()
                if stop or self.finished_without:
                    return StepStart(progress, stop=True)
                time.sleep(WAIT_S)

    def _go_on_from(self, progress: TrainProgress) -> None:
        self._progress = progress
        self._samples.fill_(progress.samples)

    def _call_roll(self) -> tuple[bool, bool]:
        """Agree with all groups on the next step. Return (whether the connected groups can take the step, whether any
        rank was asked to stop). Before its first step, a run waits for all groups that its supervisor expects."""
        present = len(self._taking_part.groups)
        resilience = self._spec.resilience
        stepped = self._committed is not None or self._taking_part.healed
        for message in self._run.supervisor.receive(ExpectGroups):
            self._expected_groups = message.groups
        complete = stepped or present >= self._expected_groups
        tenures = [0.0] * present
        tenures[self._taking_part.rank] = float(self._tenure_steps)
        rates = [0.0] * present
        rates[self._taking_part.rank] = self.rate
        holds_back = self._run.state.links.is_due(self._progress.step)
        flags = [float(stepped), float(complete), float(self._run.stop.requested), float(holds_back)]
        roll = torch.tensor([*flags, *tenures, *rates], dtype=torch.float64)
        self._membership.sum_(roll)
        interval = self._spec.resilience.sdc_check
        if interval is not None and self._progress.step % interval == 0:
            self._compare_digests()
        self._membership.agree_on_counts(roll)
        has_stepped, is_complete, stop, holds_back = (bool(count) for count in roll[: len(flags)])
        tenures, rates = roll[len(flags) :].view(2, present).tolist()
        self.leads = tenures.index(max(tenures)) == self._taking_part.rank
        self._rates = tuple(rates)
        self._holds_back = holds_back and self._run.state.compression.is_off  # the time includes encoding
        return (has_stepped or is_complete) and enough_groups(resilience, present), stop

    def _compare_digests(self) -> None:
        """Raise WorkerError in every group if any group's parameters differ from the others'."""
        diverging = diverging_groups(self._membership.gather(local_digest(self._run.state.shares)))
        found = torch.zeros(self._run.plan.replica_groups)
        for place in diverging:
            found[self._taking_part.groups[place]] = 1
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if found.any():
            groups = found.nonzero().flatten().tolist()
            named = f"group {groups[0]} differ" if len(groups) == 1 else f"groups {', '.join(map(str, groups))} differ"
            raise WorkerError(
                f"the parameters of {named} from the other groups' after step {self._progress.step}: "
                "a value changed without an update",
                code="diverged",
                hint="test that group's memory and devices; continue from a checkpoint older than the "
                "last comparison that found no differences",
            )

    # The samples and exchanges of a step

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        batching = self._spec.batching
        present = self._taking_part
        position, total = steps[0]
        groups = self._run.plan.replica_groups
        weights = group_weights(self._rates, self._spec.scheduler.change)
        portion = take_portion(batching, total, weights, groups, position, present.rank)
        taken = portion.step_samples
        self._note_weights(weights, taken)
        following = (portion.start + taken, portion.samples)  # the following step, if the groups stay the same
        own, micro_batches = self.read((portion.start, portion.samples), following)
        return StepSamples(
            micro_batches,
            own,
            self.division,
            global_tokens=self.count_targets(position, taken),
            step_samples=taken,
            group_samples=portion.samples,
            lr_factor=lr_factor(batching.shrink_lr, taken, total),
            group=self._own.group,
            groups=tuple(present.groups),
            took=(portion.start, portion.samples),
        )

    def _note_weights(self, weights: tuple[float, ...], samples: int) -> None:
        """If the groups' sample shares have changed, record this in the leading group."""
        before = self._weights
        self._weights = weights
        if len(before) != len(weights) or not self.leads or self._own.rank:
            return
        step = self._progress.step
        was = weighted_counts(samples, before)  # weights are the groups' samples per second
        counts = weighted_counts(samples, weights)
        if was == counts:
            return
        self._directives.write(
            DirectiveEvent(
                step=step,
                number=step,
                kind="group_shares",
                applied=True,
                counts=counts,
                reason=describe_rates(self._taking_part.groups, weights),
                before_s=max(count / rate for count, rate in zip(was, weights, strict=True)),
                expected_s=max(count / rate for count, rate in zip(counts, weights, strict=True)),
            )
        )

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        exchanges = micro_batches if state.mesh.layout.exchanges_every_backward else 1
        state.wire.find_connections()  # when the groups change, the connections between them are replaced
        state.wire.reserve(self._membership.connections, "gradients")
        self._packets_of(state).begin(0 if self._holds_back else exchanges)

    def abandon_passes(self, state: TrainState) -> None:
        state.wire.release(self._membership.connections)
        if self._packets_of(state).abandon():
            self._membership.fail("the passes were interrupted after some gradients had been sent")

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        """Sum gradients and the loss over the groups. A step that measures the links starts with a small sum, at which
        the groups wait for one another, so that only the transfer of gradients is timed."""
        if not self._holds_back:
            self._finish_packets(state)
            self._sum_scalars(state, loss)
            return
        started_s = time.perf_counter()
        self._sum_scalars(state, loss)
        met_s = time.perf_counter()
        self._finish_packets(state)
        ended_s = time.perf_counter()
        summed_bytes = sum(share.gradient.nbytes for share in state.shares if share.gradient is not None)
        groups = len(self._taking_part.groups)
        state.links.note_across(2 * sent_bytes(summed_bytes, groups), ended_s - met_s, met_s - started_s)

    def _sum_scalars(self, state: TrainState, loss: Tensor) -> None:
        visits = (router.tokens_per_expert_E for router in state.routers)
        with state.clock.collective():
            sum_as_one([loss, state.stages.noise.sums, *visits], self._membership.sum_)

    def _finish_packets(self, state: TrainState) -> None:
        with state.clock.collective():
            self._packets_of(state).finish()
        state.wire.release(self._membership.connections)

    def _packets_of(self, state: TrainState) -> GradientPackets:
        """Return the gradient packets for `state`. A change of layout replaces them."""
        if self._packets is None or self._packets[0] is not state:
            if self._packets is not None:
                self._packets[1].detach()
            late = {share.name for late in state.late_sums for share in late.shares}
            ordered = packets_in_order(state.shares, names_outside_blocks(state.parts), late)
            sum_ = partial(self._sum_packet, state)
            self._packets = state, GradientPackets(ordered, late, sum_, self._beside, state.await_sums)
        return self._packets[1]

    def _sum_packet(self, state: TrainState, number: int, packet: Tensor) -> None:
        """Sum a packet. Gradients kept in host memory (`offload`) are also summed on the device, over its faster
        links."""
        name = f"groups.{number}.{packet.numel()}"
        inside = self._run.plan.num_nodes == 1
        on_device = packet.to(state.device)
        self._membership.sum_(on_device, state.compression.of(name, packet.numel(), inside=inside))
        if on_device is not packet:
            packet.copy_(on_device)

    def commit(self) -> bool:
        with self._run.state.clock.collective():
            committed = self._membership.vote()
        if committed:
            self._tenure_steps += 1
        else:
            self._failed_tries += 1
            self._run.journal.write(RetryEvent(step=self._progress.step + 1))
        return committed

    def note_step(self, step: int, step_time_s: float) -> None:
        """Record which groups have left or joined since the last step, and how much time these changes cost."""
        now = time.perf_counter()
        before = self._committed
        self._committed = self._taking_part
        elapsed_s = now - self._committed_at
        self._committed_at = now
        tries = self._failed_tries
        self._failed_tries = 0
        usual_s = median(self._recent_s or [0.0])
        self._recent_s.append(step_time_s)
        if before is None or (before.names == self._taking_part.names and not tries):
            return
        stall_s = max(0.0, elapsed_s - usual_s)
        lost = tries
        for change, group in self._taking_part.changes_since(before) or [("retried", None)]:
            event = RecoveryEvent(step=step, change=change, group=group, stall_s=stall_s, lost_steps=lost)
            self._run.journal.write(event)
            # several changes at once cost as much as one
            stall_s = 0.0
            lost = 0

    def leave(self) -> None:
        super().leave()
        self._directives.close()
        self._membership.leave()
