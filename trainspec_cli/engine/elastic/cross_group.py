"""Communication between corresponding ranks of all replica groups: those with the same rank within their group.

These ranks hold the same part of the model. Once gradients are summed inside each replica group, they are summed over
the groups here. Each quorum has separate process groups, under a separate prefix in the job's authenticated store:

- gloo between the hosts, for data in host memory: counts, digests and states kept there. Its connections also show that
  the peers are alive.
- On an accelerator, the device's own backend (NCCL, or the backend that torch or a vendor's plug-in registers for other
  kinds of devices) for gradients and for the state that a group heals from. A device without such a backend copies
  through the host, over gloo. So do groups that share a device, because their collectives would wait for one another
  (NCCL rejects them).

A gloo collective fails as soon as a connection ends. A device's collective does not. `wait` returns once the collective
is queued, and the kernel spins while a peer is missing; over NVLink, this never becomes an error. So this process waits
on the host until the device has finished (`Work.is_completed`), and meanwhile checks the connections between the hosts.
If a peer is lost or time runs out, it aborts the communicator, which ends the kernel and frees the streams that wait
for it. The tensors are then invalid, and the step does not count. It also closes its connections to the other hosts, so
that the other peers detect the failure within `LOOK_S`. This is torchft's approach (abort, and a new process group in
every quorum); torch's own error handling would end the process (`cuda_only.open_nccl`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.accelerators import physical_device
from trainspec_cli.engine.comm.codec import is_established, open_connections
from trainspec_cli.engine.comm.forking import Background
from trainspec_cli.engine.comm.joining import RendezvousStore
from trainspec_cli.engine.cuda_only import open_nccl
from trainspec_cli.engine.shares import Share

HEAL_TAG = 0
LARGE_BYTES = 2**20
"""Tensors of at least this many bytes are summed individually. Smaller tensors are combined into packets of this
size."""
LOOK_S = 0.05
"""Seconds between two checks of the peers' connections while a device is working."""
SHORTEST_PAUSE_S = 2e-5
LONGEST_PAUSE_S = 1e-3
"""The longest pause, in seconds, between two checks of whether the device has finished. Pauses double up to this
length."""


def exchange_backend(device_type: str) -> str:
    """Return the backend that replica groups use for tensors on such devices: torch's default for this kind of device,
    or gloo if this version of torch has none."""
    try:
        name = dist.get_default_backend_for_device(device_type)
    except ValueError:  # no plug-in has registered a backend
        return "gloo"
    exchanges_nothing = name == "fake"  # torch's test tools register this backend for kinds without a plug-in
    return "gloo" if exchanges_nothing or not dist.is_backend_available(name) else name


