"""`torchrun -m trainspec_cli.engine.tools.links cpu|cuda ROOT`: how fast the job's processes reach one another.

Leaves ROOT/links.json: all-reduce over size, and each pair of hosts (their first processes) by itself, over size too.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.engine.comm.joining import join_processes, leave_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.structure import convert

SIZES_BYTES = {"cpu": (4 * 2**10, 2**18, 2**22), "cuda": (2**13, 2**20, 2**25, 2**28)}
PAIR_SIZES_BYTES = {"cpu": (4 * 2**10, 2**18, 2**22), "cuda": (2**13, 2**20, 2**26)}
REPEATS = 3
MAX_PAIRS = 64
"""Of more hosts only a chain is measured, each with the next."""


def main() -> None:
    device_type, root = sys.argv[1], Path(sys.argv[2])
    device = join_processes(device_type)
    told = {"all_reduce": all_reduces(device), "pairs": pairs(device)}
    if dist.get_rank() == 0:
        write_json(root / "links.json", told)
    dist.barrier()
    leave_processes()


def all_reduces(device: torch.device) -> list[dict[str, float]]:
    """Bus bandwidth: bytes times 2(n-1)/n over the time, as nccl-tests count it."""
    count, rows = dist.get_world_size(), []
    for size in SIZES_BYTES[device.type]:
        values = torch.zeros(size // 4, device=device)
        seconds = best_s(lambda values=values: dist.all_reduce(values), device)  # type: ignore[misc]
        rows.append({"bytes": size, "seconds": seconds, "bus_bytes_per_s": size * 2 * (count - 1) / count / seconds})
    return rows


def pairs(device: torch.device) -> list[dict[str, Any]]:
    """There and back between the first processes of two hosts; a pair at a time, so that none disturbs another."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    firsts = range(0, dist.get_world_size(), per_host)
    chosen = list(combinations(firsts, 2))
    if len(chosen) > MAX_PAIRS:
        chosen = [(rank, rank + per_host) for rank in firsts if rank + per_host < dist.get_world_size()]
    hosts = gather_hosts()
    measured = []
    for low, high in chosen:
        sizes = [ping(low, high, size, device) for size in PAIR_SIZES_BYTES[device.type]]
        dist.barrier()
        rate = sizes[-1]["bytes_per_s"]
        measured.append({"hosts": [hosts[low], hosts[high]], "bytes_per_s": rate, "sizes": sizes})
    return measured


def gather_hosts() -> list[str]:
    """Every rank's host."""
    own = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return gather_json(own, partial(convert, str))


def ping(low: int, high: int, size: int, device: torch.device) -> dict[str, float]:
    """`bytes`, the `seconds` that they take one way, and their rate; the same on all ranks."""
    values = torch.zeros(size // 4, device=device)
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.get_rank() in (low, high):
        peer, first = (high, True) if dist.get_rank() == low else (low, False)

        def there_and_back() -> None:
            for sends in (first, not first):
                dist.send(values, peer) if sends else dist.recv(values, peer)

        seconds[0] = best_s(there_and_back, device) / 2
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {"bytes": size, "seconds": float(seconds), "bytes_per_s": size / float(seconds)}


def best_s(act: Callable[[], Any], device: torch.device) -> float:
    """The same number of calls on all that take part."""
    act()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
