"""`clip_worker.py RANK RENDEZVOUS LAYOUTS CLIP`: one rank of two that make a clipped step in each layout."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.run.step import StepOutcome, train_step
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

CPU = torch.device("cpu")
TOKENS, LR = 16, 0.5
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 2, 16, 48, 50),
    data=DataSpec(seq_len=TOKENS, source="python_stdlib"),
    optim=OptimSpec(lr=LR, name="sgd", weight_decay=0.0),
    batching=BatchingSpec(global_batch_size=2, micro_batch_size=1),
    train=TrainSection(max_steps=1),
    precision=PrecisionSpec(compute="fp32"),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=False)


def build(layout: LayoutSpec, ranks: int) -> TrainState:
    cluster = ClusterSpec(devices_per_node=ranks, device="cpu")
    return build_train_state(plan(replace(SPEC, layout=layout, cluster=cluster), MACHINE), CPU)


def sample(position: int) -> MicroBatch:
    """The second one's gradient is the larger: all its targets are one token."""
    generator = torch.Generator().manual_seed(position)
    tokens, targets = (torch.randint(50, (1, TOKENS), generator=generator) for _ in range(2))
    return tokens, torch.zeros_like(targets) if position else targets


def step(state: TrainState, positions: list[int], clip_norm: float | None) -> StepOutcome:
    outcome = train_step(
        state, [sample(position) for position in positions], global_tokens=2 * TOKENS, clip_norm=clip_norm
    )
    assert outcome is not None
    return outcome


def weights(state: TrainState) -> dict[str, list[float]]:
    return {share.name: share.gather().flatten().tolist() for share in unique_shares(state.shares)}


def main() -> None:
    """Print the norm, the loss and the weights after the step, by layout."""
    rank, rendezvous, layouts, clip_norm = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {}
    for name, layout in layouts.items():
        state = build(LayoutSpec(**layout), 2)
        positions = [rank] if state.mesh.layout.data_parallel_size == 2 else [0, 1]
        outcome = step(state, positions, clip_norm)
        found[name] = {"norm": outcome.grad_norm.item(), "loss": outcome.loss.item(), "weights": weights(state)}
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
