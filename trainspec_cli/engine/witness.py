"""`torchrun -m trainspec_cli.engine.witness FOLDER`: what a plan's arithmetic comes to, for a judge outside.

Reads FOLDER/plan.json and FOLDER/case.json. Trains on tokens drawn from the seed; leaves FOLDER/gradients.stage*.npz
(every parameter's full gradient of the first step) and FOLDER/witness.json (losses, gradient norms, digests).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.build import Machinery, build_machinery, join_processes
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.optim.update import clear_gradients
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.engine.step import compute_gradients, train_step
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.model import ConvModel
from trainspec_cli.spec.plan import Plan


def main() -> None:
    folder = Path(sys.argv[1])
    plan = from_plain(Plan, read_json(folder / "plan.json"))
    steps = read_json(folder / "case.json")["steps"]
    built = build_machinery(plan, join_processes(plan.device))
    loss = compute_gradients(built, drawn_batch(plan, built, step=0), plan.tokens_per_step)
    write_gradients(built, folder)
    clear_gradients(built.shares)
    outcomes = [_step(plan, built, step) for step in range(steps)]
    dist.all_reduce(loss)
    told = {
        "loss": loss.item(),
        "losses": [outcome.loss.item() for outcome in outcomes],
        "grad_norms": [outcome.grad_norm.item() for outcome in outcomes],
        "weights_sha256": weights_sha256(built.shares, built.mesh.group("pp")),
    }
    if dist.get_rank() == 0:
        write_json(folder / "witness.json", told)
    dist.barrier()
    dist.destroy_process_group()


def _step(plan: Plan, built: Machinery, step: int) -> Any:
    return train_step(
        built,
        drawn_batch(plan, built, step),
        global_tokens=plan.tokens_per_step,
        clip_norm=plan.spec.optim.grad_clip_norm,
        stop_requested=False,
    )


def drawn_batch(plan: Plan, built: Machinery, step: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step's global batch, which is the same for every layout."""
    model, seq_len = plan.spec.model, plan.spec.data.seq_len
    assert not isinstance(model, ConvModel), "images have no tokens"
    generator = torch.Generator().manual_seed(plan.spec.train.seed * 1_000_003 + step)
    samples = plan.spec.batching.global_batch_size
    drawn = torch.randint(model.vocab_size, (samples, seq_len + 1), generator=generator)
    mine = drawn.view(-1, plan.layout.data_parallel_size, seq_len + 1)[:, built.mesh.data_rank]
    pairs = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in mine.split(plan.micro_batch_size)]
    return [
        held_part((tokens.to(built.device), targets.to(built.device)), built.positions_S) for tokens, targets in pairs
    ]


def write_gradients(built: Machinery, folder: Path) -> None:
    """Each pipeline rank writes its stages'; a parameter without a gradient is left out."""
    gradients: dict[str, np.ndarray] = {}
    for share in unique_shares(built.shares):
        if share.parameter.grad is not None:
            gradients[share.name] = share.gather(share.parameter.grad).float().cpu().numpy()
    if built.mesh.stage.get_local_rank() == 0:
        np.savez(folder / f"gradients.stage{built.mesh.rank('pp')}.npz", **gradients)  # type: ignore[arg-type]
    dist.barrier()


if __name__ == "__main__":
    main()
