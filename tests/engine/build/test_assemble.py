"""The stages of each rank of a layout, the number of ranks that hold its parts, and the sums that are made late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainspec_cli.engine.build.assemble import build_train_state, load_kernel
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.models.lora import QuantisedLinear
from trainspec_cli.engine.parallel.context import RingCore, UlyssesCore
from trainspec_cli.engine.tools.trace import fake_world
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import ContextMethod, Layout
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan

CPU = torch.device("cpu")


@contextmanager
def built(plan: Plan, rank: int) -> Iterator[TrainState]:
    """Build a layout for one rank of a world that is not there.

    In this file a layout is always built for the same rank: torch keeps the groups of a mesh for those that equal it.
    """
    with fake_world(rank, plan.world_size):
        yield build_train_state(plan, CPU)


def plan_of(family: str, layout: Layout, **changes: object) -> Plan:
    return replace(build_plan(Case(family, layout), "cpu"), **changes)  # type: ignore[arg-type]


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_copies_are_the_ranks_that_hold_the_same_part() -> None:
    """16 ranks: four replicas, each cut in two by tp and in two by sharding, which holds a part once."""
    with built(plan_of("dense", Layout(dp_replicate=4, dp_shard=2, tp=2)), 5) as state:
        copies = {share.name: share.copies for share in state.shares}
        assert copies["blocks.0.attention.q.weight"] == 4, "cut over tp"
        assert copies["blocks.0.attention.q_norm.weight"] == copies["norm.weight"] == 8
        assert copies["embed.weight"] == 4
        assert state.positions_S is None
        assert not state.routers
        assert len(state.parts) == 1


@pytest.mark.parametrize(
    ("sequence_parallel", "partial"),
    [
        (True, {"norm.weight", "attention_norm.weight", "ffn_norm.weight", "q_norm.weight", "k_norm.weight"}),
        (False, {"q_norm.weight", "k_norm.weight"}),
    ],
)
def test_partial_gradients_are_summed_over_tp(sequence_parallel: bool, partial: set[str]) -> None:
    layout = Layout(dp_shard=4, tp=2, sequence_parallel=sequence_parallel)
    with built(plan_of("dense", layout), 1) as state:
        (late,) = state.late_sums
        assert ranks_of(late.peers.group) == [0, 1]
        assert {share.name for share in late.shares} == {name for name in whole_names(state) if matches(name, partial)}
        assert state.stages.hidden.sequence_parts == (2 if sequence_parallel else 1)


def whole_names(state: TrainState) -> list[str]:
    return [share.name for share in state.shares if share.cut is None]


def matches(name: str, leaves: set[str]) -> bool:
    return any(name == leaf or name.endswith(f".{leaf}") for leaf in leaves)


def test_a_tied_embedding_stands_on_both_ends_of_a_pipeline_and_is_summed_over_them() -> None:
    for layout, rank, stage, ends, twice in (
        (Layout(pp=4, dp_replicate=2), 1, 0, [1, 7], 4),
        (Layout(pp=4, dp_shard=2), 7, 3, [1, 7], 2),
    ):
        with built(plan_of("tied", layout), rank) as state:
            assert list(state.stages.parts) == [stage]
            (late,) = state.late_sums
            assert [share.name for share in late.shares] == ["embed.weight"]
            assert ranks_of(late.peers.group) == ends
            copies = {share.name: share.copies for share in state.shares}
            assert copies.pop("embed.weight") == twice
            assert set(copies.values()) == {twice // 2}
    with built(plan_of("tied", Layout(pp=3, dp_replicate=2)), 3) as state:
        assert not state.late_sums, "a stage between the ends has no embedding"
        assert list(state.parts[0].blocks) == ["2"], "the first of three stages has the spare layer"


def test_frozen_embeddings_are_not_summed_and_only_adapters_are_updated() -> None:
    plan = plan_of("tied", Layout(pp=2))
    with built(replace(plan, spec=replace(plan.spec, lora=LoraSpec(rank=2))), 0) as state:
        assert not state.late_sums
        updated = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
        assert updated == {id(share.local) for share in state.shares if "lora_" in share.name}
        assert 0 < len(updated) < len(state.shares)


def test_a_quantised_matrix_is_cut_over_tp_and_copied_over_the_rest() -> None:
    """The parts are those of the whole matrix quantised, so that no layout changes a value."""
    plan = plan_of("dense", Layout())
    model = replace(plan.spec.model, num_heads=8, ffn_size=1024)
    plan = replace(plan, spec=replace(plan.spec, model=model, lora=LoraSpec(rank=2, base="nf4")))
    with built(plan, 0) as state:
        wanted = dequantised(state)
        held_bytes = sum(share.local.nbytes for share in state.shares if "nf4" in share.name)
    assert len(wanted) == 4 * 7
    assert 8 * held_bytes < 4.2 * sum(weight.numel() for weight in wanted.values())
    with built(replace(plan, layout=Layout(dp_shard=2, tp=2), devices_per_node=4), 3) as state:
        copies = {share.name: share.copies for share in state.shares}
        assert copies["blocks.0.attention.q.nf4_codes"] == 2
        assert copies["blocks.0.attention.q.nf4_scales"] == 4
        found = dequantised(state)
    for name, weight in wanted.items():
        dim = 1 if name.endswith(("out", "down")) else 0
        assert found[name].equal(weight.chunk(2, dim)[1]), name


def dequantised(state: TrainState) -> dict[str, torch.Tensor]:
    layers = {
        name: one for part in state.parts for name, one in part.named_modules() if isinstance(one, QuantisedLinear)
    }
    return {
        name: QuantisedLinear.forward(layer, torch.eye(2 * layer.nf4_codes.shape[1])).T
        for name, layer in layers.items()
    }


def test_stages_of_a_v_stand_on_both_ends() -> None:
    with built(plan_of("dense", Layout(pp=2, pipeline_schedule="zbv")), 0) as state:
        assert {stage: list(part.blocks) for stage, part in state.stages.parts.items()} == {0: ["0"], 3: ["3"]}
        first, last = state.parts
        assert first.embed is not None and last.embed is None and last.head is not None
        assert first.blocks["0"].attention.q.forward.__qualname__.startswith("WeightQueue"), "weights' gradients wait"
        assert ranks_of(state.stages.lines.up) == ranks_of(state.stages.lines.down) == [0, 1]
        assert state.stages.lines.up is not state.stages.lines.down


@pytest.mark.parametrize(("method", "core"), [("ring", RingCore), ("ulysses", UlyssesCore)])
def test_the_core_of_every_attention_is_replaced(method: ContextMethod, core: type) -> None:
    with built(plan_of("dense", Layout(cp=2, context_method=method)), 0) as state:
        assert [type(module.core) for module in state.parts[0].attention_modules()] == [core] * 4


def test_a_part_of_each_sequence_is_held_with_its_own_positions() -> None:
    with built(plan_of("dense", Layout(dp_shard=2, cp=4)), 2) as state:
        expected = [*range(16, 24), *range(40, 48)]
        assert state.positions_S is not None
        assert state.positions_S.tolist() == state.parts[0].positions_S.tolist() == expected
        assert not state.late_sums, "parameters are sharded over cp as well"
        q = next(share for share in state.shares if share.name == "blocks.0.attention.q.weight")
        assert isinstance(q.parameter, DTensor)
        assert (q.parameter.device_mesh.size(), q.offsets[0], q.copies) == (8, 16, 1)


def test_spread_experts_are_sharded_over_what_is_left() -> None:
    with built(plan_of("moe", Layout(dp_shard=4, ep=2)), 3) as state:
        up = next(share for share in state.shares if share.name == "blocks.0.ffn.experts.up")
        assert up.full_shape == (8, 64, 96)
        assert up.offsets == (6, 0, 0), "the second half of the experts, and of them the second half"
        assert up.local.shape == (2, 64, 96)
        assert len(state.routers) == 4
        dispatch = state.parts[0].expert_modules()[0].dispatch
        assert ranks_of(dispatch.peers.group) == [2, 3]


def test_norms_of_images_are_taken_over_all_data_ranks() -> None:
    with built(plan_of("resnet", Layout(dp_replicate=2, dp_shard=2)), 2) as state:
        norms = state.parts[0].norm_modules()
        assert norms
        assert all(ranks_of(norm.sum_over_ranks.__self__.group) == [0, 1, 2, 3] for norm in norms)


@pytest.mark.parametrize("precision", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_formats_and_offload_reach_the_sharding(precision: tuple[str, torch.dtype]) -> None:
    compute, dtype = precision
    with built(plan_of("dense", Layout(dp_shard=2, zero_stage=2), compute=compute, offload="optimizer"), 0) as state:
        group = state.parts[0].blocks["0"]._get_fsdp_state()._fsdp_param_group
        assert (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype) == (dtype, torch.float32)
        assert type(group.offload_policy).__name__ == "CPUOffloadPolicy"
        assert group.post_forward_mesh_info is None, "ZeRO-2 keeps what was gathered until the backward"
        assert state.stages.hidden.dtype == dtype
    with built(plan_of("dense", Layout(dp_shard=2)), 0) as state:
        block, root = state.parts[0].blocks["0"]._get_fsdp_state(), state.parts[0]._get_fsdp_state()
        assert block._fsdp_param_group.post_forward_mesh_info is not None
        assert root._fsdp_param_group.post_forward_mesh_info is None
        assert type(block._fsdp_param_group.offload_policy).__name__ == "OffloadPolicy"


def test_exchanges_of_shards_are_timed_and_one_rank_reduces_nothing() -> None:
    for layout, gathers, reduces in (
        (Layout(dp_shard=2), "_TimedCollective", "_TimedCollective"),
        (Layout(), "DefaultAllGather", "_NothingToReduce"),
    ):
        with built(plan_of("dense", layout), 0) as state:
            for part in (state.parts[0], *state.parts[0].block_modules()):
                group = part._get_fsdp_state()._fsdp_param_group
                assert type(group._all_gather_comm).__name__ == gathers
                assert type(group._reduce_scatter_comm).__name__ == reduces


def test_the_weights_are_the_same_whatever_the_rank() -> None:
    """Stages and parts are filled from the run's seed by name."""
    with built(plan_of("dense", Layout()), 0) as state:
        whole = {share.name: share.local.detach().clone() for share in state.shares}
    with built(plan_of("dense", Layout(pp=2, tp=2)), 3) as state:
        assert all(torch.equal(share.local, share.part_of(whole[share.name])) for share in state.shares)
        assert {share.name.split(".")[1] for share in state.shares if share.name.startswith("blocks")} == {"2", "3"}


