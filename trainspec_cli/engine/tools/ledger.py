"""Measure the resource usage of a piece of code: bytes of live tensors, floating-point operations and bytes of
collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainspec_cli.planner.memory.caching_allocator import CachingAllocator, MemoryBlock

_aten = torch.ops.aten
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
}


EXCHANGING_STATE = ("dp_shard", "dp_replicate", "expert_shard", "pp")
"""Axes whose exchanges have separate buffers. The buffers of other axes are activations."""


class Ledger(TorchDispatchMode):
    """Records all memory, computation and communication in its context.

    A storage counts with its current size, from the operation that creates it until it is freed, because FSDP2 frees
    parameters by resizing their storages to zero. Tensors saved by autograd count as activations, tensors gathered by
    FSDP2 as gathered, tensors exchanged by data parallelism and pipelines as collectives, named tensors under their
    name (`name`), and all others as temporaries.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.flops = 0.0
        self.comm_bytes: Counter[str] = Counter()
        self.axes: dict[str, str] = {}
        """Maps names of process groups to their mesh axes."""
        self.by_cause: Counter[str] = Counter()
        self.peak_by_cause: Counter[str] = Counter()
        self.vocabulary: int | None = None
        """Size of a rank's part of the vocabulary. Rows of this length are logits. Matrices with this number of rows
        that are returned by an operation are gradients of the embedding or the head."""
        self.allocator = CachingAllocator(expandable=expandable_segments)
        """The memory that PyTorch's allocator for CUDA devices would reserve for the same storages."""
        self._blocks: dict[int, MemoryBlock] = {}
        self._sizes: dict[int, int] = {}
        self._causes: dict[int, str] = {}
        self._births: dict[int, int] = {}
        self._time = self._peak_time = 0
        """Number of storages created so far, and until the peak."""
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def begin(self) -> None:
        """Start counting here. Live tensors remain counted."""
        self.peak_bytes, self.flops, self.comm_bytes = self.live_bytes, 0.0, Counter()
        self.peak_by_cause = Counter(self.by_cause)
        self._peak_time = self._time

    def name(self, tensors: Iterable[Tensor], cause: str) -> None:
        """Count the memory of `tensors` as `cause` from now on. If they were alive at the peak, count it there too,
        because a buffer is created before the operation that shows its purpose."""
        for tensor in _tensors(list(tensors)):
            self._rename(tensor.untyped_storage()._cdata, cause)

    def _rename(self, key: int, cause: str) -> None:
        if key in self._sizes:
            counters = [self.by_cause]
            if self._births[key] <= self._peak_time:
                counters.append(self.peak_by_cause)
            for counter in counters:
                counter[self._causes[key]] -= self._sizes[key]
                counter[cause] += self._sizes[key]
            self._causes[key] = cause

    def __enter__(self) -> Ledger:
        self._resize = torch.UntypedStorage.resize_
        ledger = self
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ledger._hold(storage)
            ledger._rename(storage._cdata, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._saving.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._saving.__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _save(self, tensor: Tensor) -> Tensor:
        cause = self._causes.get(tensor.untyped_storage()._cdata)
        if not isinstance(tensor, DTensor) and cause in ("temporaries", "collectives"):
            owner = tensor if tensor._base is None else tensor._base
            self.name([tensor], "gathered" if isinstance(owner, nn.Parameter) else "activations")
        return tensor

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            # The size of the larger side, which a rank holds before or after the exchange.
            kind = COLLECTIVES.get(func._overloadpacket.__name__)
            if kind:
                sides = [sum(t.nbytes for t in _tensors(argument)) for argument in args]
                group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
                axis = self.axes.get(dist.ProcessGroup.unbox(group).group_name, "all")
                self.comm_bytes[f"{axis} {kind}"] += max(sides, default=0)
                if axis in EXCHANGING_STATE:
                    for tensor in _tensors(args):
                        if self._causes.get(tensor.untyped_storage()._cdata) == "temporaries":
                            self.name([tensor], "collectives")
        else:
            packet = func._overloadpacket
            if packet in _CPU_ATTENTION:
                count, tensors, causal = _CPU_ATTENTION[packet]
                half = len(args) > causal and args[causal]  # a causal core computes half of the scores
                self.flops += count(*(tensor.shape for tensor in args[:tensors])) * (0.5 if half else 1.0)
            elif packet in flop_registry:
                self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            for tensor in _tensors(result):
                cause = "temporaries"
                if func is _aten._to_copy.default and self._causes.get(args[0].untyped_storage()._cdata) == "gradients":
                    cause = "gradients"  # full gradients in the exchange format
                elif self.vocabulary is not None and tensor.dim() == 2:
                    if tensor.shape[1] == self.vocabulary:
                        cause = "logits"
                    elif tensor.shape[0] == self.vocabulary:
                        cause = "gradients"
                self._hold(tensor.untyped_storage(), cause)
        return result

    def _hold(self, storage: torch.UntypedStorage, cause: str = "temporaries") -> None:
        """Count a storage's current size. New storages are tracked until they are freed."""
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._drop, key)
            self._causes[key] = cause
            self._time += 1
            self._births[key] = self._time
        grown = size - self._sizes.get(key, 0)
        if grown:
            self._reserve(key, size)
        self._sizes[key] = size
        self.live_bytes += grown
        self.by_cause[self._causes[key]] += grown
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_by_cause = self.live_bytes, Counter(self.by_cause)
            self._peak_time = self._time

    def _reserve(self, key: int, size: int) -> None:
        """Replace the storage's block by one with the storage's size."""
        if key in self._blocks:
            self.allocator.free(self._blocks.pop(key))
        if size:
            self._blocks[key] = self.allocator.allocate(size)

    def _drop(self, key: int) -> None:
        self._reserve(key, 0)
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size
        self.by_cause[self._causes.pop(key)] -= size


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yield the tensors that have memory. A DTensor is a wrapper whose content is counted separately, and meta tensors
    have no memory."""
    found = (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor))
    return (tensor for tensor in found if tensor.device.type != "meta")


_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4, 7),
}
"""Attention on a CPU: its count of operations, the number of tensors that it takes, and the place of `is_causal`."""
