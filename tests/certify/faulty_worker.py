"""The certify worker with faults planted: `faulty_worker.py FAULTS certify_worker FOLDER`; FAULTS: {run's name: fault}.

Runs that FAULTS does not name are sound, before and after those that it does.
"""

from __future__ import annotations

import json
import sys

from pytest import MonkeyPatch

from trainspec_cli.engine.checkpoint import store
from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.optim.optimizer import squared_norm
from trainspec_cli.engine.parallel import context, data_parallel
from trainspec_cli.engine.run import pipeline_run, step
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
    """Let replicas keep their own gradients."""
    patch.setattr(exchange.Peers, "sum_", lambda self, x: x)


def stale_embedding_gradient(patch: MonkeyPatch) -> None:
    """Leave unsummed what the two ends of a pipeline owe each other for a tied embedding."""
    patch.setattr(step, "sum_late", lambda late: None)


def lost_last_backward(patch: MonkeyPatch) -> None:
    """Exchange the last micro-batch's gradients before they are there."""
    right = pipeline_run.exchange_in_backward

    def too_early(model, exchange):
        return right(model, False)

    patch.setattr(pipeline_run, "exchange_in_backward", too_early)
    patch.setattr(data_parallel, "exchange_in_backward", too_early)


def forgotten_moments(patch: MonkeyPatch) -> None:
    """Begin a resumed run with fresh moments."""
    right = certify_worker.load_newest

    def without_moments(run_dir, held, device):
        restored = right(run_dir, held, device)
        for part in held.parts():
            if "exp_avg" in part.name:
                part.tensor.zero_()
        return restored

    patch.setattr(certify_worker, "load_newest", without_moments)


def local_norm(patch: MonkeyPatch) -> None:
    """Clip on each rank by the norm of the parts that it holds."""
    right = step.guarded_update

    def clipped(optimizer, shares, norm, loss, clip_norm):
        own = squared_norm(shares).sqrt().float().to(norm.device)
        return right(optimizer, shares, own, loss, clip_norm)

    patch.setattr(step, "guarded_update", clipped)


def wrong_ring_order(patch: MonkeyPatch) -> None:
    """Take keys and values of earlier ranks for those of later ones, and the other way round."""
    right = context._block
    patch.setattr(context, "_block", lambda rank, source, seq: right(rank, 2 * rank - source, seq))


def no_copied_twins(patch: MonkeyPatch) -> None:
    """Leave the last stage's embedding as it was built, whatever the checkpoint holds."""
    patch.setattr(store, "copy_twins", lambda shares, optimizer: None)


def no_shard_reduce(patch: MonkeyPatch) -> None:
    """Keep on each rank its own part of its own gradient, under ZeRO-3."""

    def own_part(output, gradients, group, **options):
        output.copy_(gradients.view(group.size(), -1)[group.rank()].view_as(output))

    patch.setattr(data_parallel, "reduce_scatter", own_part)


def mean_of_ranks(patch: MonkeyPatch) -> None:
    """Weigh each data-parallel rank's mean alike, however many samples it has."""
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
    """Begin each step where it would begin if all steps before it had been as large."""
    right = certify_worker.own_samples

    def misplaced(wanted, state, start, samples):
        return right(wanted, state, start - start % samples, samples)

    patch.setattr(certify_worker, "own_samples", misplaced)


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
