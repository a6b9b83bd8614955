"""`python -m trainspec_cli.engine.trace FOLDER RANK`: the real step of FOLDER/plan.json, of one rank, in this process.

Tensors are fake: they have shapes and no memory; collectives go through a process group that sends nothing. So what one
rank of thousands holds and computes can be counted on a laptop. Leaves FOLDER/trace.rank*.json. Counted is what tensors
take: not the allocator's holes, nor the device's context.
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
from torch import Tensor
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
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    plan = from_plain(Plan, read_json(folder / "plan.json"))
    started = time.perf_counter()
    told = trace_rank(plan, rank)
    write_json(folder / f"trace.rank{rank}.json", {**told, "seconds": time.perf_counter() - started})


def trace_rank(plan: Plan, rank: int) -> dict[str, Any]:
    """Micro-batches are alike: where there are many, what one more takes follows from a shorter and a longer step."""
    with fake_world(rank, plan.world_size):
        mesh = build_mesh(plan.layout, "cpu")
        ledger = Ledger()
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            built = build_machinery(plan, CPU, mesh)
            for part in built.parts:
                even_out(part)
            built.clock.on_gpu = False
            state = ledger.live_bytes
            told = {count: count_step(plan, built, ledger, count) for count in traced_micro_batches(plan)}
            return {"rank": rank, "state_bytes": state, **extrapolate(plan.grad_accum_steps, told)}


def count_step(plan: Plan, built: Machinery, ledger: Ledger, micro_batches: int) -> dict[str, Any]:
    ledger.begin()
    one_step(plan, built, micro_batches)
    return ledger.told()


def traced_micro_batches(plan: Plan) -> tuple[int, ...]:
    """All of a step's; of many, two numbers of them that fill a pipeline."""
    most = 3 * plan.layout.pp if plan.layout.pp > 1 else 2
    return (plan.grad_accum_steps,) if plan.grad_accum_steps <= most else (most - plan.layout.pp, most)


def extrapolate(micro_batches: int, told: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """`told` by number of micro-batches -> all of them; the peak is reached with the traced ones."""
    (longer, second), *others = sorted(told.items(), reverse=True)
    if not others:
        return second
    ((shorter, first),) = others
    times = (micro_batches - longer) / (longer - shorter)
    kinds = second["comm_bytes"]
    more = {kind: size - first["comm_bytes"].get(kind, 0) for kind, size in kinds.items()}
    return {
        "peak_memory_bytes": second["peak_memory_bytes"],
        "flops": second["flops"] + times * (second["flops"] - first["flops"]),
        "comm_bytes": {kind: size + times * more[kind] for kind, size in kinds.items()},
    }


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
    experts.grouped_matmul = _one_product  # type: ignore[assignment]
    for module in part.modules():
        if isinstance(module, SpreadDispatch):
            module.read_splits = even_splits


def _one_product(x_MD: Tensor, weight_EDF: Tensor, _counts_E: Tensor) -> Tensor:
    return x_MD @ weight_EDF[0]


def one_step(plan: Plan, built: Machinery, micro_batches: int) -> None:
    train_step(
        built,
        [fake_batch(plan, built) for _ in range(micro_batches)],
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
