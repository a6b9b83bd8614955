"""`layout_worker.py FILE RANK`: one of two ranks that compute a step's gradients in each layout; beside them, alone.

For each layout it prints the loss, this rank's share of the squared norm, and the relative error (Euclidean) of the
gradient of each parameter that the rank holds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.engine.build.train_state import build_train_state
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.optim.optimizer import squared_norm
from trainspec_cli.engine.run.step import compute_gradients
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.lora import LoraSpec

CASES = {
    "ring": Case("dense", Layout(cp=2), micro_batch_size=8),
    "ulysses": Case("dense", Layout(cp=2, context_method="ulysses"), micro_batch_size=8),
    "zero 2": Case("dense", Layout(dp_shard=2, zero_stage=2), micro_batch_size=2),
    "zero 1": Case("dense", Layout(dp_shard=2, zero_stage=1), micro_batch_size=2, recompute="full"),
    "plain tensor": Case("tied", Layout(tp=2, sequence_parallel=False), micro_batch_size=8),
    "tensor of a hybrid": Case("hybrid", Layout(tp=2), micro_batch_size=8),
    "tensor of latent attention": Case("latent", Layout(tp=2), micro_batch_size=8),
    "tensor of sinks and biases": Case("windowed", Layout(tp=2, sequence_parallel=False), micro_batch_size=8),
    "interleaved": Case(
        "dense",
        Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2),
        micro_batch_size=2,
        offload="optimizer",
    ),
    "gpipe": Case("latent", Layout(pp=2, pipeline_schedule="gpipe", stage_layers=(3, 1)), micro_batch_size=4),
    "zero bubble": Case("windowed", Layout(pp=2, pipeline_schedule="zero_bubble"), micro_batch_size=2),
    "experts": Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2),
}
ADAPTED = {"zero 2", "interleaved", "plain tensor"}
"""Trained by adapters, each of them beside the whole weights."""


def found_in(case: Case, lora: LoraSpec) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss, this rank's share of the squared norm, and the gradients by name."""
    plan = build_plan(case, "cpu")
    plan = replace(plan, spec=replace(plan.spec, lora=lora))
    state = build_train_state(plan, torch.device("cpu"))
    for share in state.shares:
        if share.name.endswith("lora_b"):  # zeros would leave the other half without a gradient
            full = torch.empty(share.full_shape)
            full.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(len(share.name)))
            share.local.data.copy_(share.part_of(full))
    loss = compute_gradients(state, drawn_batch(plan, state, step=0), plan.tokens_per_step)
    squared = float(squared_norm(state.shares))
    gradients = {
        s.name: s.gather(s.parameter.grad) for s in unique_shares(state.shares) if s.parameter.grad is not None
    }
    return float(loss), squared, gradients


def runs() -> list[tuple[str, Case, LoraSpec]]:
    whole = [(name, case, LoraSpec()) for name, case in CASES.items()]
    return whole + [(f"adapters, {name}", case, LoraSpec(rank=4)) for name, case in CASES.items() if name in ADAPTED]


def main() -> None:
    torch.set_num_threads(1)
    file, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{file}.{rank}", rank=0, world_size=1)
    alone = {
        key: found_in(replace(Case(key[0], micro_batch_size=8)), key[1])
        for key in dict.fromkeys((case.family, lora) for _, case, lora in runs())
    }
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    found = {}
    for name, case, lora in runs():
        loss, squared, gradients = found_in(case, lora)
        wanted_loss, wanted_squared, wanted = alone[case.family, lora]
        found[name] = {
            "loss": loss / wanted_loss,
            "squared": squared / wanted_squared,
            "errors": {
                one: float((gradient - wanted[one]).norm() / wanted[one].norm()) for one, gradient in gradients.items()
            },
            "names": sorted(wanted),
        }
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
