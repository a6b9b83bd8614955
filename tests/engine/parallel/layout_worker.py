"""`layout_worker.py FILE RANK RANKS NAME...`: one of RANKS ranks that compute a step's gradients in each layout that
is named; and alone.

For each layout it prints the loss, this rank's share of the squared norm, the relative error (Euclidean) of the
gradient of each parameter that the rank holds and of all of them together, and its share of what tells their noise.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from lab.own_model import OWN, OWN_LOSS
from torch import Tensor

from trainspec_cli.balance.batch.division import Division, OwnSamples, even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.exchange import Tiers
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.data.loader import cut_micro_batches, positions_of
from trainspec_cli.engine.optim.optimizer import clear_gradients, squared_norm
from trainspec_cli.engine.parallel.noise import parts_of
from trainspec_cli.engine.run.step import compute_gradients
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import LoraSpec, ParameterGroup, WireFormats
from trainspec_cli.recipe.results.blueprint import Blueprint, BlueprintTier, Exchange
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import FAMILIES, LOSSES, SAMPLES

FAMILIES["own"], LOSSES["own"] = OWN, OWN_LOSS
FAMILIES["ahead"] = replace(FAMILIES["latent"], prediction_layers=2)
AHEAD = {
    "ahead, zero 3": Case("ahead", Layout(dp_shard=2), micro_batch_size=2, recompute="full"),
    "ahead, zero 1": Case("ahead", Layout(dp_shard=2, zero_stage=1), micro_batch_size=2, recompute="selective"),
    "ahead, tensor": Case("ahead", Layout(tp=2), micro_batch_size=8),
    "ahead, plain tensor": Case("ahead", Layout(tp=2, sequence_parallel=False), micro_batch_size=8),
    "ahead, pipeline": Case("ahead", Layout(pp=2), micro_batch_size=2),
    "ahead, split": Case("ahead", Layout(pp=2, pipeline_schedule="zbv"), micro_batch_size=4),
    "ahead, zero bubble": Case("ahead", Layout(pp=2, pipeline_schedule="zero_bubble"), micro_batch_size=2),
    "ahead, experts": Case("ahead", Layout(dp_shard=2, ep=2), micro_batch_size=2),
}
"""With layers that predict further tokens."""
CASES = {
    **AHEAD,
    "own split": Case("own", Layout(pp=2, pipeline_schedule="zbv"), micro_batch_size=2),
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
    "tied pipeline": Case("tied", Layout(pp=2), micro_batch_size=2),
    "tied split": Case("tied", Layout(pp=2, pipeline_schedule="zbv"), micro_batch_size=4),
    "compiled zbv": Case("dense", Layout(pp=2, pipeline_schedule="zbv"), micro_batch_size=2, compile=True),
    "compiled zero bubble": Case(
        "latent", Layout(pp=2, pipeline_schedule="zero_bubble"), micro_batch_size=2, compile=True, recompute="full"
    ),
    "experts": Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2),
}
ADAPTED = {"zero 2", "interleaved", "plain tensor"}
"""Trained by adapters, each in addition to the whole weights."""

IN_EXPERTS = LoraSpec(rank=8, targets=("q", "down", "experts.up", "experts.down"))
FEW_IN_EXPERTS = LoraSpec(rank=8, targets=("q", "experts.down"))
ATTENTION_ALONE = LoraSpec(rank=4, targets=("q",), base="nf4")
ADAPTED_EXPERTS = {
    "spread": (Case("moe", Layout(dp_shard=2, ep=2), micro_batch_size=2), IN_EXPERTS),
    "of latent attention": (Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2), FEW_IN_EXPERTS),
    "sharded": (Case("windowed", Layout(dp_shard=2), micro_batch_size=2, recompute="selective"), IN_EXPERTS),
    "zero 1": (Case("moe", Layout(dp_shard=2, zero_stage=1), micro_batch_size=2), FEW_IN_EXPERTS),
    "of tensors": (Case("moe", Layout(tp=2), micro_batch_size=8), IN_EXPERTS),
    "pipelined": (Case("moe", Layout(pp=2), micro_batch_size=2), IN_EXPERTS),
    "4 bits, spread": (Case("moe", Layout(dp_shard=2, ep=2), micro_batch_size=2), replace(IN_EXPERTS, base="nf4")),
    "4 bits, frozen": (Case("moe", Layout(dp_shard=2, ep=2), micro_batch_size=2), ATTENTION_ALONE),
    "4 bits, sharded": (Case("windowed", Layout(dp_shard=2), micro_batch_size=2), replace(IN_EXPERTS, base="nf4")),
    "groups": (Case("moe", Layout(dp_shard=4, ep=2), micro_batch_size=2), IN_EXPERTS),
}
"""Routed experts with adapters, with 4-bit matrices, or both, and their layouts."""
DORA = LoraSpec(rank=4, magnitude=True)
WITH_MAGNITUDES = {
    "zero 2": (Case("dense", Layout(dp_shard=2, zero_stage=2), micro_batch_size=2), DORA),
    "zero 3": (Case("parallel", Layout(dp_shard=2), micro_batch_size=2, recompute="full"), DORA),
    "tensor": (Case("dense", Layout(tp=2), micro_batch_size=8), DORA),
    "plain tensor": (Case("tied", Layout(tp=2, sequence_parallel=False), micro_batch_size=8), DORA),
    "latent attention": (Case("latent", Layout(tp=2), micro_batch_size=8), DORA),
    "4 bits": (Case("dense", Layout(dp_shard=2), micro_batch_size=2, recompute="selective"), replace(DORA, base="nf4")),
}
"""Adapters with magnitudes."""
FROZEN = tuple(ParameterGroup(match, frozen=True) for match in ("embed.*", "blocks.0.*", "*.k.weight", "*.experts.up"))
PARTLY_FROZEN = {
    "zero 1": Case("dense", Layout(dp_shard=2, zero_stage=1), micro_batch_size=2),
    "zero 2": Case("moe", Layout(dp_shard=2, zero_stage=2), micro_batch_size=2),
    "zero 3": Case("dense", Layout(dp_shard=2), micro_batch_size=2, recompute="full"),
    "tensor": Case("dense", Layout(tp=2), micro_batch_size=8),
    "pipeline": Case("dense", Layout(pp=2), micro_batch_size=2),
    "tied pipeline": Case("tied", Layout(pp=2), micro_batch_size=2),
    "experts": Case("moe", Layout(dp_shard=2, ep=2), micro_batch_size=2),
}
"""Only some parameters are trained."""

UNEVEN = {
    "uneven zero 3": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), (3.0, 1.0)),
    "uneven zero 1": (Case("windowed", Layout(dp_shard=2, zero_stage=1), micro_batch_size=3), (0.4, 0.6)),
    "uneven replicas": (Case("hybrid", Layout(dp_replicate=2), micro_batch_size=2), (1.0, 2.0)),
    "uneven experts": (Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2), (3.0, 1.0)),
    "uneven replicas of experts": (Case("moe", Layout(dp_replicate=2), micro_batch_size=2), (1.0, 3.0)),
    "empty zero 3": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), (1.0, 0.001)),
    "empty experts": (Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2), (1.0, 0.001)),
    "uneven own zero 3": (Case("own", Layout(dp_shard=2), micro_batch_size=3, recompute="selective"), (3.0, 1.0)),
    "even resnet": (Case("resnet", Layout(dp_replicate=2)), (1.0, 1.0)),
    "uneven resnet": (Case("resnet", Layout(dp_replicate=2)), (3.0, 1.0)),
    "even unet": (Case("unet", Layout(dp_replicate=2)), (1.0, 1.0)),
    "uneven unet": (Case("unet", Layout(dp_replicate=2)), (1.0, 7.0)),
}
"""The shares of the two ranks: "empty" ones leave one sample to the second, and three micro-batches without any."""


OF_FOUR = {
    "shares of tensors": (Case("dense", Layout(dp_shard=2, tp=2), micro_batch_size=2), (3.0, 1.0)),
    "replicas of tensors": (Case("tied", Layout(dp_replicate=2, tp=2, sequence_parallel=False)), (1.0, 0.001)),
    "shares of sequences": (Case("dense", Layout(dp_shard=2, cp=2), micro_batch_size=2), (3.0, 1.0)),
    "shares of tied pipelines": (Case("tied", Layout(dp_shard=2, pp=2, zero_stage=1), micro_batch_size=2), (3.0, 1.0)),
    "shares of split pipelines": (
        Case("tied", Layout(dp_shard=2, pp=2, zero_stage=1, pipeline_schedule="zbv"), micro_batch_size=2),
        (3.0, 1.0),
    ),
    "shares of pipelines": (Case("hybrid", Layout(dp_shard=2, pp=2, zero_stage=2), micro_batch_size=2), (1.0, 0.001)),
    "groups of experts": (Case("latent", Layout(dp_shard=4, ep=2), micro_batch_size=2), (4.0, 1.0, 2.0, 1.0)),
    "experts of tensors": (Case("latent", Layout(dp_shard=2, tp=2, ep=2), micro_batch_size=2), (3.0, 1.0)),
    "replicas of experts": (Case("latent", Layout(dp_replicate=2, dp_shard=2, ep=2), micro_batch_size=2), ()),
    "replicas on two nodes": (Case("tied", Layout(dp_replicate=4), micro_batch_size=2), (3.0, 1.0, 2.0, 1.0)),
}
"""Layouts of four ranks, with the shares of their data-parallel ones."""

COMPRESSED = {
    "bf16 experts": (Case("latent", Layout(dp_shard=2, ep=2), micro_batch_size=2), WireFormats("bf16")),
    "int8 zero 3": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), WireFormats("int8")),
    "int4 zero 1": (Case("dense", Layout(dp_shard=2, zero_stage=1), micro_batch_size=2), WireFormats("int4")),
    "int4 replicas": (Case("hybrid", Layout(dp_replicate=2), micro_batch_size=2), WireFormats("int4")),
    "int8 resnet": (Case("resnet", Layout(dp_replicate=2)), WireFormats("int8")),
    "int8 parameters": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), WireFormats(parameters="int8")),
    "bf16 parameters": (Case("dense", Layout(dp_shard=2), micro_batch_size=2), WireFormats(parameters="bf16")),
}
"""Gradients, or parameters, travel in fewer bits; the first rank has three quarters of the samples."""

NOISY = {
    *OF_FOUR,
    *("zero 2", "zero 1", "uneven zero 3", "uneven replicas", "empty zero 3"),
    *("ring", "ulysses", "plain tensor", "tensor of a hybrid", "tensor of latent attention", "interleaved"),
    *("zero bubble", "tied pipeline", "tied split", "adapters, plain tensor"),
    *("experts", "uneven experts", "empty experts", "uneven replicas of experts", "adapters of experts, groups"),
}
"""The noise of their gradients is judged: exchanged after every backward, or once; summed over shards, or replicas; of
parts that ranks of cp, tp and pp compute together, and of experts that data-parallel ranks train together."""


OVERLAPPED = {
    *(name for name, (case, _) in OF_FOUR.items() if case.layout.data_parallel_size > 1),
    *("zero 2", "zero 1", "uneven zero 3", "uneven replicas", "empty zero 3", "uneven experts"),
    *("uneven replicas of experts", "adapters, zero 2", "int8 zero 3", "int4 zero 1", "int4 replicas", "even resnet"),
}
"""Their gradients are compared bit by bit: summed during the backward, and each waited for; in buckets of each size."""


IN_TIERS = Blueprint(
    *("two nodes", (BlueprintTier("scale-up domain", 2, 2, 8.0), BlueprintTier("network", 1, 4, 1.0))),
    *((), (), 1.0, 1.0),
    (Exchange("dp", "all_reduce", 4, "network", 1.0, 1.0, "hierarchical", 1.0, 1.0),),
)
"""Four replicas are two on each of two nodes; of two ranks on one node there is nothing to split."""


@dataclass(frozen=True)
class Run:
    case: Case
    lora: LoraSpec = field(default_factory=LoraSpec)
    weights: tuple[float, ...] = ()
    groups: tuple[ParameterGroup, ...] = ()
    comm: WireFormats = field(default_factory=WireFormats)


def spec_of(run: Run, plan: Plan) -> RunSpec:
    return replace(plan.spec, lora=run.lora, optim=replace(plan.spec.optim, groups=run.groups))


def found_in(run: Run) -> tuple[float, float, dict[str, Tensor], list[float]]:
    """Return the loss, this rank's share of the squared norm, the gradients by name, and this rank's share of what
    `NoiseProbe` adds up."""
    plan = build_plan(run.case, "cpu")
    plan = replace(plan, spec=spec_of(run, plan), comm=run.comm, blueprint=IN_TIERS)
    if run.weights and FAMILIES[run.case.family].unit == "samples":
        plan = replace(plan, micro_batch_size=SAMPLES)  # batch norm speaks of all samples of one micro-batch
    state = build_train_state(plan, torch.device("cpu"))
    fill_zeros(state)
    division = division_of(run, plan)
    own = division.of_rank(state.mesh.data_rank, 0, SAMPLES)
    parts = parts_of(division, state.mesh, SAMPLES, SAMPLES)
    loss = compute_gradients(state, drawn_batch(plan.spec, state, own), plan.tokens_per_step, parts)
    squared = float(squared_norm(state.shares))
    gradients = {
        s.name: s.gather(s.parameter.grad) for s in unique_shares(state.shares) if s.parameter.grad is not None
    }
    return float(loss), squared, gradients, state.stages.noise.sums.tolist()


def same_bits(run: Run) -> dict[str, bool]:
    """Return whether gradients are those of steps that wait for each exchange, with each size of buckets."""
    plan = replace(build_plan(run.case, "cpu"), comm=run.comm, blueprint=IN_TIERS)
    plan = replace(plan, spec=spec_of(run, plan))
    state = build_train_state(plan, torch.device("cpu"))
    fill_zeros(state)
    own = division_of(run, plan).of_rank(state.mesh.data_rank, 0, SAMPLES)
    batch, sums, found = drawn_batch(plan.spec, state, own), state.sums, {}
    assert sums is not None
    for name, sums.holds_back, sums.bucket_bytes in (
        ("waited for", True, 0),
        ("overlapped", False, 0),
        ("pairs", False, 2**17),
        ("all at once", False, 2**40),
    ):
        clear_gradients(state.shares)
        state.compression.discard()
        loss = compute_gradients(state, batch, plan.tokens_per_step)
        gradients = [share.gradient for share in state.shares if share.gradient is not None]
        digest = hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in gradients))
        found[name] = (float(loss), digest.hexdigest())
    return {name: one == found["waited for"] for name, one in found.items()}


def fill_zeros(state: TrainState) -> None:
    """Zeros would leave other parameters without a gradient."""
    for share in state.shares:
        if share.name.endswith(("lora_b", "widen.norm.weight")):
            full = torch.empty(share.full_shape)
            full.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(len(share.name)))
            share.local.data.copy_(share.part_of(full))


def division_of(run: Run, plan: Plan) -> Division:
    division = even_division_of(plan)
    return replace(division, weights=run.weights) if run.weights else division


def noise_alone(run: Run) -> list[float]:
    """Return what the probes of all ranks add up, part after part in one process."""
    plan, layout = build_plan(replace(run.case, layout=Layout(), recompute="none"), "cpu"), run.case.layout
    plan = replace(plan, spec=spec_of(run, plan))
    division = division_of(run, build_plan(run.case, "cpu"))
    state = build_train_state(plan, torch.device("cpu"))
    fill_zeros(state)
    (whole,) = drawn_batch(plan.spec, state, OwnSamples((0,), (SAMPLES,)))
    experts = {id(parameter) for module in state.parts[0].expert_modules() for parameter in module.experts.parameters()}
    spread = [share for share in state.shares if layout.ep > 1 and id(share.parameter) in experts]
    others = [share for share in state.shares if share not in spread]
    own = []
    for rank in range(layout.data_parallel_size):
        samples = division.of_rank(rank, 0, SAMPLES)
        micro_batches = cut_micro_batches(tuple(tensor[positions_of(samples)] for tensor in whole), samples)
        own.append([[one] for one in micro_batches] if layout.exchanges_every_backward else [micro_batches])
    together = max(1, layout.ep // (layout.cp * layout.tp))
    of_experts = [
        [[one for part in turn for one in part] for turn in zip(*own[first : first + together], strict=True)]
        for first in range(0, len(own), together)
    ]
    sums = [0.0, 0.0, 0.0, 0.0]
    for place, (shares, parts) in enumerate(((others, own), (spread, of_experts))):
        for part in (part for of_rank in parts for part in of_rank):
            if samples := sum(len(micro_batch[0]) for micro_batch in part):
                clear_gradients(state.shares)
                compute_gradients(state, part, plan.tokens_per_step)
                sums[place] += float(squared_norm(shares)) * SAMPLES / samples
                sums[2 + place] += 1
    return sums if spread else [*sums[:3], 0.0]


def runs() -> dict[str, Run]:
    whole = {name: Run(case) for name, case in CASES.items()}
    adapted = {f"adapters, {name}": Run(CASES[name], LoraSpec(rank=4)) for name in CASES if name in ADAPTED}
    adapted |= {f"adapters of experts, {name}": Run(*run) for name, run in ADAPTED_EXPERTS.items()}
    adapted |= {f"magnitudes, {name}": Run(*run) for name, run in WITH_MAGNITUDES.items()}
    adapted |= {f"frozen, {name}": Run(case, groups=FROZEN) for name, case in PARTLY_FROZEN.items()}
    divided = {name: Run(case, weights=weights) for name, (case, weights) in (UNEVEN | OF_FOUR).items()}
    compressed = {name: Run(case, weights=(3.0, 1.0), comm=comm) for name, (case, comm) in COMPRESSED.items()}
    return whole | adapted | divided | compressed


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def count_tiered_sums() -> list[int]:
    """Return a list that grows by the values of each sum that is made inside nodes first."""
    sums, sum_ = list[int](), Tiers.sum_

    def counted(self: Tiers, x: Tensor) -> None:
        sums.append(x.numel())
        sum_(self, x)

    Tiers.sum_ = counted  # type: ignore[method-assign]
    return sums


def main() -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    tiered = count_tiered_sums()
    file, rank, ranks, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    every = runs()
    wanted_runs = {name: every[name] for name in names}
    dist.init_process_group("gloo", init_method=f"file://{file}.{rank}", rank=0, world_size=1)
    alone = {
        (family, lora, groups): found_in(Run(Case(family, micro_batch_size=SAMPLES), lora, groups=groups))
        for family, lora, groups in dict.fromkeys(
            (run.case.family, run.lora, run.groups) for run in wanted_runs.values()
        )
    }
    noisy = [name for name in wanted_runs if name in NOISY]
    noise = {name: noise_alone(wanted_runs[name]) for name in noisy[rank::ranks]}  # one rank for each is enough
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    found = {}
    for name, run in wanted_runs.items():
        tiered.clear()
        loss, squared, gradients, noise_share = found_in(run)
        wanted_loss, wanted_squared, wanted, _ = alone[run.case.family, run.lora, run.groups]
        found[name] = {
            "loss": loss / wanted_loss,
            "squared": squared / wanted_squared,
            "errors": {
                one: float((gradient - wanted[one]).norm() / wanted[one].norm()) for one, gradient in gradients.items()
            },
            "error": float(norm_of(gradients[one] - wanted[one] for one in gradients))
            / float(norm_of(wanted[one] for one in gradients)),
            "names": sorted(wanted),
            "tiered_sums": len(tiered),
        }
        if name in OVERLAPPED:
            found[name]["same_bits"] = same_bits(run)
        if name in NOISY:
            found[name]["noise"] = noise_share
            found[name]["noise_alone"] = noise.get(name)
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
