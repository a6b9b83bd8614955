"""Exchanges between emulated devices, with NCCL's semantics.

An exchange is queued in a stream of its group, after everything queued in the calling stream so far. The host continues
immediately, and `wait` makes the calling stream wait. gloo transfers the bytes. Before the transfer, the ranks compare
which exchange they run and when they arrived in virtual time. If they run different exchanges, all ranks fail with an
error that names both calls, whereas gloo would hang or corrupt memory. The exchange starts on all ranks when the last
rank arrives."""

from __future__ import annotations

import inspect
import json
import os
import re
import sysconfig
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trainspec_cli.core.environment_names import EMULATED
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.recipe.results.verdict import Collective
from trainspec_cli.run.recovery.collectives import NEWEST
from trainspec_cli.wings.emulated import read_settings
from trainspec_cli.wings.emulated.engine.costs import TIME, nbytes_of
from trainspec_cli.wings.emulated.engine.streams import HOST, STREAMS, QueuedWork, Stream, StreamEvent, current_stream

_kept: list[DeviceExchange] = []
"""Exchanges in progress, kept alive here because torch's part of a handle does not keep its Python part alive."""


class DeviceExchange(torch._C._distributed_c10d.Work):
    """The handle of an exchange in progress."""

    def __init__(self, done: StreamEvent, tensors: Any):
        super().__init__()
        self._done = done
        self._tensors = tensors
        """Keeps the tensors' memory until a stream waits for the exchange, as ProcessGroupNCCL does."""

    def wait(self, timeout: Any = None) -> bool:
        self.synchronize()
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        current_stream().wait_event(self._done)
        self._tensors = None

    @property
    def is_over(self) -> bool:
        return self._tensors is None or self.is_completed()


COMPLETED_BY_WAIT = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "send", "recv_")
"""Exchanges that gloo only completes when a thread waits for them."""


class Waited:
    """An exchange that a thread is waiting for."""

    def __init__(self, wait: Callable[[], object]):
        self._future: Future[object] = Future()
        threading.Thread(target=self._run, args=(wait,), daemon=True).start()

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            self._future.set_result(wait())
        except Exception as error:  # raised in the thread that observes the completion
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        return self._future.result()


# A rank's part in an exchange


@dataclass(frozen=True)
class Arrival:
    agreed: str
    """The properties of the exchange that must be the same on all ranks."""
    text: str
    """The exchange and the line that calls it, for error messages."""
    nbytes: int
    """The larger of the sizes that the rank sends and receives."""
    at_s: float = 0.0
    """Virtual time when the rank arrives."""


ARRIVAL_BYTES = 640
"""Size of the message that reports an arrival to the other ranks. Texts are shortened to fit."""
SITE_CHARS = 160
SHAPE_CHARS = 80


def encode(arrival: Arrival) -> Tensor:
    text = json.dumps(asdict(arrival), allow_nan=False).encode().ljust(ARRIVAL_BYTES)
    assert len(text) == ARRIVAL_BYTES
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def decode(message: Tensor) -> Arrival:
    return Arrival(**json.loads(message.numpy().tobytes()))


UNEVEN = {"allgather_", "reduce_scatter_", "alltoall_", "alltoall_base_", "all_to_all_single", "gather_", "scatter_"}
"""Exchanges whose tensors may differ in size between ranks."""
MESSAGES = {"send": "message", "recv_": "message"}


def describe(op: Any, args: Any, made: Any = None) -> tuple[str, Arrival]:
    """Return the kind of an exchange, and this rank's part in it. `made`: its result, if that is a new tensor."""
    name = op.overloadpacket.__name__
    # An exchange has several variants, such as `_allgather_base_` and `all_gather_into_tensor`.
    kind = re.sub("_|base|into|tensor|single|coalesced", "", name)
    sides = [args[0], args[1], made]
    tensors = [leaf for leaf in tree_leaves(sides) if isinstance(leaf, Tensor)]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    agreed = [MESSAGES.get(name, kind), *dtypes]
    if name not in UNEVEN:
        agreed.append(str(sum(tensor.numel() for tensor in tensors)))
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if argument.name in ("root_rank", "src") and kind != "recv":
            agreed.append(f"from {value}")
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    text = f"{name.strip('_')} of {' and '.join(dtypes)} {shapes[:SHAPE_CHARS]} at {call_site()[-SITE_CHARS:]}"
    return kind, Arrival(" ".join(agreed), text, max(nbytes_of(side) for side in sides))


