"""A device in Python: its tensors hold memory of the host, and no operation takes one of theirs and one of the host's.

torch calls such devices PrivateUse1, the place of vendors' plugins. A process cannot take the device back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KIND = "lab"


class DeviceTensor(torch.Tensor):
    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=torch.device(KIND, 0)
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor of the device. Raises TypeError for any other."""
    if not isinstance(tensor, DeviceTensor):
        raise TypeError("a tensor of the host")
    return tensor.memory


def start() -> torch.device:
    """Register the device in this process."""
    _setup_privateuseone_for_python_backend(KIND)
    _kept.append(torch.library.Library("_", "IMPL"))  # type: ignore[no-untyped-call]
    run = lambda op, *args, **kwargs: _run(op, args, kwargs)  # noqa: E731
    _kept[-1].fallback(run, "PrivateUse1")  # type: ignore[no-untyped-call]
    return torch.device(KIND, 0)


_kept: list[torch.library.Library] = []


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = op.overloadpacket.__name__
    if name == "_to_copy":
        device = torch.device(kwargs.pop("device", None) or args[0].device)
        copied = op(_memory(args[0]), **kwargs)
        return DeviceTensor(copied) if device.type == KIND else copied
    if name == "copy_":
        _memory(args[0]).copy_(_memory(args[1]))
        return args[0]
    foreign = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
    if any(tensor.dim() for tensor in foreign):  # numbers may come from the host, as on CUDA
        raise RuntimeError(f"{name}: a tensor of the host among the device's")
    on_host = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    result = op(*tree_map(_memory, args), **tree_map(_memory, on_host))
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    return tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, DeviceTensor) else value