class CrossGroupComm:
    """The connections to the same rank in the other groups. Every call blocks until done, and raises RuntimeError if a
    peer is lost or late."""

    def __init__(self, name: str, rank: int, size: int, timeout_s: float, device: torch.device):
        """All peers rendezvous under `name`, which must be unique within the run. Raises OSError if the rendezvous
        server cannot be reached, and RuntimeError if a peer does not arrive."""
        timeout = timedelta(seconds=timeout_s)
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._device_type = device.type
        self._own: Any = None
        """The process group that uses the device's backend; None if gloo is used for everything."""
        self.staged_because = ""
        """The reason why the device's tensors are copied through host memory; empty if they are not."""
        self._store = RendezvousStore(
            timeout
        )  # keep a reference, because process groups hold only the store's C++ part
        before = set(open_connections())
        self._host: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/host", self._store), rank, size, timeout)
        """None after `close`."""
        opened = set(open_connections()) - before
        self._peers = opened if len(opened) == size - 1 else set()
        """The connections to the other hosts. Empty if the peers' connections could not be identified, because other
        threads opened connections at the same time. In that case, only the timeout ends an exchange on the device."""
        backend = exchange_backend(device.type)
        if backend == "gloo" and device.type != "cpu":
            self.staged_because = f"this version of torch has no backend for {device.type}"
            return
        if size == 1:
            return
        # Peers compare their devices' positions on the bus, if known.
        place = physical_device(device) if device.type != "cpu" else None
        number = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], signed=True) if place else 0
        known = [int(other) for other in self.gather(torch.tensor([number])) if int(other)]
        if len(set(known)) < len(known):
            self.staged_because = "several groups share a device"
        elif backend != "gloo":
            try:
                self._open_own(backend, dist.PrefixStore(f"{name}/device", self._store), timeout, device)
            except BaseException:
                self.close()
                raise

    def _open_own(self, backend: str, store: dist.Store, timeout: timedelta, device: torch.device) -> None:
        if backend == "nccl":
            self._own = open_nccl(store, self.rank, self.size, timeout)
        elif backend == "xccl":
            self._own = dist.ProcessGroupXCCL(store, self.rank, self.size, dist.ProcessGroupXCCL.Options())
        else:
            plugin = dist.Backend._plugins[backend.upper()]
            if plugin.extended_api:
                asked = dist.distributed_c10d._DistributedBackendOptions()
                asked.store = store
                asked.group_rank = self.rank
                asked.group_size = self.size
                asked.timeout = timeout
                asked.global_ranks_in_group = list(range(self.size))
                self._own = plugin.creator_fn(asked, None)
            else:
                self._own = plugin.creator_fn(store, self.rank, self.size, timeout)
        if backend in (
            "nccl",
            "xccl",
        ):  # connect now rather than in the first exchange, so that a lost peer is detected here
            self._own.eager_connect_single_device(device)

    def close(self) -> None:
        """End all exchanges, including those in other threads, and close the connections; waiting peers detect this
        immediately. Raises RuntimeError if the device's backend cannot end its collectives; the process must then
        end."""
        own = self._own
        self._own = None
        self._host = None  # first, so that a thread waiting for aborted work learns that the result is invalid
        if own is not None:
            own.abort()

    def _host_group(self) -> Any:
        if self._host is None:
            raise RuntimeError("the exchange with the other replica groups has been closed")
        return self._host

    def _own_group(self, tensor: Tensor) -> Any:
        """Return the process group for the tensor's device; None if the tensor must be copied to the host first."""
        return self._own if tensor.device.type == self._device_type else None

    def _finish(self, work: Any) -> None:
        """Wait until the device has finished `work`. If a peer is lost or time runs out, abort it."""
        started_s = time.monotonic()
        looked_s = started_s
        pause_s = SHORTEST_PAUSE_S
        while not work.is_completed():
            self._host_group()  # stop waiting if another thread has closed the connections
            now_s = time.monotonic()
            if now_s - started_s > self._timeout_s:
                self.close()
                raise RuntimeError(f"an exchange between replica groups has taken more than {self._timeout_s:g} s")
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                if not all(map(is_established, self._peers)):
                    self.close()
                    raise RuntimeError("a replica group has closed its connection during an exchange between devices")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._host_group()  # aborted work is reported as completed
        work.wait()  # raises a failed collective's error; makes the current stream wait for the collective

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all peers, in place."""
        if (own := self._own_group(tensor)) is not None:
            self._finish(own.allreduce([tensor.detach()]))
            return
        on_host = tensor.detach().cpu()
        self._host_group().allreduce([on_host]).wait()
        if tensor.device.type != "cpu":
            tensor.copy_(on_host)

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        """Send row i to peer i, and return the received rows, by sender."""
        if (own := self._own_group(sent_RB)) is not None:
            received = torch.empty_like(sent_RB, memory_format=torch.contiguous_format)
            self._finish(own.alltoall_base(received, sent_RB.contiguous(), [], []))
            return received
        on_host = sent_RB.cpu().contiguous()
        received = torch.empty_like(on_host)
        self._host_group().alltoall_base(received, on_host, [], []).wait()
        return received.to(sent_RB.device)

    def gather_rows(self, own_B: Tensor) -> Tensor:
        """Return the tensors of all peers, in order, on the tensor's device."""
        if (own := self._own_group(own_B)) is not None:
            gathered = [torch.empty_like(own_B) for _ in range(self.size)]
            self._finish(own.allgather([gathered], [own_B.detach().contiguous()]))
            return torch.stack(gathered)
        return torch.stack(self.gather(own_B)).to(own_B.device)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all peers, in order, on the host."""
        on_host = tensor.detach().cpu()
        gathered = [torch.empty_like(on_host) for _ in range(self.size)]
        self._host_group().allgather([gathered], [on_host]).wait()
        return gathered

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        for tensor in tensors:
            if (own := self._own_group(tensor)) is not None:
                self._finish(own.send([tensor.detach().contiguous()], to, HEAL_TAG))
            else:
                self._host_group().send([tensor.detach().cpu().contiguous()], to, HEAL_TAG).wait()

    def receive_(self, tensors: Sequence[Tensor], sender: int) -> None:
        """Overwrite `tensors` with the tensors sent by `sender`."""
        for tensor in tensors:
            if (own := self._own_group(tensor)) is not None:
                received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._finish(own.recv([received], sender, HEAL_TAG))
            else:
                received = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._host_group().recv([received], sender, HEAL_TAG).wait()
            tensor.copy_(received)


def packets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield, for each packet, the indices of the tensors that are exchanged together. They have the same dtype."""
    small: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
            yield [place]
            continue
        waiting = small.setdefault(tensor.dtype, [])
        waiting.append(place)
        if sum(tensors[other].nbytes for other in waiting) >= LARGE_BYTES:
            yield small.pop(tensor.dtype)
    yield from small.values()


