"""The engine's witness with faults planted: `faulty_witness.py FAULTS FOLDER`, FAULTS being JSON {run's name: fault}.

Runs that FAULTS does not name are sound, before and after those that it does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from pytest import MonkeyPatch

from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.parallel import data_parallel
from trainspec_cli.engine.run import pipeline_run, step
from trainspec_cli.engine.tools import certify_worker as witness


def wrong_gradient_scale(patch: MonkeyPatch) -> None:
    """Take a mean over ranks where a sum belongs."""
    right = step.compute_gradients

    def scaled(state, micro_batches, global_tokens):
        return right(state, micro_batches, global_tokens * state.mesh.layout.data_parallel_size)

    patch.setattr(step, "compute_gradients", scaled)
    patch.setattr(witness, "compute_gradients", scaled)


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
    right = witness.load_newest

    def without_moments(run_dir, held, device):
        restored = right(run_dir, held, device)
        for part in held.parts():
            if "exp_avg" in part.name:
                part.tensor.zero_()
        return restored

    patch.setattr(witness, "load_newest", without_moments)


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


def main() -> None:
    planted = json.loads(sys.argv.pop(1))
    sound = witness.testify

    def testify(folder: Path, device: torch.device) -> None:
        with MonkeyPatch.context() as patch:
            if folder.name in planted:
                FAULTS[planted[folder.name]](patch)
            sound(folder, device)

    witness.testify = testify
    witness.main()


if __name__ == "__main__":
    main()
