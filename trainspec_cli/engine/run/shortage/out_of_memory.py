"""Recognise that memory ran out, and say so to the supervisor with figures."""

from __future__ import annotations

import re
import resource

import psutil
import torch

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.accelerators import device_memory, on_chip
from trainspec_cli.recipe.results.memory import MemorySetting, Shortage
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.recovery.memory import rank_setting

OUT_OF_MEMORY = "out_of_memory"
"""The error's code."""
_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA(_ERROR| error:) ?(OUT_OF_MEMORY|out of memory)|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    r"|Cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
"""Texts of the errors that torch and its libraries raise as plain RuntimeErrors."""


class OutOfMemory(WorkerError):  # noqa: N818 - the word of the field
    """A rank ran out of memory, and its processes cannot go on."""

    def __init__(self, shortage: Shortage, message: str, hint: str):
        super().__init__(message, code=OUT_OF_MEMORY, hint=hint)
        self.shortage = shortage


class PassesOutOfMemory(Exception):  # noqa: N818 - likewise
    """Memory ran out in the forward or backward: no rank can have made the step's update."""

    def __init__(self, samples: int):
        super().__init__(f"memory ran out in the forward or backward of {samples} samples at a time")
        self.samples = samples


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def measure_shortage(plan: Plan, setting: MemorySetting, device: torch.device) -> Shortage:
    """Return the shortage in the layout of `plan`, with what this process holds now, and may hold."""
    layout = plan.layout.describe()
    if on_chip(device):
        memory = device_memory(device)
        return Shortage(setting, layout, memory.reserved, memory.total)
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in soft if limit != resource.RLIM_INFINITY]
    return Shortage(setting, layout, psutil.Process().memory_info().rss, min(limits, default=None))


def describe_cause(cause: BaseException) -> str:
    """Return the first line of an error's message, or the error's name where it has none, like a bare MemoryError."""
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def out_of_memory(plan: Plan, shortage: Shortage, cause: BaseException) -> OutOfMemory:
    """Return the error that ends this process; the supervisor starts the run again where something is left to take."""
    failed = shortage.failed
    message = f"memory ran out with {failed.describe()}: {describe_cause(cause)}"
    tried = [one for one in plan.memory_ladder if rank_setting(one) < rank_setting(failed)]
    if tried:
        message += f"; tried before: {'; '.join(one.describe() for one in tried)}"
    return OutOfMemory(shortage, message, _hint(plan, failed))


def _hint(plan: Plan, failed: MemorySetting) -> str:
    if plan.spec.scheduler.mode == "off" and failed.micro_batch_size > 1:
        smaller = f"batching.micro_batch_size={failed.micro_batch_size // 2}"
        return f"type {smaller}, or scheduler=advise, with which a run takes less memory by itself and goes on"
    return "a smaller model, a shorter data.seq_len, or more devices that share the state (layout.dp_shard) take less"
