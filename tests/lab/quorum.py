"""Replica groups in memory: threads that meet, exchange tensors and die, as processes do through sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from trainspec_cli.core.wire.rendezvous import FormedQuorum
from trainspec_cli.engine.elastic import membership

TIMEOUT_S = 600.0


class DiedError(Exception):
    """A replica group that a test has killed."""


class Network:
    """The rendezvous server and the connections of groups with one rank each; a group is a thread.

    A quorum is complete when every living group asks for it, and has another number whenever the members have changed
    or one of them has met an error.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._living: dict[str, str] = {}
        self._asking: dict[str, tuple[int, int]] = {}
        self._answers: dict[str, FormedQuorum] = {}
        self._number = 0
        self._members: tuple[str, ...] = ()
        self.boxes: dict[tuple[Any, ...], Any] = {}
        self.broken: set[str] = set()
        """Exchanges that lost a peer."""
        self.users: dict[str, set[str]] = {}
        """Exchange -> threads that take part in it."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(membership, "connect", lambda: None)
        patch.setattr(membership, "QuorumClient", lambda name, _connect: FakeClient(self, name))
        patch.setattr(membership, "CrossGroupComm", lambda *given: FakeComm(self, *given))

    def enter(self, name: str) -> None:
        with self.changed:
            self._living[name] = threading.current_thread().name
            self.changed.notify_all()

    def lose(self, name: str) -> None:
        """End a group's connections, as its process's end does."""
        with self.changed:
            thread = self._living.pop(name, None)
            self._asking.pop(name, None)
            self.broken |= {exchange for exchange, threads in self.users.items() if thread in threads}
            self._answer()
            self.changed.notify_all()

    def lose_thread(self, thread: str) -> None:
        for name in [name for name, of in self._living.items() if of == thread]:
            self.lose(name)

    def join(self, name: str, step: int, failures: int) -> FormedQuorum:
        with self.changed:
            self._asking[name] = (step, failures)
            self._answer()
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: name in self._answers, TIMEOUT_S), "no quorum came"
            return self._answers.pop(name)

    def _answer(self) -> None:
        if not self._living or set(self._asking) != set(self._living):
            return
        names = tuple(sorted(self._asking))
        if names != self._members or any(failures for _, failures in self._asking.values()):
            self._number, self._members = self._number + 1, names
        steps = tuple(self._asking[name][0] for name in names)
        self._answers.update(dict.fromkeys(names, FormedQuorum(str(self._number), names, steps, 0)))
        self._asking.clear()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S), "waited in vain"

    @property
    def living(self) -> int:
        return len(self._living)


class FakeClient:
    def __init__(self, network: Network, name: str):
        self._network, self._name = network, name
        network.enter(name)

    def join(self, step: int, failures: int) -> FormedQuorum:
        return self._network.join(self._name, step, failures)

    def close(self) -> None:
        self._network.lose(self._name)


class FakeComm:
    """Adds in the order of the ranks; raises RuntimeError where a peer has died or closed its end."""

    def __init__(self, network: Network, name: str, rank: int, size: int, _timeout_s: float, _device: torch.device):
        self.network, self.name, self.rank, self.size = network, name, rank, size
        self._calls = 0
        with network.changed:
            network.users.setdefault(name, set()).add(threading.current_thread().name)

    staged_because = ""

    def close(self) -> None:
        with self.network.changed:
            self.network.broken.add(self.name)
            self.network.changed.notify_all()

    def _await(self, ready: Callable[[], bool]) -> None:
        self.network.changed.notify_all()
        assert self.network.changed.wait_for(lambda: ready() or self.name in self.network.broken, TIMEOUT_S)
        if not ready():
            raise RuntimeError("a peer closed its connection")

    def gather(self, tensor: Tensor) -> list[Tensor]:
        with self.network.changed:
            box = self.network.boxes.setdefault((self.name, self._calls), {})
            self._calls += 1
            box[self.rank] = tensor.detach().clone()
            self._await(lambda: len(box) == self.size)
            return [box[rank] for rank in range(self.size)]

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor)).sum(0))

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        with self.network.changed:
            self.network.boxes[self.name, "heal", to] = [tensor.detach().clone() for tensor in tensors]
            self.network.changed.notify_all()

    def receive_(self, tensors: Sequence[Tensor], sender: int) -> None:
        key = (self.name, "heal", self.rank)
        with self.network.changed:
            self._await(lambda: key in self.network.boxes)
            for tensor, sent in zip(tensors, self.network.boxes.pop(key), strict=True):
                tensor.copy_(sent)