OWN_FOLDER = str(Path(__file__).parents[1])
LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")


def call_site() -> str:
    """Return `FILE:LINE` of the innermost call outside torch and this device. If there is none, as in autograd's
    threads, return torch's own call."""
    frame = inspect.currentframe()
    innermost = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN_FOLDER):
            innermost = innermost or f"{file}:{frame.f_lineno}"
            if not file.startswith(LIBRARIES) and not file.endswith("typing_extensions.py"):  # it wraps functions
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost


def require_same(arrivals: Mapping[int, Arrival], where: str) -> None:
    """Raise RuntimeError if the ranks do not run the same exchange."""
    if len({arrival.agreed for arrival in arrivals.values()}) > 1:
        raise RuntimeError(f"{where}: the ranks do not run the same exchange: {listed(arrivals)}")


def listed(arrivals: Mapping[int, Arrival]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, arrival in sorted(arrivals.items()):
        ranks[arrival.text].append(rank)
    return "; ".join(f"rank {', '.join(map(str, found))}: {text}" for text, found in ranks.items())


# Groups and their exchanges


@dataclass
class Entered:
    """An exchange that this rank has called. It does not keep the exchange's tensors in memory."""

    number: int
    arrival: Arrival
    done: bool = False


def read_collectives() -> list[Collective]:
    """Return this rank's newest collectives of each group, oldest first. What the ranks must agree on is their kind."""
    found = []
    for communicator in _communicators.values():
        group = f"{communicator.group.group_name}/{communicator.group.group_desc}"
        for one in list(communicator.newest):
            line = Path(one.arrival.text.rpartition(" at ")[2]).name
            found.append(Collective(group=group, number=one.number, kind=one.arrival.agreed, done=one.done, line=line))
    return found


class Communicator:
    """The exchanges of a group. Collectives have separate connections, as with NCCL, because they have no fixed order
    relative to the host's collectives over the same group."""

    def __init__(self, group: Any):
        self.group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.streams: defaultdict[str, Stream] = defaultdict(Stream)
        """The stream for collectives (key ""), and the streams for messages to and from each peer. They are separate
        because batched messages do not wait for one another."""
        self.numbers: defaultdict[str, int] = defaultdict(int)
        """Number of exchanges so far, separately for collectives (key "") and for messages between two ranks."""
        self.newest: deque[Entered] = deque(maxlen=NEWEST)
        """The newest collectives, for the report on a hanging step."""

    @cached_property
    def store(self) -> dist.PrefixStore:
        return dist.PrefixStore("emulated", self.group.get_group_store())

    @cached_property
    def opening(self) -> Waited:
        return Waited(self._open)

    def _open(self) -> tuple[Any, Any]:
        """Return the connections of a group, as torch's backend and as a process group. Called collectively by all
        ranks of the group."""
        rank, size = self.group.rank(), self.group.size()
        gloo = dist.ProcessGroupGloo(self.store, rank, size, dist.distributed_c10d.default_pg_timeout)
        own = dist.ProcessGroup(self.store, rank, size)
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        own._set_group_name(self.own_name)  # the name by which torch's flight recorder counts collectives
        registry = torch._C._distributed_c10d
        registry._unregister_process_group(self.own_name)  # of an earlier, destroyed group with this name
        registry._register_process_group(self.own_name, own)
        return gloo, own

    @property
    def own_name(self) -> Any:
        return f"{self.group.group_name}/emulated"


_communicators: dict[str, Communicator] = {}


def communicator_of(group: Any) -> Communicator:
    """Return the communicator of a group, which may be torch's object, a boxed object or a name."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.distributed_c10d._resolve_process_group(group)
    found = _communicators.get(group.group_name)
    if found is None or found.group is not group:
        found = _communicators[group.group_name] = Communicator(group)
    return found


def stream_names() -> dict[Stream, str]:
    """Return this process's streams with their names in a trace."""
    names = {stream: f"stream {stream.number}" for stream in STREAMS}
    for communicator in _communicators.values():
        described = communicator.group.group_desc.removeprefix("mesh_")
        for channel, stream in communicator.streams.items():
            names[stream] = f"exchanges, {described} {channel}".strip()
    return names


LATE_S = 1.0
"""Real time after which a waiting rank reports its arrival in the store."""


class PendingExchange:
    """An exchange in progress. Its ranks compare what they run, and then run it."""

    def __init__(self, communicator: Communicator, key: str, kind: str, mine: Arrival, begin: Callable[[Any], Any]):
        self._communicator = communicator
        self._kind = kind
        self._mine = mine
        self._begin = begin
        """Starts the transfer over a process group, and returns its handle."""
        communicator.numbers[key] += 1
        self._key = f"{communicator.numbers[key]}{key}"
        self._entered = Entered(communicator.numbers[key], mine)
        if not key:
            communicator.newest.append(self._entered)
        self._began_s = time.monotonic()
        self._is_reported = False
        self._work: Any = None
        self.end_s = mine.at_s

    def is_completed(self) -> bool:
        if self._work is None and not self._meet():
            if time.monotonic() - self._began_s > min(LATE_S, timeout_s() / 2):
                self._report()
            return False
        self._entered.done = bool(self._work.is_completed())
        return self._entered.done

    def wait(self) -> None:
        self._work.wait()

    def _meet(self) -> bool:
        """Return whether all ranks have arrived; if so, start the transfer."""
        raise NotImplementedError

    @property
    def _where(self) -> str:
        return f"exchange {self._key} of group {self._communicator.group.group_name}"

    def _agree(self, arrivals: Mapping[int, Arrival]) -> None:
        require_same(arrivals, self._where)
        self.end_s = max(arrival.at_s for arrival in arrivals.values())
        if TIME.costs is not None:
            nbytes = max(arrival.nbytes for arrival in arrivals.values())
            ranks = sorted(arrivals)
            self.end_s += TIME.costs.disturbed_exchange_s(self._kind, ranks, nbytes, self.end_s, self._where)

    def _report(self) -> None:
        """Report to the other ranks that this rank is waiting. Raises RuntimeError if the others are too late."""
        store = self._communicator.store
        if not self._is_reported:
            self._is_reported = True
            store.set(f"{self._key}/{dist.get_rank()}", json.dumps(asdict(self._mine), allow_nan=False))
        if time.monotonic() - self._began_s > timeout_s():
            keys = {rank: f"{self._key}/{rank}" for rank in self._ranks}
            found = {rank: Arrival(**json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}
            late = ", ".join(str(rank) for rank in self._ranks if rank not in found)
            after = f"after {timeout_s():g} s"
            raise RuntimeError(f"{self._where}: {after}, rank {late} has not arrived; {listed(found)}")

    @property
    def _ranks(self) -> Sequence[int]:
        return self._communicator.ranks


class PendingCollective(PendingExchange):
    _swap: Any = None
    _arrived: Sequence[Tensor] = ()

    def _meet(self) -> bool:
        if len(self._ranks) == 1:
            self._work = self._begin(self._communicator.group)
            return True
        if not self._communicator.opening.is_completed():
            return False
        gloo, own = self._communicator.opening.wait()
        if self._swap is None:
            self._arrived = [torch.empty(ARRIVAL_BYTES, dtype=torch.uint8, device="cpu") for _ in self._ranks]
            self._swap = gloo.allgather([self._arrived], [encode(self._mine)])
        if not self._swap.is_completed():
            return False
        self._swap.wait()
        self._agree(dict(zip(self._ranks, map(decode, self._arrived), strict=True)))
        self._work = self._begin(own)
        return True


MEETING_TAG = 1 << 20
"""First tag of the messages that compare the two ends of a message. The engine's own messages use smaller tags."""


class PendingMessage(PendingExchange):
    def __init__(
        self,
        communicator: Communicator,
        kind: str,
        mine: Arrival,
        begin: Callable[[Any], Any],
        peer: int,
        tag: int,
        *,
        is_sender: bool,
    ):
        self._peer = communicator.ranks[peer]
        ends = (dist.get_rank(), self._peer) if is_sender else (self._peer, dist.get_rank())
        super().__init__(communicator, f" from rank {ends[0]} to {ends[1]}", kind, mine, begin)
        gloo = communicator.group._get_backend(torch.device("cpu"))
        self._arrived = torch.empty(ARRIVAL_BYTES, dtype=torch.uint8, device="cpu")
        # Two ranks may be exchanging messages in both directions at the same time, so each direction has separate tags.
        to_receiver = MEETING_TAG + 2 * tag
        to_sender = to_receiver + 1
        self._sent = encode(self._mine)
        sent = gloo.send([self._sent], peer, to_receiver if is_sender else to_sender)
        received = gloo.recv([self._arrived], peer, to_sender if is_sender else to_receiver)
        self._swap = Waited(lambda: (sent.wait(), received.wait()))

    @property
    def _ranks(self) -> Sequence[int]:
        return sorted((dist.get_rank(), self._peer))

    def _meet(self) -> bool:
        if not self._swap.is_completed():
            return False
        self._swap.wait()
        self._agree({dist.get_rank(): self._mine, self._peer: decode(self._arrived)})
        self._work = self._begin(self._communicator.group)
        return True


@cache
def timeout_s() -> float:
    return read_settings(os.environ.get(EMULATED, "")).timeout_s


def queue(communicator: Communicator, channel: str, exchange: QueuedWork) -> StreamEvent:
    """Queue an exchange after the current stream's work. Return the event that marks its end."""
    HOST.launch()
    stream = communicator.streams[channel]
    stream.wait_stream(current_stream())
    stream.add(exchange)
    return stream.record_event()


def without_peers(kind: str, ranks: Sequence[int], mine: Arrival) -> QueuedWork:
    """Return an exchange without values. The other ranks are assumed to arrive at the same time."""
    duration_s = 0.0 if TIME.costs is None else TIME.costs.exchange_s(kind, ranks, mine.nbytes)
    about = f"{format_bytes(mine.nbytes)}, {mine.text.rpartition(' at ')[0]}"
    return QueuedWork(duration_s=duration_s, name=kind, about=about, is_exchange=True)


def _lacks_values(tensors: Any) -> bool:
    """Return whether these are tensors of sizes mode, in which an exchange sends nothing and needs no peers."""
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(tensors))


def run_exchange(op: Any, args: Any, kwargs: dict[str, Any], memory_of: Callable[[Any], Any]) -> Any:
    name = op.overloadpacket.__name__
    on_host = tree_map(memory_of, args)
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("process_group")
    communicator = communicator_of(args[place])
    kind, mine = describe(op, args)

    def begin(group: Any) -> Any:
        given = [*on_host]
        given[place] = group.boxed()
        result = op(*given, **kwargs)
        found = result[-1] if isinstance(result, tuple) else result
        work = torch._C._distributed_c10d.Work.unbox(found)
        return Waited(work.wait) if name in COMPLETED_BY_WAIT else work

    # Queued work refers only to host memory. Keeping the tensors would block memory that the program may reuse.
    message = (args[2], args[3]) if name in MESSAGES else None
    channel = f"{name} {args[2]}" if message else ""

    def start(at_s: float) -> PendingExchange:
        arrival = replace(mine, at_s=at_s)
        if message:
            is_sender = name == "send"
            return PendingMessage(communicator, kind, arrival, begin, *message, is_sender=is_sender)
        return PendingCollective(communicator, "", kind, arrival, begin)

    work = QueuedWork(exchange=start)
    if _lacks_values(on_host):
        ranks = [dist.get_rank(), communicator.ranks[args[2]]] if name in MESSAGES else communicator.ranks
        work = without_peers(kind, ranks, mine)
    exchange = DeviceExchange(queue(communicator, channel, work), args)
    _kept[:] = [exchange, *(one for one in _kept if not one.is_over)]
    boxed = exchange.boxed()
    outputs = [args[place] for place, value in enumerate(op._schema.returns[:-1])]
    if name == "barrier":
        communicator.streams[channel].finish()
    return (*outputs, boxed) if outputs else boxed


def run_functional(op: Any, args: Any, kwargs: dict[str, Any], memory_of: Callable[[Any], Any], made: Any) -> Any:
    """Queue an exchange that returns a new tensor, as used by DTensor. `made` is this tensor, already allocated."""
    on_host = tree_map(memory_of, args)
    communicator = communicator_of(args[-1])
    kind, mine = describe(op, args, made)
    target = memory_of(made)
    group_name = args[-1]

    def begin(group: Any) -> Waited:
        name = group_name if group is communicator.group else communicator.own_name
        result = op(*on_host[:-1], name, **kwargs)

        def finish() -> None:
            target.copy_(torch.ops._c10d_functional.wait_tensor(result))

        return Waited(finish)

    def start(at_s: float) -> PendingExchange:
        return PendingCollective(communicator, "", kind, replace(mine, at_s=at_s), begin)

    work = QueuedWork(exchange=start)
    if _lacks_values(on_host):
        work = without_peers(kind, communicator.ranks, mine)
    made.untyped_storage().exchange = queue(communicator, "", work), args
    return made


def wait_for(tensor: Any) -> Any:
    """Make the current stream wait for the exchange that produces this tensor."""
    storage = tensor.untyped_storage()
    if storage.exchange is not None:
        current_stream().wait_event(storage.exchange[0])
        storage.exchange = None
    return tensor
