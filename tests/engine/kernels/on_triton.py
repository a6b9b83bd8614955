"""Run the libraries' Triton kernels without a GPU, each program in its own process:
`python -m engine.kernels.on_triton NAME`.

`interpret` runs them on a CPU in Triton's interpreter (TRITON_INTERPRET=1) and compares them with their references.
`compile TARGET` compiles them to machine code for an absent GPU instead of launching them. Both print JSON.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from engine.kernels.shapes import CALLS
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, interpreter, jit

from trainspec_cli.engine.kernels import libraries
from trainspec_cli.engine.tools.kernels import make_inputs, reference

CPU = torch.device("cpu")
KERNELS: dict[str, Callable[..., Tensor]] = {
    op: getattr(libraries, op) for op in ("rms_norm", "swiglu", "rope", "linear_cross_entropy", "ssd_scan")
}
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "NVIDIA A100"),
    "sm_90": (GPUTarget("cuda", 90, 32), "NVIDIA H100"),
    "sm_100": (GPUTarget("cuda", 100, 32), "NVIDIA B200"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "AMD MI300X"),
}


def gradients(function: Callable[..., Tensor], op: str, call: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return the output of an operation and the gradients of its inputs, from a random gradient."""
    inputs = make_inputs(op, call, dtype, CPU).with_gradients()
    out = function(*inputs.arguments)
    random = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=random).to(out.dtype) if out.dim() else None)
    return [out.detach().double(), *(inputs.arguments[leaf].grad.double() for leaf in inputs.leaves)]


def interpret() -> dict[str, list[list[float]]]:
    """Return, for each call of an operation, the largest differences from its reference, relative to the largest value:
    of the output and of each gradient."""
    _mend_interpreter()
    found: dict[str, list[list[float]]] = {}
    for op, kernel in KERNELS.items():
        for call in CALLS[op]:
            pairs = zip(
                gradients(kernel, op, call, torch.float32),
                gradients(partial(reference, op), op, call, torch.float32),
                strict=True,
            )
            differences = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
            found.setdefault(op, []).append(differences)
    return found


def _mend_interpreter() -> None:
    """The interpreter passes floats and loop counters as Python's, which have no `.to`, and knows no libdevice."""
    import fla.ops.common.chunk_h
    import fla.ops.common.chunk_o
    import liger_kernel.ops.rms_norm

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    def counting(*bounds: Any) -> Iterator[Any]:
        plain = [int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds]
        yield from map(convert, builtins.range(*plain))

    interpreter._implicit_cvt = with_floats
    fla.ops.common.chunk_h.range = counting
    fla.ops.common.chunk_o.range = counting
    liger_kernel.ops.rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    autotuner.Autotuner.run = _run_first


def _run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the first configuration in place of timing them."""
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


class AbsentDriver:
    """The driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return CPU

    class utils:  # noqa: N801 - Triton's name
        @staticmethod
        def get_device_properties(_device: int) -> dict[str, int]:
            return {"max_shared_mem": 65_536, "multiprocessor_count": 108, "warpSize": 32, "max_num_regs": 65_536}


def compile_for(name: str) -> dict[str, dict[str, int]]:
    """Compile every kernel that an operation's passes launch, in bf16; return their bytes of machine code."""
    target, device_name = TARGETS[name]
    driver.set_active(AbsentDriver(target))
    if target.backend == "cuda":  # fla asks which GPU it is on
        torch.cuda.get_device_name = lambda *_: device_name
        torch.cuda.get_device_capability = lambda *_: divmod(target.arch, 10)
    compile_and_launch = jit.JITFunction.run
    compiled: dict[str, int] = {}

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[self.__name__] = len(kernel.asm["cubin" if target.backend == "cuda" else "hsaco"])
        return kernel

    jit.JITFunction.run = only_compile
    autotuner.Autotuner.run = _run_first
    found = {}
    for op, kernel in KERNELS.items():
        compiled.clear()
        gradients(kernel, op, CALLS[op][0], torch.bfloat16)
        found[op] = dict(compiled)
    return found


if __name__ == "__main__":
    programs: dict[str, Callable[..., Any]] = {"interpret": interpret, "compile": compile_for}
    assert triton.knobs.runtime.interpret == (sys.argv[1] == "interpret")
    print(json.dumps(programs[sys.argv[1]](*sys.argv[2:])))
