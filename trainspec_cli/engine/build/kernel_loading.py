"""Find the function that a kernel backend's name stands for, and put it into a model, whose modules hold their
operations by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from trainspec_cli.recipe.keys.kernels import KERNELS, Backend, KernelSpec

ENGINE = __package__.rpartition(".")[0]


def load_kernel(op: str, backend: str) -> Callable[..., Any]:
    """Raises ImportError where its package is not installed."""
    return load_source(KERNELS[op][backend])


def load_source(backend: Backend) -> Callable[..., Any]:
    module, _, name = backend.source.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{ENGINE}.{module}"), name)
    if backend.options:
        function = partial(function, **backend.options)
    return compiled_in_training(function) if backend.fused else function


def apply_kernels(part: nn.Module, kernels: KernelSpec) -> None:
    """Put what was chosen in the place of the defaults, in every module that has the operation."""
    for op, backend in kernels.changed.items():
        function = load_kernel(op, backend)
        for module in modules_with(part, op):
            setattr(module, op, function)


def modules_with(part: nn.Module, op: str) -> list[nn.Module]:
    """Return the engine's own modules that have the operation: a user's may mean another thing by it."""
    return [module for module in part.modules() if _engine_has(type(module), op)]


def _engine_has(kind: type, op: str) -> bool:
    definer = next((base for base in kind.__mro__ if op in vars(base)), None)
    return definer is not None and definer.__module__.startswith(ENGINE)


def compiled_in_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for each shape separately, so that results do not depend on earlier shapes.

    Without gradients the plain function is called: evaluation has its own shapes, and each would be compiled.
    """
    fused = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*inputs: Any) -> Any:
        return fused(*inputs) if torch.is_grad_enabled() else function(*inputs)

    return call
