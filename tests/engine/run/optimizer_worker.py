"""`optimizer_worker.py RANK RANKS RENDEZVOUS CASES`: one rank of those that make three clipped steps in each case."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

CPU = torch.device("cpu")
TOKENS, SAMPLES, STEPS = 16, 4, 3
EVERY = 7
"""One of this many weights is printed."""
DENSE = DecoderModel(2, 66, 2, 2, 32, 96, 80)
"""66 rows do not divide by 4."""
MODELS = {
    "dense": DENSE,
    "experts": DecoderModel(2, 64, 2, 2, 32, 96, 80, experts=ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=48)),
}
MACHINE = Machine("host", cpu_cores=4, memory_bytes=2**34, bf16=False)


def build(optimizer: Any, model: str, layout: dict[str, int], ranks: int) -> TrainState:
    spec = RunSpec(
        model=MODELS[model],
        data=DataSpec(seq_len=TOKENS, source="python_stdlib"),
        optim=OptimSpec(lr=1e-2, name=optimizer, eps=1e-4),
        batching=BatchingSpec(global_batch_size=SAMPLES, micro_batch_size=1),
        train=TrainSection(max_steps=STEPS),
        precision=PrecisionSpec(compute="fp32"),
        cluster=ClusterSpec(devices_per_node=ranks, device="cpu"),
        layout=LayoutSpec(**{"dp_replicate": 1, "dp_shard": 1} | layout),  # type: ignore[arg-type]
    )
    return build_train_state(plan(spec, MACHINE), CPU)


def sample(number: int, state: TrainState) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    tokens, targets = (torch.randint(80, (1, TOKENS), generator=generator) for _ in range(2))
    if state.positions_S is not None:
        tokens, targets = tokens[:, state.positions_S], targets[:, state.positions_S]
    return tokens, targets


def train(state: TrainState) -> dict[str, Any]:
    ranks, losses = state.mesh.layout.data_parallel_size, []
    for step in range(STEPS):
        numbers = range(SAMPLES * step + state.mesh.data_rank, SAMPLES * (step + 1), ranks)
        micro_batches = [sample(number, state) for number in numbers]
        outcome = train_step(state, micro_batches, global_tokens=SAMPLES * TOKENS, clip_norm=0.5)
        assert outcome is not None
        losses.append(outcome.loss.item())
    weights = {share.name: share.gather().flatten()[::EVERY].tolist() for share in unique_shares(state.shares)}
    return {"losses": losses, "weights": weights}


def main() -> None:
    """Print losses and weights by case."""
    rank, ranks, rendezvous, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    found = {}
    for name, (optimizer, model, layout) in cases.items():
        found[name] = train(build(optimizer, model, layout, ranks))
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
