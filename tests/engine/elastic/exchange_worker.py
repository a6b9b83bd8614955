"""One of several ranks that exchange tensors of a device: `exchange_worker.py WAY RANK SIZE FOLDER`; prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lab.device_backend import DeviceGroup, register
from lab.waiting import PATIENCE_S

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.comm.compressed import CompressedSum, Feedback
from trainspec_cli.engine.elastic import cross_group
from trainspec_cli.engine.elastic.cross_group import CrossGroupComm, sum_as_one
from trainspec_cli.wings.emulated import KIND
from trainspec_cli.wings.emulated.engine.device import PLUGIN, DeviceTensor

LONG_S, SHORT_S = 4 * PATIENCE_S, 1.0
WAY, RANK, SIZE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of the device. Raises TypeError for any other."""
    if not isinstance(tensor, DeviceTensor):
        raise TypeError("a tensor of the host")
    return tensor.memory


def connect(made: list[DeviceGroup], device: torch.device, timeout_s: float, name: str = "first", size: int = SIZE):
    comm = CrossGroupComm(name, RANK, size, timeout_s, device)
    return comm, made[-1]


def failure(act: Callable[[], object]) -> tuple[str, float]:
    """Return the error that `act` ends with, and the seconds until then."""
    began_s = time.monotonic()
    try:
        act()
    except RuntimeError as error:
        return str(error), time.monotonic() - began_s
    return "", time.monotonic() - began_s


def exchange_all(made: list[DeviceGroup], device: torch.device) -> dict[str, Any]:
    """Every kind of exchange, of the device's tensors and of the host's."""
    comm, group = connect(made, device, LONG_S)
    own = torch.arange(6.0) + 10 * RANK
    summed = own.to(device)
    comm.sum_(summed)
    parts = [own.to(device)[:2], own.bfloat16().to(device).view(2, 3).t()]
    sum_as_one(parts, comm.sum_)
    rows = torch.tensor([[RANK, 0], [RANK, 1]], dtype=torch.uint8).to(device)
    compressed = torch.linspace(-1, 1, 300).add(RANK).to(device)
    CompressedSum(GRADIENT_CODECS["int8"], Feedback(300, device)).all_reduce_(compressed, comm)
    seen = {
        "sum": summed.cpu().tolist(),
        "parts": [part.cpu().float().tolist() for part in parts],
        "swapped": comm.swap_rows(rows).cpu().tolist(),
        "gathered": comm.gather_rows(rows[0]).cpu().tolist(),
        "compressed": compressed.cpu().tolist(),
    }
    on_device = sum(group.calls.values())
    counts = torch.tensor([1.0, RANK])
    comm.sum_(counts)
    seen |= {"counts": counts.tolist(), "digests": [int(digest) for digest in comm.gather(torch.tensor([RANK]))]}
    seen["calls for the host's"] = sum(group.calls.values()) - on_device
    state = [torch.randn(2, 3).to(device).t(), torch.tensor([7 + RANK]), torch.ones(5).bfloat16().mul(RANK).to(device)]
    if RANK == 0:
        comm.send(state, 1)
    else:
        comm.receive_(state, 0)
    seen["state"] = [tensor.cpu().float().tolist() for tensor in state]
    return seen | {"calls": dict(group.calls)}


def die_in_a_sum(made: list[DeviceGroup], device: torch.device) -> dict[str, Any]:
    """The last rank dies while the others' devices wait for it; the others go on among themselves."""
    comm, group = connect(made, device, LONG_S)
    tensor = torch.ones(4).to(device)
    comm.sum_(tensor)
    if RANK == SIZE - 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        group.stuck_from = 2
    error, after_s = failure(lambda: comm.sum_(tensor))
    again, afterwards = connect(made, device, LONG_S, "second", SIZE - 1)
    left = torch.ones(4).to(device)
    again.sum_(left)
    return {
        "error": error,
        "after_s": after_s,
        "aborts": [group.calls["abort"], afterwards.calls["abort"]],
        "left": left.cpu().tolist(),
        "closed": failure(lambda: comm.sum_(torch.ones(1)))[0],
    }


def never_start(made: list[DeviceGroup], device: torch.device) -> dict[str, Any]:
    """The last rank lives, and its kernel never starts."""
    comm, group = connect(made, device, SHORT_S)
    group.stuck_from = 1 if RANK == SIZE - 1 else None
    error, after_s = failure(lambda: comm.sum_(torch.ones(4).to(device)))
    return {"error": error, "after_s": after_s, "aborts": group.calls["abort"]}


def close_meanwhile(made: list[DeviceGroup], device: torch.device) -> dict[str, Any]:
    """Another thread of rank 0 closes the exchange, whose device waits for the other rank."""
    comm, group = connect(made, device, LONG_S)
    group.stuck_from = 1 if RANK == SIZE - 1 else None
    closing = threading.Timer(0.3, comm.close)
    if RANK == 0:
        closing.start()
    error, after_s = failure(lambda: comm.sum_(torch.ones(4).to(device)))
    if RANK == 0:
        closing.join()
    return {"error": error, "after_s": after_s, "aborts": group.calls["abort"]}


def share_a_device(made: list[DeviceGroup], device: torch.device) -> dict[str, Any]:
    cross_group.physical_device = lambda _: "0000:01:00"  # type: ignore[assignment]
    comm = CrossGroupComm("first", RANK, SIZE, LONG_S, device)
    tensor = torch.ones(4).to(device)
    comm.sum_(tensor)
    return {"sum": tensor.cpu().tolist(), "why": comm.staged_because, "groups": len(made)}


WAYS = {
    "all": exchange_all,
    "die": die_in_a_sum,
    "stuck": never_start,
    "close": close_meanwhile,
    "share": share_a_device,
}

if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(sys.argv[4], "store")), SIZE)
    cross_group.RendezvousStore = lambda _timeout: store  # type: ignore[assignment,misc]
    PLUGIN.register()
    device = torch.device(KIND, 0)
    seen = WAYS[WAY](register(device.type, memory_of), device)
    print(json.dumps(seen), flush=True)
    os._exit(0)  # threads may still wait for ranks that are gone
