"""Exchanges between emulated devices, as NCCL makes them: queued in a stream of their group, after what the calling stream
has been given so far. The host goes on at once; `wait` lets the calling stream wait. The bytes travel over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from trainspec_cli.wings.emulated.streams import SCHEDULER, Event, Stream, current_stream
from trainspec_cli.wings.emulated.streams import Work as QueuedWork

_streams: dict[tuple[str, str], Stream] = {}
"""The stream of each group, and of each direction between two ranks."""
_kept: list[Any] = []


class Exchange(torch._C._distributed_c10d.Work):
    """The handle of an exchange."""

    def __init__(self, done: Event, result: Any):
        super().__init__()
        self._done = done
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        current_stream().wait_event(self._done)

    def result(self) -> Any:
        return self._result


COMPLETED_BY_WAIT = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
"""Exchanges that gloo composes: their last part is made by who waits."""


class Waited:
    """An exchange for which a thread waits."""

    def __init__(self, work: Any):
        self._thread = threading.Thread(target=work.wait, daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


def run_exchange(op: Any, args: Any, kwargs: dict[str, Any], memory_of: Callable[[Any], Any]) -> Any:
    name = op.overloadpacket.__name__
    on_host = tree_map(memory_of, args)
    group = next(value for value in args if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()))
    known = dist.ProcessGroup.unbox(group)
    pair = str(args[2]) if name in ("send", "recv_") else ""
    stream = _streams.setdefault((known.group_name, pair), Stream())
    stream.wait_stream(current_stream())

    def start() -> object:
        result = op(*on_host, **kwargs)
        found = result[-1] if isinstance(result, tuple) else result
        work = torch._C._distributed_c10d.Work.unbox(found)
        return Waited(work) if name in COMPLETED_BY_WAIT else work

    stream.add(QueuedWork(start))
    exchange = Exchange(stream.record_event(), None)
    _kept.append(exchange)
    boxed = exchange.boxed()
    outputs = [args[place] for place, value in enumerate(op._schema.returns[:-1])]
    if name == "barrier":
        SCHEDULER.finish(stream, stream._queued)
    return (*outputs, boxed) if outputs else boxed
