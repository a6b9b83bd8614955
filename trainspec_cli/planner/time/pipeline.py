"""How a pipeline's stages keep each other waiting: closed forms, and a simulation that they are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from trainspec_cli.spec.recipe.layout import Layout


@lru_cache(maxsize=4096)
def stage_layers(num_layers: int, layout: Layout, head_layers: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage. Even where they divide; else the spare ones go first to stages that are not the last.

    `head_layers` is the head's time in layers: where layers do not divide, the last stage is relieved by it.
    """
    if layout.stage_layers is not None:
        return layout.stage_layers
    stages = layout.pp
    if num_layers % stages == 0:
        return (num_layers // stages,) * stages
    counts = [0] * stages
    loads = [0.0] * (stages - 1) + [head_layers]
    for _ in range(num_layers):
        lightest = min(range(stages), key=loads.__getitem__)
        loads[lightest] += 1.0
        counts[lightest] += 1
    return tuple(counts)


def bubble_s(stage_s: Sequence[float], layout: Layout) -> float:
    """Time a step's slowest stage waits while the pipeline fills and drains.

    1F1B and GPipe: the other stages' one micro-batch; interleaved divides it by the chunks a stage holds
    (arXiv:2104.04473); ZB-H1 fills it with weight gradients down to a third (arXiv:2401.10241).
    """
    if layout.pp == 1:
        return 0.0
    slowest = max(stage_s)
    wait = sum(stage_s) - slowest
    if layout.pipeline_schedule == "zero_bubble":
        return wait / 3
    if layout.pipeline_schedule == "interleaved" or layout.virtual_stages > 1:
        return wait / layout.virtual_stages
    return wait


def simulate_1f1b(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """Time of one step under 1F1B: each stage does its warm-up forwards, then alternates, then drains.

    Event by event: a task starts when its stage is free and its input has come.
    """
    stages = len(forward_s)
    done_f = [[0.0] * micro_batches for _ in range(stages)]
    done_b = [[0.0] * micro_batches for _ in range(stages)]
    free = [0.0] * stages
    orders = [_order_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    position, left = [0] * stages, 2 * stages * micro_batches
    ready_f, ready_b = [[0] * stages, [0] * stages]
    while left:
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, index = orders[stage][position[stage]]
                if kind == "f":
                    if stage and ready_f[stage - 1] <= index:
                        break
                    start = max(free[stage], done_f[stage - 1][index] if stage else 0.0)
                    free[stage] = done_f[stage][index] = start + forward_s[stage]
                    ready_f[stage] += 1
                else:
                    if stage < stages - 1 and ready_b[stage + 1] <= index:
                        break
                    start = max(free[stage], done_b[stage + 1][index] if stage < stages - 1 else 0.0)
                    free[stage] = done_b[stage][index] = start + backward_s[stage]
                    ready_b[stage] += 1
                position[stage] += 1
                left -= 1
    return max(free)


def _order_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    warmup = min(stages - stage - 1, micro_batches)
    order = [("f", i) for i in range(warmup)]
    for i in range(micro_batches - warmup):
        order += [("f", warmup + i), ("b", i)]
    return order + [("b", i) for i in range(micro_batches - warmup, micro_batches)]
