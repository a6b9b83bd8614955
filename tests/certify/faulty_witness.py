"""The engine's witness with a fault planted: `faulty_witness.py FAULT FOLDER`."""

from __future__ import annotations

import sys

from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.parallel import data_parallel
from trainspec_cli.engine.run import pipeline_run, step
from trainspec_cli.engine.tools import certify_worker as witness


def wrong_gradient_scale() -> None:
    """A mean over ranks where a sum belongs."""
    right = step.compute_gradients

    def scaled(state, micro_batches, global_tokens):
        return right(state, micro_batches, global_tokens * state.mesh.layout.data_parallel_size)

    witness.compute_gradients = step.compute_gradients = scaled


def skipped_all_reduce() -> None:
    """Replicas keep their own gradients."""
    exchange.Peers.sum_ = lambda self, x: x


def stale_embedding_gradient() -> None:
    """What the two ends of a pipeline owe each other for a tied embedding is not summed."""
    step.sum_late = lambda late: None


def lost_last_backward() -> None:
    """The last micro-batch's gradients are exchanged before they are there."""
    right = pipeline_run.exchange_in_backward
    pipeline_run.exchange_in_backward = lambda model, exchange: right(model, False)
    data_parallel.exchange_in_backward = pipeline_run.exchange_in_backward


def forgotten_moments() -> None:
    """A resumed run begins with fresh moments."""
    right = witness.load_newest

    def without_moments(run_dir, held, device):
        restored = right(run_dir, held, device)
        for part in held.parts():
            if "exp_avg" in part.name:
                part.tensor.zero_()
        return restored

    witness.load_newest = without_moments


FAULTS = {
    fault.__name__: fault
    for fault in (
        wrong_gradient_scale,
        skipped_all_reduce,
        stale_embedding_gradient,
        lost_last_backward,
        forgotten_moments,
    )
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    witness.main()
