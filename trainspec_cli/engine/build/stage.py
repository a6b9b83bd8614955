"""One stage of a plan's model, spread over the axes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainspec_cli.engine.build.exchanges import Exchanges
from trainspec_cli.engine.build.kernel_loading import apply_kernels
from trainspec_cli.engine.build.materialise import build_model
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.comm.codec import PARAMETER_CODECS, Codec
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.mesh import Mesh
from trainspec_cli.engine.models.experts import sort_by_expert
from trainspec_cli.engine.models.lora import apply_lora
from trainspec_cli.engine.models.quantised import place_quantised
from trainspec_cli.engine.parallel.balance import routers_of, sum_over_sequence
from trainspec_cli.engine.parallel.context import apply_context_parallel
from trainspec_cli.engine.parallel.data_parallel import DataParallel, apply_data_parallel
from trainspec_cli.engine.parallel.expert import apply_expert_parallel
from trainspec_cli.engine.parallel.float8 import apply_float8
from trainspec_cli.engine.parallel.noise import Held as HeldGradient
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.recompute import apply_recompute
from trainspec_cli.engine.parallel.tensor import apply_tensor_parallel, partial_parameters
from trainspec_cli.engine.shares import Cut
from trainspec_cli.plan.pipeline import cut_layers
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan


def spread_stage(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, noise: NoiseProbe, stage: int
) -> tuple[Any, dict[str, Cut], list[str]]:
    """One stage of the model, spread over the mesh's other axes.

    -> (the module, which parameters are cut how, names of those whose gradients are partial over tp).
    """
    with torch.device("meta"):
        part = build_model(plan.spec.model, plan.spec.data.seq_len, layers_of(plan, stage))
        apply_lora(part, plan.spec.lora)
    apply_kernels(part, plan.kernels)
    if plan.spec.precision.matmul == "fp8":
        apply_float8(part.block_modules(), emulate=plan.device == "cpu")
    cuts, partial = _cut(part, plan.layout, mesh, exchanges)
    place_quantised(part, cuts)
    for norm in part.norm_modules():
        norm.ranks = Peers(mesh.stage.get_group(), exchanges.clock.collective)
    apply_recompute(part.block_modules(), plan.recompute, compiled=plan.spec.compile)
    if plan.spec.compile:
        for module in part.compile_modules():
            module.compile()
    experts = [module.experts for module in part.expert_modules()]
    expert_shard = mesh.experts["expert_shard"] if mesh.experts else None
    held = {name: _held(plan, name, cuts, partial) for name, _ in part.named_parameters()}
    how = _data_parallel(plan, mesh, exchanges, noise, held, f"stage{stage}")
    apply_data_parallel(part, experts, mesh.shard, expert_shard, how)
    return part, cuts, partial


def _held(plan: Plan, name: str, cuts: Mapping[str, Cut], partial: Sequence[str]) -> HeldGradient:
    """Return how the ranks of tp, or the pipeline's ends, hold the gradient of a parameter."""
    if is_twin(plan, name):
        return "twin"
    if name in partial:
        return "partial"
    return "own" if name in cuts or plan.layout.tp == 1 else "copied"


def _cut(part: Any, layout: Layout, mesh: Mesh, exchanges: Exchanges) -> tuple[dict[str, Cut], list[str]]:
    """Expert, tensor and context parallelism; -> (cuts, names of partial parameters)."""
    cp, tp = (exchanges.peers_along(mesh, axis) for axis in ("cp", "tp"))
    cuts: dict[str, Cut] = {}
    partial: list[str] = []
    if layout.ep > 1:
        group = mesh.expert_group("ep")
        cuts |= apply_expert_parallel(part, Peers(group, exchanges.links.of("ep", group)), sort_by_expert)
    if layout.tp > 1:
        cuts |= apply_tensor_parallel(part, tp, sequence_parallel=layout.sequence_parallel)
        partial = partial_parameters(part, sequence_parallel=layout.sequence_parallel, cuts=cuts)
    if layout.cp > 1:
        apply_context_parallel(part, cp, layout.context_method)
    if layout.cp > 1 or layout.tp > 1:
        sum_over_sequence(routers_of([part]), [cp, tp])
    return cuts, partial


def _data_parallel(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, noise: NoiseProbe, held: Mapping[str, HeldGradient], name: str
) -> DataParallel:
    return DataParallel(
        compute=DTYPES[plan.compute],
        reduce=DTYPES[plan.spec.precision.reduce],
        free_after_forward=not plan.layout.keeps_parameters,
        offload=plan.offload != "none",
        replicas=replace(exchanges.gradient_peers(mesh, "dp_replicate"), tiers=exchanges.replica_tiers),
        time=exchanges.of,
        noise=noise,
        held_by=held.__getitem__,
        compression=exchanges.compression,
        parameter_codec=_parameter_codec(plan),
        sums=exchanges.sums,
        route=exchanges.routes.get,
        losses=exchanges.losses,
        name=name,
    )


def _parameter_codec(plan: Plan) -> Codec | None:
    """Return None where parameters travel as they are computed with."""
    chosen = plan.comm.parameters
    return None if chosen in ("full", plan.compute) else PARAMETER_CODECS[chosen]


def layers_of(plan: Plan, stage: int) -> range | None:
    """Return the layers of `stage`; None stands for all of them."""
    if plan.layout.num_stages == 1:
        return None
    return cut_layers(plan.spec.model.num_layers, plan.layout)[stage]


def is_twin(plan: Plan, name: str) -> bool:
    return plan.spec.model.tied_embeddings and name == "embed.weight" and plan.layout.num_stages > 1
