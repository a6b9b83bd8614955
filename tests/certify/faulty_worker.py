"""The certify worker with a fault planted: `faulty_worker.py FAULT certify_worker FOLDER`."""

from __future__ import annotations

import sys

from trainspec_cli.engine.checkpoint import store
from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.optim import update
from trainspec_cli.engine.parallel import context, data_parallel
from trainspec_cli.engine.run import passes, step
from trainspec_cli.engine.tools import certify_worker
from trainspec_cli.engine.tools.__main__ import main


def wrong_gradient_scale() -> None:
    """A mean over ranks where a sum belongs."""
    right = step.compute_gradients

    def scaled(built, micro_batches, global_tokens):
        return right(built, micro_batches, global_tokens * built.mesh.layout.data_parallel_size)

    certify_worker.compute_gradients = step.compute_gradients = scaled


def skipped_all_reduce() -> None:
    """Replicas keep their own gradients."""
    exchange.Peers.sum_ = lambda self, x: x


def stale_embedding_gradient() -> None:
    """What the two ends of a pipeline owe each other for a tied embedding is not summed."""
    step.sum_late = lambda late: None


def lost_last_backward() -> None:
    """The last micro-batch's gradients are exchanged before they are there."""
    right = passes.exchange_in_backward
    passes.exchange_in_backward = lambda model, exchange: right(model, False)
    data_parallel.exchange_in_backward = passes.exchange_in_backward


def forgotten_moments() -> None:
    """A resumed run begins with fresh moments."""
    right = certify_worker.load_newest

    def without_moments(run_dir, held, device):
        restored = right(run_dir, held, device)
        for part in held.parts():
            if "exp_avg" in part.name:
                part.tensor.zero_()
        return restored

    certify_worker.load_newest = without_moments


def local_norm() -> None:
    """Each rank clips by the norm of the parts that it holds."""
    right = step.guarded_update

    def clipped(optimizer, shares, norm, loss, clip_norm):
        own = update.squared_norm(shares).sqrt().float().to(norm.device)
        return right(optimizer, shares, own, loss, clip_norm)

    step.guarded_update = clipped


def wrong_ring_order() -> None:
    """Keys and values that come from an earlier rank are taken for a later one's, and the other way round."""
    right = context._block
    context._block = lambda rank, source, seq: right(rank, rank if source == rank else 2 * rank - source, seq)


def no_copied_twins() -> None:
    """The pipeline's last stage keeps the embedding that it was built with, whatever the checkpoint holds."""
    store.copy_twins = lambda shares, optimizer: None


def no_shard_reduce() -> None:
    """ZeRO-3 keeps each rank's own part of its own gradient."""

    def own_part(output, gradients, group, **options):
        output.copy_(gradients.view(group.size(), -1)[group.rank()].view_as(output))

    data_parallel.reduce_scatter = own_part


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
    )
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
