"""The certify worker with planted faults: `faulty_worker.py FAULTS certify_worker FOLDER`; FAULTS: {run's name: fault}.

Runs that FAULTS does not name are sound, before and after faulty ones.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from pytest import MonkeyPatch

from trainspec_cli.engine.checkpoint import reshard
from trainspec_cli.engine.checkpoint import saver as store
from trainspec_cli.engine.checkpoint.files import Held
from trainspec_cli.engine.comm.compressed import CompressedSum, Feedback
from trainspec_cli.engine.optim.optimizer import squared_norm
from trainspec_cli.engine.parallel import context, data_parallel, gradient_sums
from trainspec_cli.engine.run import pipeline_run, step
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.scheduling import relayout
from trainspec_cli.engine.run.scheduling.directives import Directives
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.tools import certify_worker
from trainspec_cli.engine.tools.__main__ import main


def wrong_gradient_scale(patch: MonkeyPatch) -> None:
    """Take a mean over ranks where a sum belongs."""
    right = step.compute_gradients

    def scaled(state, micro_batches, global_tokens, *measured):
        return right(state, micro_batches, global_tokens * state.mesh.layout.data_parallel_size, *measured)

    patch.setattr(step, "compute_gradients", scaled)
    patch.setattr(certify_worker, "compute_gradients", scaled)


def skipped_all_reduce(patch: MonkeyPatch) -> None:
    """Let replicas keep their gradients."""
    patch.setattr(gradient_sums, "sum_over_replicas_", lambda *_, **__: None)


def stale_embedding_gradient(patch: MonkeyPatch) -> None:
    """Skip the sum of a tied embedding's gradients over both ends of a pipeline."""
    patch.setattr(step, "sum_late", lambda late: None)


def lost_last_backward(patch: MonkeyPatch) -> None:
    """Exchange the last micro-batch's gradients before they are computed."""
    right = pipeline_run.exchange_in_backward

    def too_early(model, exchange):
        return right(model, False)

    patch.setattr(pipeline_run, "exchange_in_backward", too_early)
    patch.setattr(data_parallel, "exchange_in_backward", too_early)


def without_moments(held) -> None:
    for part in held.parts():
        if "exp_avg" in part.name:
            part.tensor.zero_()


def forgotten_moments(patch: MonkeyPatch) -> None:
    """Start a resumed run with fresh moments."""
    right = certify_worker.load_newest

    def loaded(run_dir, held, device):
        restored = right(run_dir, held, device)
        without_moments(held)
        return restored

    patch.setattr(certify_worker, "load_newest", loaded)


def local_norm(patch: MonkeyPatch) -> None:
    """Clip on each rank by the norm of its part."""
    right = step.guarded_update

    def clipped(optimizer, shares, norm, loss, clip_norm):
        own = squared_norm(shares).sqrt().float().to(norm.device)
        return right(optimizer, shares, own, loss, clip_norm)

    patch.setattr(step, "guarded_update", clipped)


def wrong_ring_order(patch: MonkeyPatch) -> None:
    """Take keys and values of earlier ranks for those of later ones, and the other way round."""
    right = context._pair_of
    patch.setattr(context, "_pair_of", lambda rank, source, seq: right(rank, 2 * rank - source, seq))


def no_copied_twins(patch: MonkeyPatch) -> None:
    """Do not copy the checkpoint's embedding to the last stage."""
    patch.setattr(store, "copy_twins", lambda shares, optimizer: None)


def no_shard_reduce(patch: MonkeyPatch) -> None:
    """Under ZeRO-3, keep on each rank its part of the local gradient."""

    def own_part(output, gradients, group, **options):
        output.copy_(gradients.view(group.size(), -1)[group.rank()].view_as(output))

    patch.setattr(gradient_sums, "reduce_scatter", own_part)


def mean_of_ranks(patch: MonkeyPatch) -> None:
    """Weight each data-parallel rank's mean equally, regardless of its number of samples."""
    right = step.compute_gradients

    def averaged(state, micro_batches, global_tokens, *measured):
        own_tokens = sum(tokens.numel() for tokens, _ in micro_batches)
        return right(state, micro_batches, own_tokens * state.mesh.layout.data_parallel_size, *measured)

    patch.setattr(step, "compute_gradients", averaged)
    patch.setattr(certify_worker, "compute_gradients", averaged)


def first_batch_size(patch: MonkeyPatch) -> None:
    """Divide the loss of every step by the samples of the first."""
    right, first = certify_worker.train_step, []

    def divided(state, micro_batches, *, global_tokens, clip_norm):
        first.append(global_tokens)
        return right(state, micro_batches, global_tokens=first[0], clip_norm=clip_norm)

    patch.setattr(certify_worker, "train_step", divided)


