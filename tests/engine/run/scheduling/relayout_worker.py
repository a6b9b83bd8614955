"""`relayout_worker.py FILE RANK CASE...`: one of two ranks that train in one layout and go on in another.

For each case it prints how the state after the change differs from that before it (bits), and how the steps after it
differ from those of a run that has not changed; and what becomes of changes that fail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint import reshard
from trainspec_cli.engine.checkpoint.reshard import BUCKET_BYTES
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.optim.optimizer import set_learning_rate
from trainspec_cli.engine.run.scheduling import relayout
from trainspec_cli.engine.run.scheduling.relayout import Meshes, Prepare, RelayoutError, change_layout
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import SAMPLES

BEFORE, AFTER = 2, 2
"""Steps."""
SMALL_BUCKET_BYTES = 40_000
"""Several of them hold the state."""
PIPELINE = Layout(pp=2)
SHARDED = Layout(dp_shard=2)
CHANGES = {
    "moved layers": ("dense", PIPELINE, replace(PIPELINE, stage_layers=(3, 1))),
    "moved layers of a tied model": ("tied", PIPELINE, replace(PIPELINE, stage_layers=(1, 3))),
    "moved layers of experts": ("moe", PIPELINE, replace(PIPELINE, stage_layers=(1, 3))),
    "moved layers of a hybrid": ("hybrid", PIPELINE, replace(PIPELINE, stage_layers=(3, 1))),
    "data to tensor": ("dense", SHARDED, Layout(tp=2)),
    "pipeline to data": ("dense", PIPELINE, SHARDED),
    "ZeRO-1 to ZeRO-3": ("dense", Layout(dp_shard=2, zero_stage=1), SHARDED),
    "replicas to a pipeline of a tied model": ("tied", Layout(dp_replicate=2), Layout(pp=2, pipeline_schedule="zbv")),
    "a pipeline of a tied model to tensor": ("tied", Layout(pp=2, pipeline_schedule="zbv"), Layout(tp=2)),
    "data to experts": ("moe", SHARDED, Layout(dp_shard=2, ep=2)),
    "experts to a pipeline": ("moe", Layout(dp_shard=2, ep=2), PIPELINE),
    "tensor to data in a hybrid": ("hybrid", Layout(tp=2), SHARDED),
    "replicas to shards of a network": ("resnet", Layout(dp_replicate=2), SHARDED),
}
ADAPTED = {"data to tensor": LoraSpec(rank=4)}
PLAIN_DESCENT = {"moved layers of a hybrid", "replicas to shards of a network"}
FAILING = "pipeline to data"
COPIES = "replicas to a pipeline of a tied model"
"""One of the two ranks that hold a part sends it: the way back is not that forward."""


def plan_of(family: str, layout: Layout, optimizer: Any, lora: LoraSpec | None = None) -> Plan:
    plan = build_plan(Case(family, layout, micro_batch_size=2, optimizer=optimizer), "cpu")
    return replace(plan, spec=replace(plan.spec, lora=lora)) if lora else plan


def train(state: TrainState, plan: Plan, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        set_learning_rate(state.optimizer, plan.spec.optim.lr)
        own = even_division_of(plan).of_rank(state.mesh.data_rank, SAMPLES * step, SAMPLES)
        batch = drawn_batch(plan.spec, state, own)
        outcome = train_step(state, batch, global_tokens=plan.tokens_per_step, clip_norm=None)
        assert outcome is not None
        losses.append(outcome.loss.item())
    return losses


def whole_state(state: TrainState) -> dict[str, Tensor]:
    """Every tensor of the state, put together from all ranks."""
    parts = {part.name: part for part in state.held.parts()}
    own = {name: [list(part.full_shape), part.tensor.dtype == torch.float32] for name, part in parts.items()}
    known = {name: shape for rank in gather_json(own, lambda plain: plain) for name, (shape, _) in rank.items()}
    whole = {}
    for name, shape in sorted(known.items()):
        full = torch.full(shape, -torch.inf, dtype=torch.float64)
        if part := parts.get(name):
            full[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.shape, strict=True))] = part.tensor
        dist.all_reduce(full, dist.ReduceOp.MAX)
        assert torch.isfinite(full).all(), name
        whole[name] = full
    return whole


def changed_names(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name]))


def distance(one: dict[str, Tensor], other: dict[str, Tensor], prefix: str) -> float:
    """Relative, of the tensors of a kind together."""
    names = [name for name in one if name.startswith(prefix)]
    if not names:
        return 0.0
    apart = torch.cat([(one[name] - other[name]).flatten() for name in names])
    return float(apart.norm() / torch.cat([other[name].flatten() for name in names]).norm())


def judge(
    name: str, optimizer: str, prepare: Prepare = lambda bucket, buckets: None, bucket_bytes: int = SMALL_BUCKET_BYTES
) -> dict[str, Any]:
    family, before, after = CHANGES[name]
    lora = ADAPTED.get(name)
    plan, other = (plan_of(family, layout, optimizer, lora) for layout in (before, after))
    state = build_train_state(plan, torch.device("cpu"))
    meshes = Meshes(state.mesh)
    losses = train(state, plan, 0, BEFORE)
    wanted, clock = whole_state(state), state.clock
    error = ""
    try:
        done = change_layout(state, other, meshes, prepare, bucket_bytes)
        state, plan = done.state, other
        assert state.clock is clock
        assert state.mesh.layout == other.layout
    except RelayoutError as failure:
        error = str(failure)
    found = whole_state(state)
    losses += train(state, plan, BEFORE, BEFORE + AFTER)
    return {
        "error": error,
        "changed": changed_names(found, wanted),
        "tensors": len(wanted),
        "losses": losses,
        "layout": plan.layout.describe(),
        "peak_bytes": 0 if error else done.peak_bytes,
        "moved_bytes": 0 if error else done.moved_bytes,
        "state": whole_state(state),
    }


def undisturbed(name: str, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    family, before, _ = CHANGES[name]
    plan = plan_of(family, before, optimizer, ADAPTED.get(name))
    state = build_train_state(plan, torch.device("cpu"))
    losses = train(state, plan, 0, BEFORE + AFTER)
    return losses, whole_state(state)


class Meter:
    """The bytes of the state that this rank really holds while it is moved."""

    def __init__(self) -> None:
        self.sides: list[reshard.Storages] = []
        self.peak_bytes = 0
        watched = self

        class Watched(reshard.Storages):
            def __init__(self, parts: Any):
                super().__init__(parts)
                watched.sides.append(self)

        pack = reshard._pack

        def watched_pack(*arguments: Any) -> Any:
            outgoing, incoming = pack(*arguments)
            parts = [part.tensor for side in self.sides for part in side.parts.values()]
            held = sum(tensor.untyped_storage().nbytes() for tensor in parts)
            self.peak_bytes = max(self.peak_bytes, held + sum(m.buffer.nbytes for m in [*outgoing, *incoming]))
            return outgoing, incoming

        reshard.Storages, reshard._pack = Watched, watched_pack  # type: ignore[misc]


def fail_on(rank: int, at: float, error: Exception) -> Callable[[int, int], None]:
    def prepare(bucket: int, buckets: int) -> None:
        assert buckets > 3
        if dist.get_rank() == rank and bucket == int(at * (buckets - 1)):
            raise error

    return prepare


def main() -> None:
    torch.set_num_threads(1)
    file, rank, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in names:
        optimizer = "sgd" if name in PLAIN_DESCENT else "adamw"
        one = judge(name, optimizer, bucket_bytes=BUCKET_BYTES)
        losses, wanted = undisturbed(name, optimizer)
        state = one.pop("state")
        weights, moments = (distance(state, wanted, kind) for kind in ("model.", "optimizer."))
        found[name] = one | {"wanted": losses, "weights": weights, "moments": moments}

    meter = Meter()
    one = judge(FAILING, "adamw")
    found["buckets"] = {key: one[key] for key in ("changed", "peak_bytes")} | {"measured_bytes": meter.peak_bytes}
    for name, at in ((COPIES, 1.0), (FAILING, 0.0)):
        losses, wanted = undisturbed(name, "adamw")
        one = judge(name, "adamw", fail_on(1, at, MemoryError("nothing is left")))
        state = one.pop("state")
        found[f"failed at {at}"] = one | {"after": changed_names(state, wanted), "wanted": losses}
    relayout.free_bytes = lambda _device: 1000.0 if rank == 0 else 1e12  # type: ignore[assignment]
    one = judge(FAILING, "adamw")
    state = one.pop("state")
    found["without room"] = one | {"after": changed_names(state, wanted), "wanted": losses}
    print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
