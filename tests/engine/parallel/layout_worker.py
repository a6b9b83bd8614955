"""`layout_worker.py FILE RANK`: one of two ranks that compute a step's gradients in each layout; beside them, alone.

For each layout it prints the loss, this rank's share of the squared norm, and the relative error (Euclidean) of the
gradient of each parameter that the rank holds, and of all of them together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.certify.families import FAMILIES, SAMPLES
from trainspec_cli.engine.build.train_state import build_train_state
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.data.loader import cut_micro_batches, positions_of
from trainspec_cli.engine.optim.optimizer import clear_gradients, squared_norm
from trainspec_cli.engine.run.step import compute_gradients
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.policy.division import Division, OwnSamples, even_division_of
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.results.plan import Plan

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

UNEVEN = {
    "uneven zero 3": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), (3.0, 1.0)),
    "uneven zero 1": (Case("windowed", Layout(dp_shard=2, zero_stage=1), micro_batch_size=3), (0.4, 0.6)),
    "uneven replicas": (Case("hybrid", Layout(dp_replicate=2), micro_batch_size=2), (1.0, 2.0)),
    "uneven experts": (Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2), (3.0, 1.0)),
    "uneven replicas of experts": (Case("moe", Layout(dp_replicate=2), micro_batch_size=2), (1.0, 3.0)),
    "empty zero 3": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), (1.0, 0.001)),
    "empty experts": (Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2), (1.0, 0.001)),
    "even resnet": (Case("resnet", Layout(dp_replicate=2)), (1.0, 1.0)),
    "uneven resnet": (Case("resnet", Layout(dp_replicate=2)), (3.0, 1.0)),
    "even unet": (Case("unet", Layout(dp_replicate=2)), (1.0, 1.0)),
    "uneven unet": (Case("unet", Layout(dp_replicate=2)), (1.0, 7.0)),
}
"""The shares of the two ranks: "empty" ones leave one sample to the second, and three micro-batches without any."""


NOISY = {"zero 2", "zero 1", "uneven zero 3", "uneven replicas", "empty zero 3"}
"""The noise of their gradients is judged: exchanged after every backward, or once; summed over shards, or replicas."""


@dataclass(frozen=True)
class Run:
    case: Case
    lora: LoraSpec = field(default_factory=LoraSpec)
    weights: tuple[float, ...] = ()


def found_in(run: Run) -> tuple[float, float, dict[str, Tensor], float]:
    """Return the loss, this rank's share of the squared norm, the gradients by name, and this rank's share of the sum
    of w |g|^2 over the parts w of the step, whose mean gradients are g."""
    plan = build_plan(run.case, "cpu")
    plan = replace(plan, spec=replace(plan.spec, lora=run.lora))
    if run.weights and FAMILIES[run.case.family].unit == "samples":
        plan = replace(plan, micro_batch_size=SAMPLES)  # batch norm speaks of all samples of one micro-batch
    state = build_train_state(plan, torch.device("cpu"))
    for share in state.shares:
        if share.name.endswith(("lora_b", "widen.norm.weight")):  # zeros would leave others without a gradient
            full = torch.empty(share.full_shape)
            full.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(len(share.name)))
            share.local.data.copy_(share.part_of(full))
    own = division_of(run, plan).of_rank(state.mesh.data_rank, 0, SAMPLES)
    loss = compute_gradients(state, drawn_batch(plan.spec, state, own), plan.tokens_per_step, SAMPLES)
    squared = float(squared_norm(state.shares))
    gradients = {
        s.name: s.gather(s.parameter.grad) for s in unique_shares(state.shares) if s.parameter.grad is not None
    }
    return float(loss), squared, gradients, float(state.stages.noise.take())


def division_of(run: Run, plan: Plan) -> Division:
    division = even_division_of(plan)
    return replace(division, weights=run.weights) if run.weights else division


def noise_alone(run: Run) -> float:
    """Return the sum of w |g|^2, part after part in one process."""
    plan, layout = build_plan(replace(run.case, layout=Layout(), recompute="none"), "cpu"), run.case.layout
    division = division_of(run, build_plan(run.case, "cpu"))
    state = build_train_state(plan, torch.device("cpu"))
    (whole,) = drawn_batch(plan.spec, state, OwnSamples((0,), (SAMPLES,)))
    total = 0.0
    for rank in range(layout.data_parallel_size):
        own = division.of_rank(rank, 0, SAMPLES)
        micro_batches = cut_micro_batches(tuple(tensor[positions_of(own)] for tensor in whole), own)
        parts = [[one] for one in micro_batches] if layout.exchanges_every_backward else [micro_batches]
        for part in parts:
            if samples := sum(len(micro_batch[0]) for micro_batch in part):
                clear_gradients(state.shares)
                compute_gradients(state, part, plan.tokens_per_step)
                total += float(squared_norm(state.shares)) * SAMPLES / samples
    return total


def runs() -> dict[str, Run]:
    whole = {name: Run(case) for name, case in CASES.items()}
    adapted = {f"adapters, {name}": Run(CASES[name], LoraSpec(rank=4)) for name in CASES if name in ADAPTED}
    return whole | adapted | {name: Run(case, weights=weights) for name, (case, weights) in UNEVEN.items()}


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def main() -> None:
    torch.set_num_threads(1)
    file, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{file}.{rank}", rank=0, world_size=1)
    alone = {
        (family, lora): found_in(Run(Case(family, micro_batch_size=SAMPLES), lora))
        for family, lora in dict.fromkeys((run.case.family, run.lora) for run in runs().values())
    }
    noise = {name: noise_alone(run) for name, run in runs().items() if name in NOISY}
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    found = {}
    for name, run in runs().items():
        loss, squared, gradients, noise_share = found_in(run)
        wanted_loss, wanted_squared, wanted, _ = alone[run.case.family, run.lora]
        found[name] = {
            "loss": loss / wanted_loss,
            "squared": squared / wanted_squared,
            "errors": {
                one: float((gradient - wanted[one]).norm() / wanted[one].norm()) for one, gradient in gradients.items()
            },
            "error": float(norm_of(gradients[one] - wanted[one] for one in gradients))
            / float(norm_of(wanted[one] for one in gradients)),
            "names": sorted(wanted),
        }
        if name in NOISY:
            found[name]["noise"] = noise_share / noise[name]
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
