"""Measure the links between a job's processes: the duration of all-reduces, by size, and of messages, by pair of
nodes."""

from __future__ import annotations

import os
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from trainspec_cli.core.node import node_name
from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.observe.counters import quickest_s
from trainspec_cli.recipe.records import convert
from trainspec_cli.recipe.results.tools import AllReduceRate, LinksRequest, LinksResult, PairRate, PingRate

SIZES_BYTES = PAIR_SIZES_BYTES = (4 * 2**10, 2**18, 2**22)
CHIP_SIZES_BYTES = (2**13, 2**20, 2**25, 2**28)
CHIP_PAIR_SIZES_BYTES = (2**13, 2**20, 2**26)
REPEATS = 3
MAX_PAIRS = 64
"""Maximum number of node pairs to measure. If there are more, only the pairs of consecutive nodes are measured."""


def run(request: LinksRequest) -> LinksResult:
    device = join_processes(request.device)
    return LinksResult(tuple(all_reduces(device)), tuple(pairs(device)))


def all_reduces(device: torch.device) -> list[AllReduceRate]:
    """Time an all-reduce of each size over all processes."""
    count = dist.get_world_size()
    rows = []
    for size in CHIP_SIZES_BYTES if on_chip(device) else SIZES_BYTES:
        values = torch.zeros(size // 4, device=device)
        seconds = quickest_s(lambda values=values: dist.all_reduce(values), device, REPEATS)  # type: ignore[misc]
        rows.append(AllReduceRate(size, seconds, size * 2 * (count - 1) / count / seconds))
    return rows


def pairs(device: torch.device) -> list[PairRate]:
    """Time messages between the first processes of two nodes, one pair at a time, so that pairs do not slow one another
    down."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    firsts = range(0, dist.get_world_size(), per_node)
    chosen = list(combinations(firsts, 2))
    if len(chosen) > MAX_PAIRS:
        chosen = [(rank, rank + per_node) for rank in firsts if rank + per_node < dist.get_world_size()]
    pair_sizes = CHIP_PAIR_SIZES_BYTES if on_chip(device) else PAIR_SIZES_BYTES
    nodes = gather_json(node_name(), partial(convert, str))
    measured = []
    for low, high in chosen:
        sizes = [ping(low, high, size, device) for size in pair_sizes]
        dist.barrier()
        measured.append(PairRate((nodes[low], nodes[high]), sizes[-1].bytes_per_s, tuple(sizes)))
    return measured


def ping(low: int, high: int, size: int, device: torch.device) -> PingRate:
    """Time a message and its reply. All ranks get the result."""
    values = torch.zeros(size // 4, device=device)
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.get_rank() in (low, high):
        peer, first = (high, True) if dist.get_rank() == low else (low, False)

        def there_and_back() -> None:
            for sends in (first, not first):
                dist.send(values, peer) if sends else dist.recv(values, peer)

        seconds[0] = quickest_s(there_and_back, device, REPEATS) / 2
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return PingRate(size, float(seconds), size / float(seconds))