@torch.no_grad()
def sum_as_one(packet: Sequence[Tensor], sum_: Callable[[Tensor], None]) -> None:
    """Sum several tensors in one exchange, in the dtype of the first, in place."""
    if len(packet) == 1 and packet[0].is_contiguous():
        sum_(packet[0])
        return
    flat = torch.cat([tensor.flatten().to(packet[0]) for tensor in packet])
    sum_(flat)
    for tensor, part in zip(packet, flat.split([tensor.numel() for tensor in packet]), strict=True):
        tensor.copy_(part.view_as(tensor))


# Send gradients to the other replica groups in packets, while the backward pass is still running.
#
# The gradients in each packet and the order of the packets depend only on the layout, so all groups send the same
# packets, regardless of their micro-batches. A packet is sent when its gradients, and those of all packets before it,
# are final.


@dataclass(frozen=True)
class Packet:
    number: int
    """The packet's position, counted in the model's order of parameters."""
    shares: tuple[Share, ...]

    @property
    def gradients(self) -> list[Tensor]:
        return [share.gradient for share in self.shares if share.gradient is not None]


def packets_in_order(shares: Sequence[Share], outside: Collection[str], late: Collection[str]) -> list[Packet]:
    """Divide the trained shares into packets, roughly in the order in which a backward pass finishes their gradients.
    The last block is finished first. Parameters `outside` the blocks follow, and then those named in `late`, which are
    finished only after all passes."""
    trained = [share for share in shares if share.is_trained]
    made = [
        Packet(number, tuple(trained[place] for place in places))
        for number, places in enumerate(packets([share.local for share in trained]))
    ]
    places = {id(share): place for place, share in enumerate(trained)}

    def order(packet: Packet) -> tuple[int, int]:
        names = {share.name for share in packet.shares}
        end = 2 if names & set(late) else 1 if names & set(outside) else 0
        return end, -min(places[id(share)] for share in packet.shares)

    return sorted(made, key=order)


def names_outside_blocks(parts: Iterable[Any]) -> set[str]:
    """Return the names of the stages' parameters that are not in blocks: embeddings, heads and final norms."""
    names: set[str] = set()
    for part in parts:
        of_blocks = {id(parameter) for block in part.block_modules() for parameter in block.parameters()}
        names |= {name for name, parameter in part.named_parameters() if id(parameter) not in of_blocks}
    return names


class GradientPackets:
    """Sends the gradients of one train state in packets. Each step calls `begin`, runs backward passes, and then calls
    `finish` or `abandon`."""

    def __init__(
        self,
        ordered: Sequence[Packet],
        late: Collection[str],
        sum_: Callable[[int, Tensor], None],
        beside: Background,
        await_sums: Callable[[], Callable[[], object]] = lambda: lambda: None,
    ):
        """`sum_` gets a packet's number and its gradients as one tensor, and sums them over the groups in place.
        `await_sums` returns a function that waits for the sums started within the group; a packet is sent after
        that."""
        self._packets = ordered
        self._sum = sum_
        self._beside = beside
        self._await_sums = await_sums
        shares = [share for packet in ordered for share in packet.shares]
        self._left: dict[int, int] = {}
        """For each share, the number of exchanges within the group that its gradient still needs; empty between
        steps."""
        self._next = len(ordered)
        """Index of the next packet to send."""
        self._hooks = [
            share.parameter.register_post_accumulate_grad_hook(self._noting(share))
            for share in shares
            if share.name not in late
        ]

    def begin(self, exchanges: int) -> None:
        """Begin a step in which each gradient is exchanged `exchanges` times within the group. If 0, packets are held
        back until `finish` is called."""
        self._beside.wait()  # exchanges of an abandoned step may still arrive
        self._next = 0
        self._left = {id(share): exchanges for packet in self._packets for share in packet.shares if exchanges}

    def finish(self) -> None:
        """Send the remaining packets, and wait until all of them are summed."""
        for packet in self._packets[self._next :]:
            self._send(packet)
        self._next = len(self._packets)
        self._left = {}
        self._beside.wait()

    def abandon(self) -> bool:
        """Stop sending this step's packets. Return whether any packet has been sent."""
        sent = self._next
        self._next = len(self._packets)
        self._left = {}
        return sent > 0

    def detach(self) -> None:
        """Stop watching the gradients."""
        for hook in self._hooks:
            hook.remove()

    def _noting(self, share: Share) -> Callable[[Tensor], None]:
        def note(_parameter: Tensor) -> None:
            if id(share) in self._left:
                self._left[id(share)] -= 1
                while self._next < len(self._packets):
                    packet = self._packets[self._next]
                    if any(self._left.get(id(other)) != 0 for other in packet.shares):
                        break  # the packet's gradients are not final
                    self._send(packet)
                    self._next += 1

        return note

    def _send(self, packet: Packet) -> None:
        if gradients := packet.gradients:
            act = partial(sum_as_one, gradients, partial(self._sum, packet.number))
            self._beside.start(act, after=self._await_sums())
