"""A software accelerator: a torch device that uses host memory and runs its operations on the host.

torch calls such a device PrivateUse1, the extension point for vendor plugins. A device tensor describes host memory
obtained from the device's allocator (memory.py), and an operation on it is queued in the current stream (streams.py),
where it runs as a host operation. Values are therefore bitwise identical to those of a CPU run. The device differs from
a CPU in what the engine's accelerator path relies on: host and device tensors do not mix, order between streams comes
from events and waits, copies are explicit, memory is limited, and reading a value on the host synchronises.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from trainspec_cli.core.environment_names import EMULATED
from trainspec_cli.core.printable import GIB, format_bytes
from trainspec_cli.engine.accelerators import DeviceKind
from trainspec_cli.wings.emulated import KIND, read_settings
from trainspec_cli.wings.emulated.engine import norms
from trainspec_cli.wings.emulated.engine.allocation_log import note_forward
from trainspec_cli.wings.emulated.engine.costs import TIME, nbytes_of
from trainspec_cli.wings.emulated.engine.exchanges import read_collectives, run_exchange, run_functional, wait_for
from trainspec_cli.wings.emulated.engine.host import HOST_MEMORY, READ_BYTES
from trainspec_cli.wings.emulated.engine.memory import (
    DeviceStorage,
    EmulatedMemory,
    described,
    extent,
)
from trainspec_cli.wings.emulated.engine.streams import (
    HOST,
    SCHEDULER,
    Stream,
    StreamEvent,
    counts,
    current_stream,
)

MEMORY = EmulatedMemory()


class DeviceTensor(torch.Tensor):
    _storage: DeviceStorage

    @staticmethod
    def __new__(cls, like: Tensor, storage: DeviceStorage, offset: int = 0) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=offset,
            dtype=like.dtype,
            device=torch.device(KIND, 0),
        )
        made._storage = storage
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})

    @property
    def memory(self) -> Tensor:
        """The host memory behind this tensor, with its current content. In sizes mode, it only has the tensor's
        shape."""
        return self._storage.view(self)

    def untyped_storage(self) -> Any:
        return self._storage

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self._storage.record_stream(stream)

    def tolist(self) -> Any:
        """Return the values as a list. Tensor's own method rejects tensor subclasses."""
        return self.cpu().tolist()

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def tree_map(act: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `act` applied to its leaves. An operation's arguments are only nested lists and dictionaries,
    for which torch.utils._pytree is slow: it would take a quarter of the operation's host time."""
    if isinstance(tree, tuple | list):
        made = [tree_map(act, each) for each in tree]
        return made if isinstance(tree, list) else tuple(made)
    if isinstance(tree, dict):
        return {key: tree_map(act, each) for key, each in tree.items()}
    return act(tree)


def tree_leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def memory_of(value: Any) -> Any:
    """Return the host memory of a device tensor, or any other value unchanged."""
    return value.memory if isinstance(value, DeviceTensor) else value


def new_tensor(like: Tensor) -> DeviceTensor:
    """Return a tensor with the same shape, strides and type in newly allocated memory."""
    shape = f"{tuple(like.shape)} {str(like.dtype).removeprefix('torch.')}"
    return DeviceTensor(like, DeviceStorage(extent(like) * like.dtype.itemsize, MEMORY, shape))


def to_device(host: Tensor) -> DeviceTensor:
    """Return a device tensor with these values. The source may change once this returns."""
    made = new_tensor(host)
    if MEMORY.has_values and SCHEDULER.random is not None:
        # In order mode, new memory is overwritten later in its stream, so values written now would be destroyed.
        _queue(partial(made.memory.copy_, host.clone()))
    elif MEMORY.has_values:
        made.memory.copy_(host)
    return made


# Operations


def run_operation(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queue an operation in the current stream and return its output tensors."""
    packet = op.overloadpacket
    name = packet.__name__
    counts["operations"] += 1
    if MEMORY.log is not None:
        note_forward()
    if op.namespace == "c10d":
        return run_exchange(op, args, kwargs, memory_of)
    if op.namespace == "_c10d_functional":
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return wait_for(args[0])
        return run_functional(op, args, kwargs, memory_of, new_tensor(_shapes(op, args, kwargs)))
    if name in ("_to_copy", "copy_"):
        return _copy(op, args, kwargs)
    if _is_composed(op):
        return op.decompose(*args, **kwargs)
    if name == "_unsafe_view":
        op = torch.ops.aten.view.default
    if name in ATTENTION:
        return ATTENTION[name](*args, **kwargs)
    if name == "all_gather_copy_in":
        return _copy_in(*args)
    if name in INDEXING:
        args = (args[0], [_on_device(index) for index in args[1]], *args[2:])
    _refuse_host_tensors(name, args, kwargs)
    place = torch.device("cpu" if MEMORY.has_values else "meta")
    kwargs = {key: place if isinstance(value, torch.device) else value for key, value in kwargs.items()}
    if not MEMORY.has_values:
        kwargs.pop("generator", None)
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    if _is_view(op):
        return _view(op, args, kwargs)
    if op._schema.is_mutable and (not op._schema.returns or op._schema.returns[0].alias_info is not None):
        result = _run_in_place(op, args, kwargs)
    elif _reads(op, args, kwargs):
        TIME.spend(op, args, kwargs, None)  # the host waits for it first
        return _run(op, args, kwargs)
    else:
        result = _run(op, args, kwargs)
    TIME.spend(op, args, kwargs, result)
    return result


@cache
def _is_composed(op: Any) -> bool:
    """Return whether torch composes this operation from others. Below autograd, such operations arrive undecomposed."""
    is_composed: bool = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    return is_composed and op.overloadpacket.__name__ not in COMPOSED


INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operations where torch implicitly copies host indices to the device. Such copies are easily overlooked."""


def _on_device(index: Any) -> Any:
    if not isinstance(index, Tensor) or isinstance(index, DeviceTensor):
        return index
    counts["host to device"] += 1
    counts["hidden copies"] += 1
    return to_device(index)


def _refuse_host_tensors(name: str, args: Any, kwargs: Any) -> None:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim():  # scalars may, as on CUDA
            found = f"{KIND}:0 and {leaf.device}"
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {found}")


def _is_view(op: Any) -> bool:
    infos = [value.alias_info for value in op._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _view(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a view operation immediately, because it does not read memory."""
    base = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, DeviceTensor))
    return tree_map(lambda leaf: DeviceTensor(leaf, base._storage, leaf.storage_offset()), _infer(op, args, kwargs))


def _run_in_place(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if MEMORY.has_values:
        on_host, host_kwargs = tree_map(memory_of, args), tree_map(memory_of, kwargs)
        _queue(_with_own_random(op, on_host, host_kwargs))
    returned = []
    for value in op._schema.returns:
        for place, argument in enumerate(op._schema.arguments):
            info = argument.alias_info
            if info is not None and value.alias_info is not None and info.before_set == value.alias_info.before_set:
                returned.append(args[place] if place < len(args) else kwargs[argument.name])
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    on_host, host_kwargs = tree_map(memory_of, args), tree_map(memory_of, kwargs)
    if _reads(op, args, kwargs):
        current_stream().synchronize()
        if not MEMORY.has_values:
            return _read_nothing(op, args)
    elif not MEMORY.has_values:
        infer = WITHOUT_VALUES.get(op.overloadpacket.__name__, op)
        shapes = infer(*on_host, **host_kwargs)
        return tree_map(lambda leaf: new_tensor(leaf) if isinstance(leaf, Tensor) else leaf, shapes)
    elif SCHEDULER.random is not None:
        shapes = _shapes(op, args, kwargs)
        if shapes is not None:
            return _run_later(_with_own_random(op, on_host, host_kwargs), shapes)
        counts["not queued"] += 1
        _catch_up()
    else:
        _catch_up()
    result = op(*on_host, **host_kwargs)
    return tree_map(lambda leaf: to_device(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _infer_grouped_product(x: Tensor, weight: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the output shape of a matmul with groups of rows, or of columns if both arguments are matrices. torch only
    infers it for bf16."""
    shape = (*x.shape[:-1], weight.shape[-1])
    if x.dim() == weight.dim() == 2:
        assert offs is not None, "two matrices have groups of columns"
        shape = (len(offs), *shape)
    elif x.dim() > weight.dim():
        shape = shape[1:]
    return x.new_empty(shape)


def _infer_repeated(repeats: Tensor, *, output_size: int) -> Tensor:
    return torch.empty(output_size, dtype=torch.int64, device=repeats.device)


WITHOUT_VALUES: dict[str, Callable[..., Tensor]] = {
    "_grouped_mm": _infer_grouped_product,
    "repeat_interleave": _infer_repeated,
}
"""Operations whose output shapes torch does not infer."""


def _read_nothing(op: Any, args: Any) -> Any:
    """Return the value that the host reads from the device in sizes mode: 0, 0.0 or False."""
    name = op.overloadpacket.__name__
    if name == "_local_scalar_dense":
        return torch.zeros((), dtype=args[0].dtype).item()
    message = f"{name} has no result on the emulated device with sizes=1, because its shape depends on values"
    raise NotImplementedError(message)


def _reads(op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the host needs the values, because the operation returns a number or the shapes depend on the
    values."""
    if kwargs.get("output_size") is not None:  # argument of repeat_interleave
        return False
    if op.overloadpacket.__name__ in INDEXING:
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags


def _catch_up() -> None:
    stream = current_stream()
    SCHEDULER.finish(stream, stream.queued)


def _run_later(run: Callable[[], Any], shapes: Any) -> Any:
    made = tree_map(lambda leaf: new_tensor(leaf) if isinstance(leaf, Tensor) else leaf, shapes)
    targets = [leaf.memory for leaf in tree_leaves(made) if isinstance(leaf, DeviceTensor)]

    def work() -> None:
        values = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    _queue(work)
    return made


def _queue(work: Callable[[], Any], duration_s: float = 0.0) -> None:
    def run() -> None:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            work()

    current_stream().run(run, duration_s)


def _shapes(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the operation's outputs as tensors without memory; None if only running the operation can determine
    them."""
    try:
        return _infer(
            op, args, {key: None if isinstance(value, torch.Generator) else value for key, value in kwargs.items()}
        )
    except (NotImplementedError, RuntimeError):
        return None


_inferred: dict[Any, Any] = {}
"""Cached results of `_infer`, because torch's inference takes longer than the rest of an operation."""
MOST_INFERRED = 50_000


def _infer(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the operation's outputs as tensors without memory."""
    key = op, _signature(args), _signature(kwargs)
    if key not in _inferred:
        if len(_inferred) == MOST_INFERRED:
            _inferred.clear()
        _inferred[key] = op(*tree_map(described, args), **tree_map(described, kwargs))
    return _inferred[key]


def _signature(value: Any) -> Any:
    """Return a key that determines the output shapes of an operation. It distinguishes 1, 1.0 and True."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, tuple | list):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(each)) for key, each in value.items())
    return type(value), value


def _with_own_random(op: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that runs the operation. A random operation uses the generator state at the time it is
    queued."""
    if SCHEDULER.random is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return lambda: op(*args, **kwargs)
    generator: torch.Generator = kwargs.get("generator") or torch.default_generator
    drawn = generator.get_state()
    op(*tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args), **kwargs)

    def call() -> Any:
        now = generator.get_state()
        generator.set_state(drawn)
        result = op(*args, **kwargs)
        generator.set_state(now)
        return result

    return call


# Copies between host and device


_pinned: dict[int, weakref.ref[Any]] = {}
"""Address of page-locked host memory -> the storage that owns it."""


def is_pinned(host: Tensor) -> bool:
    owner = _pinned.get(host.untyped_storage().data_ptr())
    return owner is not None and owner() is not None


def pin(host: Tensor) -> Tensor:
    # Keep a reference to the storage, not the tensor, because FSDP2 only keeps views of the parameters that it pins.
    storage = host.untyped_storage()
    _pinned[storage.data_ptr()] = weakref.ref(storage)
    if not MEMORY.has_values:
        HOST_MEMORY.lock(host)
    return host


def _copy(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy from or to the device. A copy between the device and page-locked memory may run later."""
    is_new = op.overloadpacket.__name__ == "_to_copy"
    source = args[0] if is_new else args[1]
    non_blocking = bool(kwargs.get("non_blocking")) or (not is_new and len(args) > 2 and bool(args[2]))
    if is_new:
        wanted = torch.device(kwargs.get("device") or source.device)
        options = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        with torch.no_grad():
            described = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
            like = op(described, **options)
        target: Tensor
        if wanted.type == KIND:
            target = new_tensor(like)
        else:
            if MEMORY.has_values:
                target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                if SCHEDULER.random is not None:  # a host that reads too early must not find valid values
                    target.untyped_storage().fill_(255)  # type: ignore[attr-defined]
            else:
                target = HOST_MEMORY.new_tensor(like)
            if non_blocking:
                pin(target)  # torch allocates this memory page-locked
    else:
        target = args[0]
    from_host = not isinstance(source, DeviceTensor)
    to_host = not isinstance(target, DeviceTensor)
    if isinstance(source, DeviceTensor) and isinstance(target, DeviceTensor) and _is_same_memory(source, target):
        return target  # torch copies a tensor to itself in `x[rows] += y`, which launches nothing
    into, value = memory_of(target), memory_of(source)
    if from_host:
        counts["host to device"] += 1
        if MEMORY.has_values and not (non_blocking and is_pinned(source)):
            value = source.detach().clone()  # the source must be read before this call returns
    # A copy inside the device accesses its memory twice, possibly with different formats.
    inside = not (from_host or to_host)
    copy_s = TIME.copy_s(nbytes_of((source, target) if inside else source), inside=inside)
    if MEMORY.has_values:
        _queue(lambda: into.copy_(value), copy_s)
    else:
        ends = "to the host" if to_host else "from the host" if from_host else "on the device"
        current_stream().spend(copy_s, f"copy {ends}", lambda: format_bytes(nbytes_of(source)))
        if to_host and extent(target) * target.dtype.itemsize <= READ_BYTES:
            target.zero_()
    if to_host:
        counts["device to host"] += 1
        if not (non_blocking and is_pinned(target)):
            current_stream().synchronize()
    elif from_host and not non_blocking and HOST.is_virtual:
        current_stream().finish()
    return target


def _is_same_memory(one: DeviceTensor, other: DeviceTensor) -> bool:
    """Return whether both tensors describe the same values in the same memory."""
    layouts = [(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in (one, other)]
    return one._storage is other._storage and layouts[0] == layouts[1]


def _copy_in(inputs: list[Tensor], output: Tensor, sizes: list[int], numel: int, rank: int) -> tuple[Tensor, Tensor]:
    """Copy FSDP2's shards to their place in the all-gather buffer. The operation's schema does not state that it
    returns its argument and a view of it."""
    own = output.narrow(0, numel * rank, numel)
    torch._foreach_copy_(own.split(sizes), inputs)
    return own, output


# Attention. torch calls a different kernel on such a device than on a CPU, but the values must be the same.


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output, logsumexp = run_operation(
        flash, (query, key, value, dropout_p, is_causal), {"attn_mask": attn_bias, "scale": scale}
    )
    empty = torch.empty(0, dtype=torch.int64, device=query.device)
    return output, logsumexp, empty, empty, query.shape[2], key.shape[2], empty, empty, empty


def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, grad_input_mask: Any,
    out: Tensor, logsumexp: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, philox_seed: Any, philox_offset: Any, *, scale: float | None = None,
) -> Any:  # fmt: skip
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grads = run_operation(
        backward,
        (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal),
        {"attn_mask": attn_bias, "scale": scale},
    )
    return (*grads, None)


# CUDA kernels that the engine calls by name. Their log-sum-exp is padded to a multiple of 32 queries.


def _padded(logsumexp: Tensor) -> Tensor:
    return torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[2] % 32))


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    output, lse, *_ = _attention(query, key, value, attn_bias, dropout_p, is_causal, scale=scale)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    return output, _padded(lse), seed, seed


def _efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor,
    logsumexp: Tensor, philox_seed: Any, philox_offset: Any, dropout_p: float, grad_input_mask: Any,
    is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    lse = logsumexp[:, :, : query.shape[2]].contiguous()
    given = (grad_out, query, key, value, attn_bias, grad_input_mask, out, lse, None, None, 0, 0)
    return _attention_backward(*given, dropout_p, is_causal, None, None, scale=scale)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _attention(query, key, value, None, dropout_p, is_causal, scale=scale)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any,
    *, scale: float | None = None,
) -> Any:  # fmt: skip
    given = (grad_out, query, key, value, None, None, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
    return _attention_backward(*given, dropout_p, is_causal, None, None, scale=scale)[:3]


ATTENTION: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
FLASH = 1
"""torch's number for the flash attention kernel (at::SDPBackend::flash_attention)."""


def _on_host(value: Any) -> Any:
    """Return a tensor's host memory. In sizes mode, return unused host memory of the same shape, so that torch chooses
    the same kernel."""
    host = memory_of(value)
    if isinstance(host, Tensor) and host.is_meta:
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)
    return host


def _attend(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `scaled_dot_product_attention` that uses the CPU's kernel in cases where torch would decompose it."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if isinstance(query, DeviceTensor):
            given = tree_map(_on_host, (query, key, value, attn_mask, dropout_p, is_causal))
            chosen = torch._fused_sdp_choice(*given, scale=scale, enable_gqa=enable_gqa)
            if chosen == FLASH:
                if attn_mask is not None and attn_mask.dtype == torch.bool:
                    nothing = torch.zeros_like(attn_mask, dtype=query.dtype)
                    attn_mask = nothing.masked_fill(attn_mask.logical_not(), -math.inf)
                fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
                output: Tensor = fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
                return output
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend


# The device's module and its registration


class Generator(torch._C.Generator):
    """The device uses the host's random numbers, so the same seed gives the same values as on a CPU."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        wanted = torch.device(device)
        made: Generator = super().__new__(cls, torch.device("cpu") if wanted.type == KIND else wanted)  # type: ignore[call-arg]
        return made


class DeviceModule:
    """`torch.emulated`: the module that torch, FSDP2 and the engine require for a device type."""

    Stream = Stream
    Event = StreamEvent
    current_stream = staticmethod(current_stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing, because a process sees only one device."""

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        return "emulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    def _sleep(self, cycles: int) -> None:
        """Keep the current stream busy for this many cycles of a 1 GHz clock, like CUDA's function of this name."""
        seconds = cycles / 1e9
        current_stream().run(partial(time.sleep, 0.0 if HOST.is_virtual else seconds), seconds)

    def host_work(self, name: str, seconds: float) -> None:
        """Spend the host's virtual time for a named kind of work (trainspec_cli/engine/accelerators.py)."""
        if HOST.is_virtual:
            HOST.work(seconds, name)
        elif seconds:
            time.sleep(seconds)

    def synchronize(self, device: Any = None) -> None:
        counts["synchronisations"] += 1
        SCHEDULER.finish_all()

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, because the host's random numbers are seeded anyway."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return MEMORY.statistics()

    def memory_allocated(self, device: Any = None) -> int:
        return MEMORY.allocated_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return MEMORY.reserved_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return MEMORY.peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        MEMORY.peak_bytes = MEMORY.allocated_bytes

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        total = int(MEMORY.capacity_bytes)
        return total - MEMORY.reserved_bytes, total

    def empty_cache(self) -> None:
        MEMORY.release_unused()


ACCELERATOR_CALLS = (
    "current_stream", "synchronize", "memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated",
    "get_memory_info", "empty_cache", "reset_peak_memory_stats",
)  # fmt: skip
"""Functions of torch.accelerator that a device written in Python cannot provide in torch 2.13."""
RESIZING = (
    "arange", "arange.start", "arange.start_step", "linspace", "logspace", "eye", "eye.m", "randperm",
    "randperm.generator", "tril_indices", "triu_indices",
)  # fmt: skip
"""Operations that torch composes by resizing an empty tensor. A wrapper cannot follow the resizing."""
FROM_DATA = ("tensor", "as_tensor")
"""Functions that move data to the device in C++, bypassing a device written in Python."""
COMPOSED = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operations that have CPU kernels, but that torch composes from other operations on other devices."""
_libraries: list[torch.library.Library] = []


class EmulatedDevice:
    name = KIND
    kind = DeviceKind("gloo", is_profiled=False, compiles=False, has_norm_kernels=True)

    def register(self) -> None:
        """Register the device in this process; this cannot be undone. `TRAINSPEC_EMULATED` contains its settings."""
        if _libraries:
            return
        settings = read_settings(os.environ.get(EMULATED, ""))
        MEMORY.capacity_bytes = settings.memory_gib * GIB
        TIME.start(settings)
        MEMORY.has_values = not settings.sizes
        if settings.sizes:
            self.kind = replace(self.kind, collectives="fake")
        module: Any = DeviceModule()
        module.read_collectives = read_collectives
        if TIME.costs is not None:
            module.host_time = lambda: HOST.now_s
            module.peak_flops = TIME.costs.peak_flops
        _setup_privateuseone_for_python_backend(KIND, backend_module=module)
        every = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        every.fallback(lambda op, *args, **kwargs: run_operation(op, args, kwargs), "PrivateUse1")  # type: ignore[no-untyped-call]
        aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in (*RESIZING, *COMPOSED):
            packet, _, overload = name.partition(".")
            aten.impl(  # type: ignore[no-untyped-call]
                name, _runner(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1"
            )
        norms.register(aten)
        _libraries.extend((every, aten))
        _replace_in_torch(module)
        SCHEDULER.start_order(settings.order)


def _replace_in_torch(module: Any) -> None:
    """Replace functions that torch 2.13 does not dispatch to devices written in Python."""
    torch_itself: Any = torch
    torch_itself.Generator, torch_itself.Stream, torch_itself.Event = Generator, Stream, StreamEvent
    for name in ACCELERATOR_CALLS:
        setattr(torch.accelerator, name, getattr(module, name))
    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = _attend(functional.scaled_dot_product_attention)
    empty = torch.empty

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return pin(made) if pin_memory else made

    torch_itself.empty = empty_or_pinned
    of_host = {name: getattr(torch, name) for name in FROM_DATA}

    def from_data(name: str) -> Callable[..., Tensor]:
        def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None or torch.device(device).type != KIND:
                return cast(Tensor, of_host[name](data, *args, device=device, **kwargs))
            if isinstance(data, DeviceTensor):
                return data.to(kwargs.get("dtype") or data.dtype)
            needs_grad = kwargs.pop("requires_grad", False)
            made = of_host[name](data, *args, device="cpu", **kwargs).to(device)
            return cast(Tensor, made.requires_grad_(needs_grad))

        return make

    for name in FROM_DATA:
        setattr(torch, name, from_data(name))
    torch_itself.Tensor.pin_memory = lambda tensor, device=None: pin(tensor.clone())
    torch_itself.Tensor.is_pinned = lambda tensor, device=None: is_pinned(tensor)
    # `with torch.device(...)` recognises tensor constructors by identity.
    _device_constructors.cache_clear()
    _device_constructors().update((empty, *of_host.values()))


def _runner(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_operation(op, args, kwargs)


PLUGIN = EmulatedDevice()