def steps_of_one_size(patch: MonkeyPatch) -> None:
    """Start each step where it would start if all earlier steps had been as large."""
    right = certify_worker.own_samples

    def misplaced(wanted, state, start, samples):
        return right(wanted, state, start - start % samples, samples)

    patch.setattr(certify_worker, "own_samples", misplaced)


def own_row_left_out(patch: MonkeyPatch) -> None:
    """Sum only what the other ranks have sent."""
    right = CompressedSum._sum_received

    def without_own(self, own, sent, wire):
        return right(self, own.zero_(), sent, wire)

    patch.setattr(CompressedSum, "_sum_received", without_own)


def lost_is_lost(patch: MonkeyPatch) -> None:
    """Drop what the encoding of gradients loses."""
    patch.setattr(Feedback, "keep", lambda self, start, lost: None)


def sums_give_nothing_back(patch: MonkeyPatch) -> None:
    """Drop what the encoding of the sums for all replicas loses."""
    patch.setattr(Feedback, "add", lambda self, start, lost: None)


def feedback_not_saved(patch: MonkeyPatch) -> None:
    """Save no feedback."""
    patch.setattr(Held, "feedback_parts", lambda self: [])


def moments_left_behind(patch: MonkeyPatch) -> None:
    """Move the weights into another layout, but start there with fresh moments."""
    right = relayout.reshard

    def moved(old, new, *others):
        done = right(old, new, *others)
        without_moments(new)
        return done

    patch.setattr(relayout, "reshard", moved)


def state_on_disk(patch: MonkeyPatch) -> None:
    """Write the state to disk when the layout changes."""
    right = Trainer._follow_layout

    def written(self, step):
        before = self.run.plan
        right(self, step)
        if self.run.plan is not before:
            self.checkpoints._saver.save(self.checkpoints._about(step, self.progress.samples))

    patch.setattr(Trainer, "_follow_layout", written)


def forgotten_layouts(patch: MonkeyPatch) -> None:
    """Ignore the layouts of earlier starts."""
    patch.setattr(Directives, "due_layout", lambda self, step: None)


def not_moved_back(patch: MonkeyPatch) -> None:
    """Move back only part of the state after a failed change."""
    right = reshard._move_back

    def partly(buckets, by_name, before, after):
        right(buckets, by_name, before, after)
        for name in before.parts.keys() & set(buckets[-1]):
            before.parts[name].tensor.zero_()

    patch.setattr(reshard, "_move_back", partly)


def moments_not_saved(patch: MonkeyPatch) -> None:
    """Save a checkpoint at a step's beginning without moments."""
    right = Checkpoints.save_independently

    def saved(self, step, samples, kept):
        without_moments(self._run.state.held)
        right(self, step, samples, kept)

    patch.setattr(Checkpoints, "save_independently", saved)


def lost_batch(patch: MonkeyPatch) -> None:
    """Skip the samples of the step in which memory ran out."""
    right = Trainer._restore

    def restored(self):
        progress = right(self)
        return replace(progress, samples=progress.samples + 8) if progress.samples else progress

    patch.setattr(Trainer, "_restore", restored)


def wrong_silu(patch: MonkeyPatch) -> None:
    """Compute a fused activation with a wrong gate."""
    from trainspec_cli.engine.kernels import frugal

    right = frugal.swiglu
    patch.setattr(frugal, "swiglu", lambda gate, up: right(gate * 1.001, up))


FAULTS = {
    fault.__name__: fault
    for fault in (
        wrong_gradient_scale,
        skipped_all_reduce,
        stale_embedding_gradient,
        lost_last_backward,
        forgotten_moments,
        local_norm,
        wrong_ring_order,
        no_copied_twins,
        no_shard_reduce,
        mean_of_ranks,
        first_batch_size,
        steps_of_one_size,
        own_row_left_out,
        lost_is_lost,
        sums_give_nothing_back,
        feedback_not_saved,
        moments_left_behind,
        state_on_disk,
        forgotten_layouts,
        not_moved_back,
        moments_not_saved,
        lost_batch,
        wrong_silu,
    )
}


def plant_and_serve() -> None:
    planted = json.loads(sys.argv.pop(1))
    sound = certify_worker.run_one

    def run_one(wanted, folder, name, device):
        with MonkeyPatch.context() as patch:
            if name in planted:
                FAULTS[planted[name]](patch)
            return sound(wanted, folder, name, device)

    certify_worker.run_one = run_one
    main()


if __name__ == "__main__":
    plant_and_serve()
