"""Exchanges between emulated devices, with NCCL's semantics.

An exchange is queued in a stream of its group, after everything queued in the calling stream so far. The host continues
immediately, and `wait` makes the calling stream wait. The bytes are sent over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from trainspec_cli.wings.emulated.engine.streams import SCHEDULER, QueuedWork, Stream, StreamEvent, current_stream

_streams: dict[tuple[str, str], Stream] = {}
"""The stream of each group, and of each group's messages to and from each peer."""
_kept: list[DeviceExchange] = []
"""Exchanges in progress: torch's part of a handle does not keep the Python part alive."""


class DeviceExchange(torch._C._distributed_c10d.Work):
    """The handle of an exchange."""

    def __init__(self, done: StreamEvent, tensors: Any):
        super().__init__()
        self._done = done
        self._tensors = tensors
        """Keeps the tensors' memory until a stream waits, like ProcessGroupNCCL."""

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
"""Exchanges that gloo completes only when something waits for them."""


class Waited:
    """An exchange for which a thread waits."""

    def __init__(self, wait: Callable[[], object]):
        self._future: Future[object] = Future()
        threading.Thread(target=self._run, args=(wait,), daemon=True).start()

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            self._future.set_result(wait())
        except Exception as error:  # raised in the thread that observes completion
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> object:
        return self._future.result()


def _stream_of(group: Any, peer: str = "") -> Stream:
    """Return the stream of a group (or of its messages with one peer), after the current stream's work."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    key = str(getattr(group, "group_name", group)), peer
    if key not in _streams:
        _streams[key] = Stream()
    _streams[key].wait_stream(current_stream())
    return _streams[key]


def _lacks_values(tensors: Any) -> bool:
    """Return whether these are the tensors of sizes mode, in which an exchange sends nothing and needs no peers."""
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(tensors))


def run_exchange(op: Any, args: Any, kwargs: dict[str, Any], memory_of: Callable[[Any], Any]) -> Any:
    name = op.overloadpacket.__name__
    on_host = tree_map(memory_of, args)
    names = [argument.name for argument in op._schema.arguments]
    group = args[names.index("process_group")]
    # Batched messages do not wait for one another: each direction has its own stream.
    stream = _stream_of(group, f"{name} {args[2]}" if name in ("send", "recv_") else "")

    def start() -> object:
        if _lacks_values(on_host):
            return None
        result = op(*on_host, **kwargs)
        found = result[-1] if isinstance(result, tuple) else result
        work = torch._C._distributed_c10d.Work.unbox(found)
        return Waited(work.wait) if name in COMPLETED_BY_WAIT else work

    stream.add(QueuedWork(start))
    exchange = DeviceExchange(stream.record_event(), args)
    _kept[:] = [exchange, *(one for one in _kept if not one.is_over)]
    boxed = exchange.boxed()
    outputs = [args[place] for place, value in enumerate(op._schema.returns[:-1])]
    if name == "barrier":
        SCHEDULER.finish(stream, stream.queued)
    return (*outputs, boxed) if outputs else boxed


def run_functional(op: Any, args: Any, kwargs: dict[str, Any], memory_of: Callable[[Any], Any], made: Any) -> Any:
    """Queue an exchange that returns a new tensor, as used by DTensor; `made` is that tensor, already allocated."""
    on_host = tree_map(memory_of, args)
    stream = _stream_of(args[-1])
    target = memory_of(made)

    def start() -> object:
        if _lacks_values(on_host):
            return None
        result = op(*on_host, **kwargs)

        def finish() -> None:
            target.copy_(torch.ops._c10d_functional.wait_tensor(result))

        return Waited(finish)

    stream.add(QueuedWork(start))
    made.untyped_storage().exchange = stream.record_event(), args
    return made


def wait_for(tensor: Any) -> Any:
    """Make the current stream wait for the exchange that produces this tensor."""
    storage = tensor.untyped_storage()
    if storage.exchange is not None:
        current_stream().wait_event(storage.exchange[0])
        storage.exchange = None
    return tensor
