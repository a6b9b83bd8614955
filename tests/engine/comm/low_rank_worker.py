"""`low_rank_worker.py FILE RANK`: one of two ranks that train a small decoder with gradients in low rank.

Prints the bytes that the kernel has counted for gradients in a step, what they are to be, losses, and a digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.optim.optimizer import set_learning_rate
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.planner.workload.factors import block_factors
from trainspec_cli.spec.recipe.comm import WireFormats
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.model import DecoderModel

MODEL = DecoderModel(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=160, vocab_size=64
)
RANK, STEPS, SAMPLES, SEQ_LEN = 2, 12, 4, 16


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    plan = build_plan(Case("dense", Layout(dp_replicate=2), optimizer="adamw"), "cpu")
    comm = WireFormats("low_rank", across_nodes="low_rank", rank=RANK)
    plan = replace(plan, spec=replace(plan.spec, model=MODEL), comm=comm)
    state = build_train_state(plan, torch.device("cpu"))
    state.wire.find_connections()
    set_learning_rate(state.optimizer, 3e-3)
    tokens = torch.randint(0, 64, (2, SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))[
        dist.get_rank()
    ]
    batch = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    losses = []
    for _ in range(STEPS):
        outcome = train_step(state, batch, global_tokens=2 * SAMPLES * SEQ_LEN, clip_norm=1.0)
        assert outcome is not None
        losses.append(outcome.loss.item())
    values = sum(share.local.numel() for share in state.shares)
    factors = block_factors(MODEL, RANK)
    factored, sent = (MODEL.num_layers * number for number in (factors.values, factors.left + factors.right))
    weights = b"".join(share.local.detach().numpy().tobytes() for share in state.shares)
    found = {
        "sent_bytes": state.wire.totals()["gradients"] / STEPS,
        "wanted_bytes": 4 * (values - factored + sent),
        "full_bytes": 4 * values,
        "exchanges": 2 * (2 * MODEL.num_layers + 1),
        "feedback_values": sum(int(kept.settled.count_nonzero()) for kept in state.compression.feedbacks.values()),
        "planned_values": factored + MODEL.num_layers * factors.right,
        "losses": [losses[0], losses[-1]],
        "digest": hashlib.sha256(weights).hexdigest(),
    }
    dist.barrier()
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
