"""The run of one replica group among others: agree who is there, take a portion, train, vote; heal when behind."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.elastic.digests import diverging_groups, local_digest
from trainspec_cli.engine.elastic.membership import Membership, Place, Seat
from trainspec_cli.engine.observe.journal import GroupJournal
from trainspec_cli.engine.optim.build import set_learning_rate
from trainspec_cli.engine.run.faults import GROUP, START
from trainspec_cli.engine.run.portions import PortionReader
from trainspec_cli.engine.run.step import try_step
from trainspec_cli.engine.run.trainer import DoneStep, Trainer
from trainspec_cli.errors import WorkerError
from trainspec_cli.policy.recovery import enough_groups
from trainspec_cli.policy.schedule import learning_rate
from trainspec_cli.policy.spread import lr_factor, take_portion
from trainspec_cli.rundir.event_types import RecoveryEvent, RetryEvent
from trainspec_cli.rundir.files import read_json

WAIT_S = 0.1
USUAL_STEPS = 20
"""A stall is what a step took beyond the median of so many before it."""


def own_place() -> Place:
    """As the launcher says."""
    return Place(int(os.environ[GROUP]), dist.get_rank(), dist.get_world_size())


class ElasticTrainer(Trainer):
    """A step counts only when the groups agree; else it is made again by those that are left."""

    journal: GroupJournal
    membership: Membership
    seat: Seat

    def run(self) -> None:
        """The membership is made last: from then on the others count on this group.

        Whoever comes back heals from them, and looks for a checkpoint only where nobody holds the state any more.
        """
        self.restored = os.environ[START] == "1"
        self._announce(self._restore() if self.restored else None)
        self.taken = torch.tensor([self.samples])
        self.reader = PortionReader(self.plan, self.source, self.built)
        self.committed_seat: Seat | None = None
        self.committed_at = time.perf_counter()
        self.failed_tries = 0
        self.late = False
        self.leads = False
        """Of the groups the one that has been there longest tells the story and writes the checkpoints."""
        self.tenure_steps = 0
        self.membership = Membership(self.place, self._healed_tensors, self.spec.resilience.exchange_timeout_s)
        try:
            self._run_to_end()
        finally:
            self.membership.leave()

    def _open_journal(self) -> GroupJournal:
        self.place = own_place()
        return GroupJournal(self.run_dir, self.place.group, self.place.rank, self.spec)

    # One step after another

    def _train_until_look(self) -> None:
        self.clock.restart()
        look = self._next_look()
        while self.step < look and not self.stopping:
            with self.watch.between_steps():
                seated = self._take_seat()
            if seated and (done := self._try_step()):
                self._record(done)
                self._note_changes(done)

    def _take_seat(self) -> bool:
        """Whether this group takes part in the step to come; not when all are asked to stop."""
        while not self.stopping:
            self.seat = self.membership.agree(self.step)
            if self.seat.healed:
                self.step, self.samples = self.seat.step, int(self.taken)
            elif not self.seat.step and not self.restored:
                self._restore_at_last()
                continue
            enough, stop = self._call_roll()
            if self.membership.failed_anywhere:
                self.membership.vote(self.step)
                self._count_failed_try()
                continue
            self.stopping = stop
            if enough:
                self.journal.lead(self.leads, self.step)
                return not stop
            self.late = self.committed_seat is None and self.run_dir.result_json.exists()
            self.stopping = self.stopping or self.late
            time.sleep(WAIT_S)
        return False

    def _restore_at_last(self) -> None:
        """Every group has died: the newest checkpoint is all that is left."""
        self.restored = True
        self._restore()
        self.taken.fill_(self.samples)

    def _call_roll(self) -> tuple[bool, bool]:
        """-> (whether there are groups enough, whether any was asked to stop): the same on every rank of every group.

        A run that has not stepped yet waits for all the groups that its supervisor expects.
        """
        present, resilience = len(self.seat.groups), self.spec.resilience
        stepped = self.committed_seat is not None or self.seat.healed
        complete = stepped or present >= read_json(self.run_dir.groups_json)["expected"]
        tenures = [0.0] * present
        tenures[self.seat.rank] = float(self.tenure_steps)
        roll = torch.tensor([float(stepped), float(complete), float(self.stop_request.requested), *tenures])
        self.membership.sum_(roll)
        self._compare_digests()
        self.membership.settle(roll)
        has_stepped, is_complete, stop = (bool(count) for count in roll[:3])
        self.leads = int(roll[3:].argmax()) == self.seat.rank
        return (has_stepped or is_complete) and enough_groups(resilience, present), stop

    def _try_step(self) -> DoneStep | None:
        """None where the groups did not agree on it."""
        batching = self.spec.batching
        portion = take_portion(
            batching,
            self.reader.unit_samples,
            self.plan.replica_groups,
            self.samples,
            self.seat.rank,
            len(self.seat.groups),
        )
        schedule, peak = self.spec.optim.schedule, self.spec.optim.lr
        lr = learning_rate(schedule, peak, self.step, self.spec.train.max_steps)
        lr *= lr_factor(batching.shrink_lr, portion.step_samples, batching.global_batch_size)
        set_learning_rate(self.built.optimizer, lr)
        with self.clock.part("data_wait"):
            micro_batches: list[MicroBatch] = self.reader.take(portion)
        self.faults.strike(self.step, self.built)
        outcome = try_step(
            self.built,
            micro_batches,
            global_tokens=self.source.counted(np.arange(self.samples, self.samples + portion.step_samples)),
            clip_norm=self.spec.optim.grad_clip_norm,
            groups=_Voting(self.membership, self.step),
            writing=self.checkpoints.writing,
        )
        if outcome is None:
            self._count_failed_try()
            return None
        self.taken += portion.step_samples
        self.tenure_steps += 1
        took = (portion.start, portion.samples)
        return self._count(
            outcome, lr, portion.step_samples, group=self.place.group, groups=tuple(self.seat.groups), took=took
        )

    def _count_failed_try(self) -> None:
        self.failed_tries += 1
        self.journal.write(RetryEvent(step=self.step + 1))

    # What the groups tell one another beside gradients

    def _healed_tensors(self) -> Sequence[Tensor]:
        """All that a group which comes back takes from another."""
        return [self.taken, *self.built.held.tensors()]

    def _compare_digests(self) -> None:
        """Raises WorkerError in every group where one's parameters differ."""
        interval = self.spec.resilience.sdc_check
        if interval is None or self.step % interval:
            return
        diverging = diverging_groups(self.membership.gather(local_digest(self.built.shares)))
        found = torch.zeros(self.plan.replica_groups)
        for place in diverging:
            found[self.seat.groups[place]] = 1
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if found.any():
            raise _diverged(found.nonzero().flatten().tolist(), self.step)

    def _note_changes(self, done: DoneStep) -> None:
        """Which groups left or came since the last step, and what that cost."""
        now = time.perf_counter()
        before, self.committed_seat = self.committed_seat, self.seat
        elapsed_s, self.committed_at = now - self.committed_at, now
        tries, self.failed_tries = self.failed_tries, 0
        if before is None or (before.names == self.seat.names and not tries):
            return
        usual = [event.step_time_s for event in self.tally.steps[-USUAL_STEPS - 1 : -1]]
        changed: list[tuple[str, int | None]] = [
            ("left", int(name.partition(":")[0])) for name in sorted(before.names - self.seat.names)
        ]
        changed += [("joined", int(name.partition(":")[0])) for name in sorted(self.seat.names - before.names)]
        stall_s, lost = max(0.0, elapsed_s - median(usual or [0.0])), tries
        for change, group in changed or [("retried", None)]:
            self.journal.write(
                RecoveryEvent(step=done.step, change=change, group=group, stall_s=stall_s, lost_steps=lost)
            )
            stall_s, lost = 0.0, 0  # several at once cost as much as one

    # What is left behind

    def _checkpoint(self) -> None:
        """One group writes for all."""
        self.checkpoints.after_step(self.step, self.samples, writes=self.leads)

    def _checkpoint_last(self) -> None:
        if self.leads and not self.late:
            super()._checkpoint_last()

    def _end_done(self) -> None:
        if not self.late:
            super()._end_done()

    def _finish(self, status: str) -> None:
        """A group that came back when the others had done leaves their result as it is."""
        if not self.late:
            super()._finish(status)


class _Voting:
    """The membership as a step sees it."""

    def __init__(self, membership: Membership, step: int):
        self._membership, self._step = membership, step

    def sum_(self, tensor: Tensor) -> None:
        self._membership.sum_(tensor)

    def vote(self) -> bool:
        return self._membership.vote(self._step)


def _diverged(groups: list[int], step: int) -> WorkerError:
    who = f"group {groups[0]} differ" if len(groups) == 1 else f"groups {', '.join(map(str, groups))} differ"
    return WorkerError(
        f"the parameters of {who} from the others' after step {step}: a value changed without an update",
        code="diverged",
        hint="test that group's memory and devices; go on from a checkpoint before the last comparison that agreed",
    )
