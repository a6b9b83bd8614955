"""`wire_worker.py FILE RANK RANKS`: sums gradients with the other ranks in each format; prints errors, bytes, digests.

For each format: (the error of a reduce-scatter and of an all-reduce over what the format states for them, the bytes
that this rank has written for each, a digest of both results).
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS, Codec, WireMeter
from trainspec_cli.engine.comm.compressed import CompressedSum, Feedback, GroupWire
from trainspec_cli.engine.comm.exchange import all_gather, all_reduce_, reduce_scatter
from trainspec_cli.engine.comm.joining import leave_processes

VALUES = 2**16
"""Values in each rank's row."""
STEP = {"bf16": 2**-8, "int8": 1 / 127, "int4": 2**0.125 / 8}
"""Relative to the largest value of a block; one encoding loses at most half of it (for int4, in the Euclidean norm)."""


def gradients(rank: int, ranks: int) -> Tensor:
    return torch.randn(ranks, VALUES, generator=torch.Generator().manual_seed(rank)) * 1e-5


def bound(name: str, codec: Codec, encoded: list[Tensor]) -> float:
    """The most that the sum of `encoded` may be wrong by, in the Euclidean norm."""
    blocks = [x.view(-1, codec.block) for x in encoded]
    if name == "bf16":
        return sum(float(block.norm()) for block in blocks) * STEP[name]
    largest = 32**0.5 if name == "int4" else 1.0  # a rotated value is 32 ** 0.5 times the largest at most
    halves = (float(block.abs().amax(-1).norm()) * codec.block**0.5 / 2 for block in blocks)
    return sum(halves) * STEP[name] * largest * (1 + 2**-7)


def exchange(name: str, rank: int, ranks: int, meter: WireMeter) -> dict[str, Any]:
    codec, wire = GRADIENT_CODECS[name], GroupWire(dist.group.WORLD)  # type: ignore[arg-type]
    own, all_own = gradients(rank, ranks), [gradients(one, ranks) for one in range(ranks)]
    sums = torch.stack(all_own).double().sum(0)

    def summed() -> CompressedSum:
        return CompressedSum(codec, Feedback(own.numel(), own.device) if codec.feeds_back else None)

    with meter.purpose(f"{name} scatter"):
        scattered = summed().reduce_scatter(own, wire)
    reduced = own.clone()
    with meter.purpose(f"{name} reduce"):
        summed().all_reduce_(reduced, wire)
    once = bound(name, codec, [x[rank] for x in all_own])
    twice = bound(name, codec, all_own) + bound(name, codec, [2 * sums.float()])
    return {
        "scatter": float((scattered - sums[rank]).norm()) / once,
        "reduce": float((reduced - sums).norm()) / twice,
        "bytes": [meter.counted[f"{name} scatter"], meter.counted[f"{name} reduce"]],
        "digest": hashlib.sha256(scattered.numpy().tobytes() + reduced.numpy().tobytes()).hexdigest(),
        "reduced": hashlib.sha256(reduced.numpy().tobytes()).hexdigest(),
    }


def sums_in_order(rank: int, ranks: int, meter: WireMeter) -> list[bool]:
    """Return whether sums in full are those in the order of ranks, to the bit: of a reduce-scatter, of an all-reduce of
    values that do not divide by the ranks, and of bf16, which is rounded once."""
    world = dist.group.WORLD
    assert world is not None
    own, total = gradients(rank, ranks), gradients(0, ranks)
    for other in range(1, ranks):
        total += gradients(other, ranks)
    scattered = own.new_empty(VALUES)
    with meter.purpose("full scatter"):
        reduce_scatter(scattered, own, group=world)
    reduced = own.flatten()[1:].clone()
    with meter.purpose("reduce in order"):
        all_reduce_(reduced, world)
    rounded, few = own[0].new_empty(VALUES, dtype=torch.bfloat16), own.bfloat16()
    reduce_scatter(rounded, few, group=world)
    of_few = gradients(0, ranks).bfloat16().float()
    for other in range(1, ranks):
        of_few += gradients(other, ranks).bfloat16().float()
    found = [(scattered, total[rank]), (reduced, total.flatten()[1:]), (rounded, of_few[rank].bfloat16())]
    return [torch.equal(one, wanted) for one, wanted in found]


def main() -> None:
    torch.set_num_threads(1)
    file, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    meter = WireMeter()
    meter.find_connections()
    found = {name: exchange(name, rank, ranks, meter) for name in GRADIENT_CODECS}
    again = {name: exchange(name, rank, ranks, WireMeter())["digest"] for name in GRADIENT_CODECS}
    full = gradients(rank, ranks)
    with meter.purpose("full reduce"):
        dist.all_reduce(full)
    with meter.purpose("gather"):
        all_gather(full.new_empty(ranks * VALUES), full[0].contiguous())
    in_order = sums_in_order(rank, ranks, meter)
    counted = {name: meter.counted[name] for name in ("full reduce", "gather", "full scatter", "reduce in order")}
    dist.barrier()
    found_all = {"formats": found, "again": again, "counted": counted, "in_order": in_order}
    print(json.dumps(found_all | {"totals": meter.totals()}))
    leave_processes()


if __name__ == "__main__":
    main()
