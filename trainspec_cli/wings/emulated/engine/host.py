"""Host tensors without values: the parameters, gradients and optimizer state of a run with `offload`.

Operations on these tensors take virtual host time, but neither real time nor memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainspec_cli.planner.time.data_parallel import HOST_BYTES_PER_S
from trainspec_cli.wings.emulated.engine.costs import nbytes_of, traffic_bytes
from trainspec_cli.wings.emulated.engine.memory import described, extent, map_host_memory
from trainspec_cli.wings.emulated.engine.streams import HOST

READ_BYTES = 2**20
"""In sizes mode, host tensors of up to this size have values, because the engine reads the step's results from them.
The pages of larger tensors are never written, so they use no memory."""


CPU = torch.device("cpu")


class HostMemory:
    """Counts the bytes of large host tensors in sizes mode."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def new_tensor(self, like: Tensor) -> Tensor:
        """Return zeros with the shape, strides and format of a tensor."""
        nbytes = max(1, extent(like)) * like.dtype.itemsize
        whole = map_host_memory(nbytes)
        if nbytes > READ_BYTES:
            self._count(whole, nbytes)
        return whole.view(like.dtype).as_strided(like.shape, like.stride())

    def lock(self, host: Tensor) -> None:
        """Count a tensor as page-locked. torch's host allocator rounds its size up to a power of two."""
        nbytes = host.untyped_storage().nbytes()
        if nbytes > READ_BYTES:
            self._count(host, (1 << (nbytes - 1).bit_length()) - nbytes)

    def _count(self, host: Tensor, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(host.untyped_storage(), self._release, nbytes)

    def _release(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


HOST_MEMORY = HostMemory()


class HostSizes(TorchDispatchMode):
    """Runs operations on large host tensors only to determine their output shapes and their time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(type(tensor).__name__ == "DTensor" for tensor in tensors):
            return NotImplemented  # this mode is called again with the local tensors
        device = kwargs.get("device")
        makes_host = device == CPU and all(tensor.is_meta for tensor in tensors)
        on_host = [tensor for tensor in tensors if tensor.device == CPU]
        changes_host = device in (None, CPU) and len(on_host) == len(tensors) and nbytes_of(on_host) > READ_BYTES
        if not (makes_host or changes_host):
            return func(*args, **kwargs)
        schema = func._schema
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        if is_view or (schema.returns and "Tensor" not in str(schema.returns[0].type)):
            return func(*args, **kwargs)
        if schema.is_mutable:
            # In-place operations with a result return their first argument.
            self._spend(func, args, kwargs, None)
            return args[0] if schema.returns else None
        shapes = func(*tree_map(described, args), **tree_map(described, kwargs))
        if makes_host and nbytes_of(shapes) <= READ_BYTES:
            return func(*args, **kwargs)
        result = tree_map(lambda leaf: HOST_MEMORY.new_tensor(leaf) if isinstance(leaf, Tensor) else leaf, shapes)
        self._spend(func, args, kwargs, result)
        return result

    def _spend(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        HOST.work(traffic_bytes(func, args, kwargs, result) / HOST_BYTES_PER_S)
