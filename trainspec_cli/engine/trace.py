"""`python -m trainspec_cli.engine.trace FOLDER`: the real step of FOLDER/plan.json at its world size, in one process.

Tensors are fake: they have shapes and no memory; collectives go through a process group that sends nothing. So what one
rank of thousands holds and computes can be counted on a laptop. Leaves FOLDER/trace.json. Counted is what tensors take:
not the allocator's holes, nor the device's context.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.build import Machinery, build_machinery
from trainspec_cli.engine.ledger import Ledger
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models import experts
from trainspec_cli.engine.parallel.expert import SpreadDispatch, even_splits
from trainspec_cli.engine.step import train_step
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.model import ConvModel
from trainspec_cli.spec.plan import Plan

CPU = torch.device("cpu")


def main() -> None:
    folder = Path(sys.argv[1])
    plan = from_plain(Plan, read_json(folder / "plan.json"))
    started = time.perf_counter()
    ranks = [trace_rank(plan, rank) for rank in traced_ranks(plan)]
    fullest = max(ranks, key=lambda told: told["peak_memory_bytes"])
    write_json(folder / "trace.json", {**fullest, "ranks": ranks, "seconds": time.perf_counter() - started})


def traced_ranks(plan: Plan) -> list[int]:
    """The first of the pipeline's first stages, and of its last: the others hold less than one of them."""
    per_stage = plan.world_size // plan.layout.pp
    return sorted({0, (plan.layout.pp - 1) * per_stage})


def trace_rank(plan: Plan, rank: int) -> dict[str, Any]:
    """Two steps: the second finds everything that the first leaves behind."""
    with fake_world(rank, plan.world_size):
        mesh = build_mesh(plan.layout, "cpu")
        ledger = Ledger()
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            built = build_machinery(plan, CPU, mesh)
            for part in built.parts:
                even_out(part)
            built.clock.on_gpu = False
            state = ledger.live_bytes
            for _ in range(2):
                ledger.begin()
                one_step(plan, built)
            return {"rank": rank, "state_bytes": state, **ledger.told()}


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def even_out(part: Any) -> None:
    """Which expert a token visits is not known of fake tokens: every rank gets the same number.

    What torch knows of the grouped product's shapes holds for bf16 alone; one product of all rows takes as much.
    """
    experts.grouped_matmul = lambda x_MD, weight_EDF, _counts_E: x_MD @ weight_EDF[0]
    for module in part.modules():
        if isinstance(module, SpreadDispatch):
            module.read_splits = even_splits


def one_step(plan: Plan, built: Machinery) -> None:
    train_step(
        built,
        [fake_batch(plan, built) for _ in range(plan.grad_accum_steps)],
        global_tokens=plan.tokens_per_step,
        clip_norm=plan.spec.optim.grad_clip_norm,
        stop_requested=False,
    )


def fake_batch(plan: Plan, built: Machinery) -> MicroBatch:
    model, samples = plan.spec.model, plan.micro_batch_size
    if isinstance(model, ConvModel):
        images = torch.zeros(samples, model.in_channels, *model.input_size)
        labels = (samples, *model.input_size) if model.segments else (samples,)
        return images, torch.zeros(labels, dtype=torch.int64)
    tokens = torch.zeros(samples, plan.spec.data.seq_len, dtype=torch.int64)
    return held_part((tokens, tokens), built.positions_S)


if __name__ == "__main__":
    main()
