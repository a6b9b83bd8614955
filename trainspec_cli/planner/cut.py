"""The layers of each pipeline stage, by the times that are planned for layers, embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import axis_groups
from trainspec_cli.planner.memory.frameworks import estimate_memory, memory_limit_bytes
from trainspec_cli.planner.memory.predict import memory_within, predict_memory
from trainspec_cli.planner.partition import LayerTimes, Room, cut_by_times, cut_evenly
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import MicroBatch, layer_s, micro_batch, own_work_s
from trainspec_cli.planner.workload import head_work, layer_works
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.results.plan import MemoryBreakdown

AS_GOOD = 1e-3
"""A cut that makes the heaviest rank lighter by no more than this part is not taken instead of the even one."""


def is_open(layout: Layout, model: ModelSpec) -> bool:
    """There is something to cut, and the recipe does not say how. (Rules refuse more stages than layers.)"""
    return layout.pp > 1 and layout.stage_layers is None and layout.num_stages <= model.num_layers


def cut(times: LayerTimes, layout: Layout, room: Room | None = None, speeds: Sequence[float] = ()) -> Layout:
    """Return the layout with the best cut that keeps to `room`; as it is where that is the even one, or none does.
    `speeds`: of the pipeline ranks, where they differ."""
    counts = cut_by_times(times, layout, speeds, room=room, equal=AS_GOOD)
    if counts is None or counts == cut_evenly(len(times.layers_s), layout.num_stages):
        return layout
    return replace(layout, stage_layers=counts)


# By a chip's times


def planned_times(once: MicroBatch, setup: Setup) -> LayerTimes:
    """Seconds of one micro-batch, forward and backward, with what is done again and the layers' own communication."""
    kinds_s = [layer_s(kind, setup.recompute) for kind in once.kinds]
    layers_s = [kinds_s[once.kind_of(layer)] for layer in range(once.num_layers)]
    return LayerTimes(layers_s, own_work_s(once.embedding), own_work_s(once.head))


def mean_times(once: MicroBatch, setup: Setup) -> LayerTimes:
    """The same with each layer as long as the average one: to cut by in a search over many layouts."""
    layers_s = [layer_s(once.layer, setup.recompute)] * once.num_layers
    return LayerTimes(layers_s, own_work_s(once.embedding), own_work_s(once.head))


def cut_on_chip(setup: Setup, recompute: str, eff: Efficiency) -> tuple[Setup, tuple[MemoryBreakdown, ...]]:
    """-> (the setup with its layers cut by planned times where the recipe leaves that open, each stage's memory).

    The best cut where that fits the device, else the best that does by the estimate of memory, else the even one.
    """
    if not is_open(setup.layout, setup.model):
        return setup, predict_memory(setup, recompute)
    groups = axis_groups(setup.layout, setup.fabric, eff)
    times = planned_times(micro_batch(setup, groups, eff), setup)
    limit_bytes = memory_limit_bytes(setup.fabric.chip)
    best = replace(setup, layout=cut(times, setup.layout))
    if taken := memory_within(best, recompute, limit_bytes):
        return best, taken
    even = predict_memory(setup, recompute)
    bounded = replace(setup, layout=cut(times, setup.layout, rough_room(setup, even)))
    taken = None if bounded == setup else memory_within(bounded, recompute, limit_bytes)
    return (bounded, taken) if taken else (setup, even)


def rough_room(setup: Setup, memory: Sequence[MemoryBreakdown]) -> Room:
    """Return what each rank's layers may take by the estimate of memory, which is scaled to the predicted `memory`."""
    return room_within(setup, memory, [memory_limit_bytes(setup.fabric.chip)] * setup.layout.pp)


def room_within(setup: Setup, memory: Sequence[MemoryBreakdown], limits_bytes: Sequence[float]) -> Room:
    """Return the same where each rank has a limit of its own."""
    scale = _fullest_bytes(estimate_memory(setup)) / _fullest_bytes(memory)
    return _room(setup, [limit * scale for limit in limits_bytes])


def _fullest_bytes(stages: Sequence[MemoryBreakdown]) -> float:
    return max(stage.total_bytes for stage in stages)


def _room(setup: Setup, limits_bytes: Sequence[float]) -> Room:
    """Return the bytes that each rank's layers may take, and those of one layer there: the difference that one more in
    each stage makes. `limits_bytes` are in the estimate's terms."""
    rounds = setup.layout.num_stages // setup.layout.pp
    even = (replace(setup.layout, stage_layers=(each,) * setup.layout.num_stages) for each in (1, 2))
    few, many = (estimate_memory(replace(setup, layout=layout)) for layout in even)
    layer = [(two.total_bytes - one.total_bytes) / rounds for one, two in zip(few, many, strict=True)]
    left = [limit - one.total_bytes + size * rounds for limit, one, size in zip(limits_bytes, few, layer, strict=True)]
    return Room([[size] * setup.model.num_layers for size in layer], left)


# Without one


def relative_times(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> LayerTimes:
    """FLOPs of the forward in place of seconds: the backward has as much the more everywhere."""
    layers = layer_works(model, tokens, seq_len, layout)
    kinds = {id(works): sum(work.flops for work in works) for works in layers}
    head = head_work(model, tokens, layout)
    return LayerTimes([kinds[id(works)] for works in layers], 0.0, head.flops if head else 0.0)
