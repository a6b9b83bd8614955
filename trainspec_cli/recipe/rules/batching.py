"""Rules for a batch that changes over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.batching import RampStage
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ModelSpec

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

PATH = "batching.schedule"
LARGEST = f"{PATH}.max_global_batch_size"
WITH_LARGEST = ("seesaw", "noise")
"""Schedules with a largest size."""


def largest_size(spec: RunSpec) -> float:
    """Return the bound of a batch under `seesaw` or `noise`; infinity where nothing bounds it.

    Seesaw needs no more than what the lowest learning rate asks for.
    """
    batching, largest = spec.batching, math.inf
    if batching.schedule.kind == "seesaw" and spec.optim.schedule.lowest_lr_ratio:
        largest = batching.global_batch_size / spec.optim.schedule.lowest_lr_ratio
    return min(largest, batching.schedule.max_global_batch_size or math.inf)


def ramp(spec: RunSpec) -> Iterator[Problem]:
    """The stages of a ramp follow one another, and no size is smaller than the one before it."""
    kind, stages, path = spec.batching.schedule.kind, spec.batching.schedule.stages, f"{PATH}.stages"
    if kind != "ramp" and stages:
        message = f"`{path}` has {len(stages)} sizes, and `{PATH}.kind` is {kind}, which has no stages"
        yield Problem("unsupported", message, path, f"type {PATH}.kind=ramp, or ~{path}")
    elif kind == "ramp" and not stages:
        doubled = 2 * spec.batching.global_batch_size
        hint = f"type {path}='[{{from_tokens: 1e9, global_batch_size: {doubled}}}]'"
        yield Problem("missing_value", f"`{path}` is empty; a ramp has at least one", path, hint)
    elif kind == "ramp":
        first = RampStage(0, spec.batching.global_batch_size)
        for place, (before, stage) in enumerate(pairwise((first, *stages))):
            yield from _follows(stage, before, f"{path}.{place}")


def _follows(stage: RampStage, before: RampStage, path: str) -> Iterator[Problem]:
    if stage.from_tokens <= before.from_tokens:
        message = f"`{path}.from_tokens` is {stage.from_tokens}, and the stage before it begins at {before.from_tokens}"
        hint = f"put the stages in their order, each with more tokens: {before.from_tokens + 1} or more"
        yield Problem("out_of_range", message, f"{path}.from_tokens", hint)
    if stage.global_batch_size < before.global_batch_size:
        path = f"{path}.global_batch_size"
        message = f"`{path}` is {stage.global_batch_size}, and the steps before it have {before.global_batch_size}"
        hint = f"a ramp does not fall: type {before.global_batch_size} or more"
        yield Problem("out_of_range", message, path, hint)


def bounds(spec: RunSpec) -> Iterator[Problem]:
    """A largest size stands where the schedule has one, and leaves room for the batch to grow."""
    schedule, start = spec.batching.schedule, spec.batching.global_batch_size
    largest = schedule.max_global_batch_size
    if schedule.kind not in WITH_LARGEST:
        if largest is not None:
            message = f"`{LARGEST}` is {largest}, and `{PATH}.kind` is {schedule.kind}, which has no largest size"
            yield Problem("unsupported", message, LARGEST, f"type {LARGEST}=null, or batching=seesaw")
    elif largest is not None and largest < start:
        message = f"`{LARGEST}` is {largest}, and the run begins with {start} (`batching.global_batch_size`)"
        yield Problem("out_of_range", message, LARGEST, f"type {LARGEST}={math.ceil(start * schedule.growth)} or more")
    elif math.isinf(largest_size(spec)):
        zero = "the learning rate ends at 0" if schedule.kind == "seesaw" else "the noise scale has no bound"
        hint = f"type {LARGEST}={8 * start}, or what the data's critical batch size allows"
        yield Problem("missing_value", f"`{LARGEST}` is null, and {zero}: so would the batch have none", LARGEST, hint)
    elif _falls(spec) and len(spec.batching.sizes_up_to(largest_size(spec))) == 1:
        message = (
            f"a `{PATH}.growth` of {schedule.growth:g} leads from {start} to no size up to the largest, "
            f"{largest_size(spec):g}: the batch would never change"
        )
        hint = f"type {PATH}.growth=1.1, a larger {LARGEST}, or {PATH}.kind=constant"
        yield Problem("out_of_range", message, f"{PATH}.growth", hint)


def _falls(spec: RunSpec) -> bool:
    return spec.batching.schedule.kind != "seesaw" or spec.optim.schedule.lowest_lr_ratio < 1


def seesaw(spec: RunSpec) -> Iterator[Problem]:
    """Seesaw replaces a falling learning rate, and so needs one, and a rule for the rate."""
    if spec.batching.schedule.kind != "seesaw":
        return
    if not _falls(spec):
        lr = spec.optim.schedule
        message = f"`{PATH}.kind` is seesaw, which grows the batch where the learning rate falls, and it does not"
        path = "optim.schedule.kind" if lr.kind == "constant" else "optim.schedule.final_lr_ratio"
        if lr.kind == "wsd" and lr.decay_fraction == 0:
            path = "optim.schedule.decay_fraction"
        typed = {"kind": "cosine", "final_lr_ratio": "0.1", "decay_fraction": "0.2"}[path.rpartition(".")[2]]
        yield Problem("unsupported", message, path, f"type {path}={typed}, or {PATH}.kind=constant")
    if spec.batching.schedule.lr_rule == "none":
        path = f"{PATH}.lr_rule"
        message = f"`{path}` is none: the learning rate would fall as without seesaw, and the batch grow beside it"
        yield Problem("unsupported", message, path, f"type {path}=optimizer")


def noise(spec: RunSpec) -> Iterator[Problem]:
    """The noise shows between two data-parallel ranks; `measurable_noise` refuses what only the plan can tell."""
    if spec.batching.schedule.kind == "noise" and data_parallel_ranks(spec) == 1:
        message = f"`{PATH}.kind` is noise, which is measured between data-parallel ranks, and there is 1"
        hint = f"type cluster.devices_per_node=2 or more with room for data parallelism, or {PATH}.kind=seesaw"
        yield Problem("unsupported", message, f"{PATH}.kind", hint)


def noise_hindrance(model: ModelSpec, layout: Layout, replica_groups: int, micro_batches: int) -> str:
    """Return why the noise of the gradients cannot be measured in a layout; empty where it can.

    It shows between the gradients of different samples, before they are summed. `micro_batches` of a rank in a step are
    so many parts where each is exchanged by itself.
    """
    turns = micro_batches if layout.exchanges_every_backward else 1
    if layout.data_parallel_size * replica_groups < 2:
        return "it is measured between data-parallel ranks, and there is 1"
    if model.tied_embeddings and layout.pp > 1 and layout.exchanges_every_backward:
        return f"ZeRO-{layout.zero_stage} sums a tied embedding's gradient on each of its stages by itself"
    ranks, left = divmod(layout.ep, layout.cp * layout.tp)
    if layout.ep > 1 and left:
        return f"the {layout.ep} ranks of ep hold parts of a sample's gradient"
    if layout.ep > 1 and layout.data_parallel_size // ranks * replica_groups * turns < 2:
        return "all data-parallel ranks train the same experts together"
    return ""


def measurable_noise(spec: RunSpec, layout: Layout, replica_groups: int, micro_batches: int) -> Iterator[Problem]:
    """Refuse a batch that is to follow a noise which cannot be measured in the layout."""
    if spec.batching.schedule.kind != "noise":
        return
    why = noise_hindrance(spec.model, layout, replica_groups, micro_batches)
    if replica_groups > 1:
        message = (
            f"`{PATH}.kind` is noise, and a replica group that comes back ({replica_groups} of them) knows none of it"
        )
        hint = f"type resilience=restart, or {PATH}.kind=seesaw"
        yield Problem("unsupported", message, f"{PATH}.kind", hint)
    elif why:
        message = f"`{PATH}.kind` is noise, and in this layout ({layout.describe()}) nobody measures it: {why}"
        hint = f"type layout=ddp or layout=fsdp with two processes or more, or {PATH}.kind=seesaw"
        yield Problem("unsupported", message, f"{PATH}.kind", hint)


def data_parallel_ranks(spec: RunSpec) -> int | None:
    """Return the data-parallel ranks of all replica groups; None where a machine or a search decides, or none fit."""
    devices, axes = spec.cluster.devices_per_node, (spec.layout.pp, spec.layout.cp, spec.layout.tp)
    if devices == AUTO or AUTO in axes:
        return None
    ranks, left = divmod(spec.cluster.num_nodes * int(devices), math.prod(map(int, axes)))
    return None if left else ranks


BATCHING_RULES = (ramp, bounds, seesaw, noise)
