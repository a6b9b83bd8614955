"""Trials of user-defined code: whether they can be made, which errors are not the code's fault, and its refusal."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.recipe.user_code import Extension


def refused(extension: Extension, what: str, hint: str = "", code: str = "own_code") -> RecipeError:
    """Return the error of code that cannot be trained with; `what` follows the code's name in a sentence."""
    return RecipeError(Problem(code, f"`{extension.path}`: {extension.text} {what}", extension.path, hint))


def is_no_fault(error: Exception) -> bool:
    """Return whether memory ran out or a peer was lost, which the run deals with as everywhere else."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, torch.distributed.DistError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def has_values() -> bool:
    """Return whether tensors hold numbers: those of a step that is only traced have none, and nothing can be tried."""
    return not isinstance(torch.empty(0), FakeTensor)
