"""`lost_gradients_worker.py FILE RANK RANKS CASE...`: one of the ranks that train with compressed gradients, and change
their layout.

For each case it prints how far what is said to be lost is from what the weights lack of those of full gradients, after
one step of plain descent, and how many elements of it differ after the change of layout.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.lost_gradients import PREFIX, lost_parts
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.files import TensorPart
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.optim.optimizer import set_learning_rate
from trainspec_cli.engine.run.scheduling.relayout import Meshes, change_layout
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import WireFormats
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import SAMPLES

FORMAT = WireFormats("int4", across_nodes="int4")
CASES = {
    "shards to replicas": ("dense", Layout(dp_shard=2), Layout(dp_replicate=2)),
    "replicas to shards of a tied model": ("tied", Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=1)),
    "shards to tensors": ("dense", Layout(dp_shard=2), Layout(tp=2)),
    "experts to shards": ("moe", Layout(dp_shard=4, ep=2), Layout(dp_replicate=2, dp_shard=2)),
    "tensors to a tied pipeline": ("tied", Layout(dp_replicate=2, tp=2), Layout(dp_shard=2, pp=2, zero_stage=1)),
    "a tied pipeline to tensors": ("tied", Layout(dp_shard=2, pp=2, zero_stage=1), Layout(dp_shard=2, tp=2)),
    "both to tensors": ("dense", Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2)),
}


def plan_of(family: str, layout: Layout, comm: WireFormats) -> Plan:
    return replace(build_plan(Case(family, layout, micro_batch_size=2, optimizer="sgd"), "cpu"), comm=comm)


def train(state: TrainState, plan: Plan, step: int) -> None:
    set_learning_rate(state.optimizer, plan.spec.optim.lr)
    own = even_division_of(plan).of_rank(state.mesh.data_rank, SAMPLES * step, SAMPLES)
    batch = drawn_batch(plan.spec, state, own)
    assert train_step(state, batch, global_tokens=plan.tokens_per_step, clip_norm=None) is not None


def whole(parts: list[TensorPart], prefix: str) -> dict[str, Tensor]:
    """Every tensor, put together from all ranks."""
    own = {part.name: part for part in parts if part.name.startswith(prefix)}
    shapes = gather_json({name: list(part.full_shape) for name, part in own.items()}, lambda plain: plain)
    found = {}
    for name, shape in sorted({name: shape for rank in shapes for name, shape in rank.items()}.items()):
        full = torch.full(shape, -torch.inf, dtype=torch.float64)
        if part := own.get(name):
            full[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.shape, strict=True))] = part.tensor
        dist.all_reduce(full, dist.ReduceOp.MAX)
        found[name.removeprefix(prefix)] = full
    return found


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).norm())


def judge(name: str) -> dict[str, Any]:
    family, before, after = CASES[name]
    exact = plan_of(family, before, WireFormats())
    state = build_train_state(exact, torch.device("cpu"))
    train(state, exact, 0)
    wanted = whole(state.held.parts(), "model.")
    plan = plan_of(family, before, FORMAT)
    state = build_train_state(plan, torch.device("cpu"))
    train(state, plan, 0)
    lost, got = whole(lost_parts(state), PREFIX), whole(state.held.parts(), "model.")
    lr = plan.spec.optim.lr
    apart = {key: (got[key] - wanted[key]) / lr - lost[key] for key in lost}
    other = plan_of(family, after, FORMAT)
    done = change_layout(state, other, Meshes(state.mesh))
    state = done.state
    moved = whole(lost_parts(state), PREFIX)
    return {
        "missing": sorted(wanted.keys() - lost.keys() - {key for key in wanted if "router" in key}),
        "relative": norm(apart) / norm(lost),
        "lost": norm(lost),
        "changed": sum(int((lost[key] != moved[key]).sum()) for key in lost),
        "moved": norm(moved),
        "drops_lost": done.drops_lost,
    }


def main() -> None:
    torch.set_num_threads(1)
    file, rank, ranks, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    print(json.dumps({name: judge(name) for name in names}))
    leave_processes()


if __name__ == "__main__":
    main()