@pytest.mark.slow
def test_blocks_and_the_loss_are_compiled_where_the_recipe_says_so() -> None:
    plain = plan_of("dense", Layout())
    for compiles in (True, False):
        with built(replace(plain, spec=replace(plain.spec, compile=compiles)), 0) as state:
            (part,) = state.parts
            compiled = [module for module in part.modules() if module._compiled_call_impl is not None]
            assert compiled == (list(part.compile_modules()) if compiles else [])


def test_products_in_fp8_are_those_of_the_blocks_and_not_of_the_head() -> None:
    plan = plan_of("dense", Layout())
    precision = replace(plan.spec.precision, matmul="fp8")
    with built(replace(plan, spec=replace(plan.spec, precision=precision)), 0) as state:
        (part,) = state.parts
        kinds = {name: type(module).__name__ for name, module in part.named_modules() if hasattr(module, "in_features")}
        assert kinds.pop("head") == "Linear"
        assert len(kinds) == 4 * 7 and set(kinds.values()) == {"Float8Linear"}
        assert all(module.config.emulate for name, module in part.named_modules() if kinds.get(name)), "on a CPU"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_are_computed_again_where_the_plan_says_so(recompute: str) -> None:
    with built(plan_of("dense", Layout(), recompute=recompute), 0) as state:
        again = [block.forward.__qualname__.startswith("_recomputed") for block in state.parts[0].block_modules()]
        assert again == [recompute == "full"] * 4


def test_the_plans_kernels_are_in_place_in_the_model_and_in_the_optimizer() -> None:
    plan = build_plan(Case("dense", Layout(), optimizer="adamw"), "cpu")
    with built(replace(plan, kernels=KernelSpec(rope="halves", adamw="for_loop")), 0) as state:
        assert {module.rope for module in state.parts[0].attention_modules()} == {load_kernel("rope", "halves")}
        assert type(state.optimizer).__name__ == "GuardedAdamW"
    with built(plan, 0) as state:
        assert {module.rope for module in state.parts[0].attention_modules()} == {load_kernel("rope", "torch")}
        assert type(state.optimizer) is torch.optim.AdamW


def test_a_throttled_stage_waits_for_its_part_of_the_layers() -> None:
    with built(plan_of("tied", Layout(pp=4, dp_replicate=2)), 1) as state:
        assert state.stages.throttle.parts == {0: 1 / 4}
        assert state.stages.throttle.sample_s == 0.0
    with built(plan_of("dense", Layout()), 0) as state:
        assert state.stages.throttle.parts == {0: 1.0}
        assert not state.stages.noise.sums.any()
