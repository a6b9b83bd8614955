"""A backend of process groups that behaves as a device's: work runs in the background, and a lost peer is no error.

It carries its tensors over gloo, in threads of its own. What a collective gives is in the tensor once it has completed,
and not when `wait` returns. Where a peer is lost it spins for as long as nobody aborts the group, as NCCL's kernels do.

`register` makes it the backend of a kind of device. Processes of a run load it as they load a vendor's plugin for
torch, through an entry point (`install`); for such a run it takes the place of gloo on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "lab"
CALLS_FOLDER = "LAB_BACKEND_CALLS"
DIES = "LAB_BACKEND_DIES"
"""`GROUP:NUMBER`: the first start of this replica group kills itself in its sum of this number; others wait for it."""


class DeviceWork:
    """Work that is under way: `is_completed` is all that tells when the device has finished."""

    def __init__(self, group: DeviceGroup, begin: Callable[[], Any], finish: Callable[[], object]):
        self._group = group
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(begin(), finish), daemon=True).start()

    def _run(self, work: Any, finish: Callable[[], object]) -> None:
        try:
            work.wait()
        except RuntimeError:
            return  # the kernel spins on
        if not self._group.aborted.is_set():
            finish()
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set() or self._group.aborted.is_set()

    def wait(self) -> bool:
        """Return immediately: on a device, the stream waits and the host does not."""
        return True


class DeviceGroup:
    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, host_of: Callable[[Tensor], Tensor]
    ):
        """`host_of` returns the memory of a tensor of the device, and refuses those of others."""
        self._host_of = host_of
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(hours=1))  # kernels keep no time
        self.aborted = threading.Event()
        self.calls: Counter[str] = Counter()
        self.stuck_from: int | None = None
        """The number of the first sum that this rank does not take part in: its kernel never starts."""

    def _start(
        self, name: str, sent: Tensor, received: list[Tensor], act: Callable[[Tensor, list[Tensor]], Any]
    ) -> DeviceWork:
        """Work on copies, which are put where they belong once it is done."""
        self.calls[name] += 1
        _note(self.calls)
        own = self._host_of(sent).clone()
        places = [self._host_of(tensor) for tensor in received]
        copies = [torch.empty_like(place) for place in places]

        def finish() -> None:
            for place, copy in zip(places, copies, strict=True):
                place.copy_(copy)

        return DeviceWork(self, lambda: act(own, copies), finish)

    def allreduce(self, tensors: list[Tensor]) -> DeviceWork:
        def act(own: Tensor, copies: list[Tensor]) -> Any:
            copies[0].copy_(own)
            if self.stuck_from is not None and self.calls["allreduce"] >= self.stuck_from:
                return _Stuck()
            return self._gloo.allreduce(copies)

        return self._start("allreduce", tensors[0], [tensors[0]], act)

    def alltoall_base(self, received: Tensor, sent: Tensor, _received_sizes: Any, _sent_sizes: Any) -> DeviceWork:
        def act(own: Tensor, copies: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(copies[0], own, [], [])

        return self._start("alltoall_base", sent, [received], act)

    def allgather(self, received: list[list[Tensor]], sent: list[Tensor]) -> DeviceWork:
        def act(own: Tensor, copies: list[Tensor]) -> Any:
            return self._gloo.allgather([copies], [own])

        return self._start("allgather", sent[0], received[0], act)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> DeviceWork:
        return self._start("send", tensors[0], [], lambda own, _: self._gloo.send([own], to, tag))

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> DeviceWork:
        return self._start("recv", tensors[0], tensors, lambda _, copies: self._gloo.recv(copies, sender, tag))

    def abort(self) -> None:
        self.aborted.set()
        self.calls["abort"] += 1
        self._gloo = None
        _note(self.calls)


class _Stuck:
    def wait(self) -> None:
        raise RuntimeError("never starts")


def _note(calls: Counter[str]) -> None:
    """Write what this process has called, for the test that started the run."""
    if CALLS_FOLDER not in os.environ:
        return
    group, start = os.environ["TRAINSPEC_GROUP"], os.environ["TRAINSPEC_START"]
    with Path(os.environ[CALLS_FOLDER], f"{group}-{start}.jsonl").open("a") as file:
        file.write(json.dumps(calls) + "\n")
    if start == "1" and os.environ.get(DIES) == f"{group}:{calls['allreduce']}":
        time.sleep(0.5)  # the others are in it by then
        os.kill(os.getpid(), signal.SIGKILL)


def register(device_type: str, host_of: Callable[[Tensor], Tensor]) -> list[DeviceGroup]:
    """Make this the backend of a kind of device; return the list of groups that are made."""
    made: list[DeviceGroup] = []

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DeviceGroup:
        made.append(DeviceGroup(store, rank, size, timeout, host_of))
        return made[-1]

    dist.Backend.register_backend(NAME, create, devices=[device_type])
    dist.Backend.default_device_backend_map[device_type] = NAME
    return made


def load() -> None:
    """The entry point."""
    register("cpu", lambda tensor: tensor)


def install(folder: Path) -> dict[str, str]:
    """Install the plugin for processes that get the environment which this returns."""
    about = folder / "lab_backend-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-backend\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = lab.device_backend:load\n")
    calls = folder / "calls"
    calls.mkdir()
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(folder), str(Path(__file__).resolve().parents[1]), inherited)))
    return {"PYTHONPATH": path, CALLS_FOLDER: str(calls)}
