"""Interpret a measured memory figure: the part of a prediction that it is compared with.

nvidia-smi sees the device's context, communication buffers and the allocator's cache; PyTorch's counters see
tensors alone; papers give activations or states by formula.
"""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.core.units import GIB
from trainspec_cli.plan.memory.frameworks import (
    DEFAULT_MEMORY,
    communicators,
    estimate_memory,
    kept_activation_bytes,
)
from trainspec_cli.plan.setup import RECOMPUTE, Setup
from trainspec_cli.plan.validation.frameworks import framework_of
from trainspec_cli.plan.validation.table import Row, number
from trainspec_cli.recipe.results.prediction import MemoryBreakdown

UNITS = {"GiB": GIB, "MiB": 2**20, "MB": 1e6}


def memory_figure(row: Row, setup: Setup) -> tuple[float | None, float | None]:
    """-> (predicted, measured) in bytes, or (None, None) where the row measures no memory."""
    if number(row, "peak_mem_gib"):
        return predicted_as(row.get("mem_kind") or "", setup), number(row, "peak_mem_gib", 0.0) * GIB  # type: ignore[operator]
    metric, unit, value = row.get("metric") or "", row.get("unit") or "", number(row, "value")
    if not metric or value is None:
        return None, None
    if unit == "%":
        # The papers give activations over those of the same run with neither sequence parallelism nor recomputation.
        layout = replace(setup.layout, sequence_parallel=False)
        baseline = replace(setup, layout=layout, recompute=RECOMPUTE["none"])
        return kept_activation_bytes(setup) / kept_activation_bytes(baseline), value / 100
    scale = framework_of(row)[0].gb_bytes if unit == "GB" else UNITS.get(unit, GIB)
    return predicted_as(metric, setup), value * scale


def predicted_as(metric: str, setup: Setup) -> float:
    """The part of the fullest stage that a metric of that name counts."""
    metric = metric.lower()
    stages = estimate_memory(setup)
    if "activations" in metric:
        return kept_activation_bytes(setup)
    if "weights+optimizer" in metric:
        return stages[0].parameters_bytes + stages[0].gradients_bytes + stages[0].optimizer_bytes
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    if "reserved" in metric:
        return resident_bytes(fullest, setup) - outside_bytes(fullest, setup)
    if "torch" in metric or "lora max" in metric or "allocated" in metric:
        tensors = fullest.total_bytes - fullest.fragmentation_bytes - outside_bytes(fullest, setup)
        return tensors * (1 + DEFAULT_MEMORY.reserve)  # the same reserve as the whole
    return resident_bytes(fullest, setup)


def resident_bytes(memory: MemoryBreakdown, setup: Setup) -> float:
    """Bytes that nvidia-smi shows: before a device is full, the allocator hands its unused blocks back."""
    needed = (memory.total_bytes - memory.fragmentation_bytes) * (1 + DEFAULT_MEMORY.reserve)
    return max(needed, min(memory.total_bytes, setup.fabric.chip.memory_gb * GIB))


def outside_bytes(memory: MemoryBreakdown, setup: Setup) -> float:
    """Bytes that PyTorch's allocator does not see: the device's context and NCCL's own buffers."""
    return memory.context_bytes + DEFAULT_MEMORY.group_bytes * communicators(setup)
