"""Helpers for trials of user-defined code: checks whether a trial is possible and which errors are not the code's
fault, and the error that rejects code."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.recipe.user_code import Extension


def refused(extension: Extension, what: str, hint: str = "", code: str = "own_code") -> RecipeError:
    """Return the error for code that cannot be used for training; `what` continues a sentence that begins with the
    code's name."""
    return RecipeError(Problem(code, f"`{extension.path}`: {extension.text} {what}", extension.path, hint))


def is_no_fault(error: Exception) -> bool:
    """Return whether the error is an out-of-memory error or a lost peer, which the run handles as usual."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, torch.distributed.DistError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def has_values(device: torch.device | None = None) -> bool:
    """Return whether tensors contain values, also on `device` if one is given. In a step that is only traced, they do
    not, and code cannot be tested. A device that emulates only sizes reads every number as zero."""
    if isinstance(torch.empty(0), FakeTensor):
        return False
    return device is None or bool(torch.ones((), device=device).item())
