"""`module_worker.py FILE RANK RANKS NAME...`: one of RANKS ranks that train each model; it prints the losses of the
steps, the digest of the weights after them, and the same of a single process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from lab.transformers_models import model_of

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.wings.certify.cases import SAMPLES, Case, build_plan
from trainspec_cli.wings.certify.families import FAMILIES

STEPS = 3


@dataclass(frozen=True)
class Run:
    kind: str
    layout: Layout
    recompute: Recompute = "none"
    rank: int = 0
    """Of adapters."""
    weights: tuple[float, ...] = ()
    """The samples' shares of the ranks."""


RUNS = {
    "zero 1": Run("opt", Layout(dp_shard=2, zero_stage=1), "selective"),
    "zero 2": Run("gptj", Layout(dp_shard=2, zero_stage=2)),
    "zero 3": Run("opt", Layout(dp_shard=2, zero_stage=3), "full"),
    "replicas": Run("bloom", Layout(dp_replicate=2)),
    "adapters": Run("gptj", Layout(dp_shard=2, zero_stage=3), "full", rank=4),
    "empty shares": Run("gptj", Layout(dp_shard=2, zero_stage=3), weights=(1.0, 0.001)),
}


def losses_of(run: Run) -> list[float]:
    lora = LoraSpec(rank=run.rank)
    FAMILIES["module"] = model_of(run.kind, lora)
    plan = build_plan(Case("module", run.layout, recompute=run.recompute, micro_batch_size=2), "cpu")
    plan = replace(plan, spec=replace(plan.spec, lora=lora))
    state = build_train_state(plan, torch.device("cpu"))
    division = even_division_of(plan)
    if run.weights:
        division = replace(division, weights=run.weights)
    losses = []
    for step in range(STEPS):
        own = division.of_rank(state.mesh.data_rank, step * SAMPLES, SAMPLES)
        outcome = train_step(
            state, drawn_batch(plan.spec, state, own), global_tokens=plan.tokens_per_step, clip_norm=1.0
        )
        assert outcome is not None
        losses.append(float(outcome.loss))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    file, rank, ranks, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    dist.init_process_group("gloo", init_method=f"file://{file}.{rank}", rank=0, world_size=1)
    alone = {name: losses_of(replace(RUNS[name], layout=Layout(), weights=(), recompute="none")) for name in names}
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    print(json.dumps({name: [losses_of(RUNS[name]), alone[name]] for name in names}))
    leave_processes()


if __name__ == "__main__":
    main()
