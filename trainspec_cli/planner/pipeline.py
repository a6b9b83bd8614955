"""Pipeline schedules: each rank's passes in order, as pure data.

The engine runs these actions, and the planner's replay of its memory follows the same ones. Stages are chunks of
consecutive layers, numbered along the model; a rank holds one of them, or several (interleaved, zbv).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from trainspec_cli.planner.partition import cut_evenly
from trainspec_cli.recipe.keys.layout import Layout

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


class Action(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


def cut_layers(num_layers: int, layout: Layout) -> tuple[range, ...]:
    """Return the layers of each stage: by `stage_layers`, else evenly with spare layers in the first stages."""
    counts = layout.stage_layers or cut_evenly(num_layers, layout.num_stages)
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


@lru_cache(maxsize=4096)
def layers_per_rank(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Count the layers of each pipeline rank, over all of its stages."""
    stages = cut_layers(num_layers, layout)
    return tuple(sum(len(stages[stage]) for stage in layout.stages_of_rank(rank)) for rank in range(layout.pp))


@lru_cache(maxsize=64)
def actions(layout: Layout, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's actions in order."""
    if layout.pp == 1:
        return (tuple(_one_after_another(micro_batches)),)
    if layout.splits_backward:
        stages = tuple(tuple(layout.stages_of_rank(rank)) for rank in range(layout.pp))
        return _fill_bubbles(stages, micro_batches)
    order = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved": _interleaved}[layout.pipeline_schedule]
    return tuple(tuple(order(layout, rank, micro_batches)) for rank in range(layout.pp))


def _one_after_another(micro_batches: int) -> Iterator[Action]:
    for index in range(micro_batches):
        yield Action("forward", 0, index)
        yield Action("backward", 0, index)


def _gpipe(layout: Layout, rank: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    yield from (Action("forward", rank, index) for index in range(micro_batches))
    yield from (Action("backward", rank, index) for index in range(micro_batches))


def _one_forward_one_backward(layout: Layout, rank: int, micro_batches: int) -> Iterator[Action]:
    """A stage starts as many forwards as there are stages behind it, then alternates (arXiv:2006.09503)."""
    forwards = [Action("forward", rank, index) for index in range(micro_batches)]
    backwards = [Action("backward", rank, index) for index in range(micro_batches)]
    yield from _alternate(forwards, backwards, layout.pp - rank - 1)


def _interleaved(layout: Layout, rank: int, micro_batches: int) -> Iterator[Action]:
    """1F1B over chunks, `pp` micro-batches of one chunk at a time (arXiv:2104.04473, section 2.2)."""
    chunks = layout.virtual_stages
    turns = [
        (chunk, start + index)
        for start in range(0, micro_batches, layout.pp)
        for chunk in range(chunks)
        for index in range(layout.pp)
    ]
    forwards = [Action("forward", chunk * layout.pp + rank, index) for chunk, index in turns]
    backwards = [Action("backward", (chunks - 1 - chunk) * layout.pp + rank, index) for chunk, index in turns]
    yield from _alternate(forwards, backwards, 2 * (layout.pp - rank - 1) + (chunks - 1) * layout.pp)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> Iterator[Action]:
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


# Zero bubble


@lru_cache(maxsize=64)
def _fill_bubbles(stages: tuple[tuple[int, ...], ...], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build a zero-bubble schedule (arXiv:2401.10241) greedily, in ticks of one forward, input or weight pass.

    `stages`: of each rank. At each tick a rank takes the gradient that others wait for, else a forward, else a weight
    pass. At most as many micro-batches as there are ranks are in flight on its first chunk, so it holds no more than
    1F1B's fullest stage.
    """
    num_stages = sum(map(len, stages))
    forwards = [0] * num_stages  # micro-batches of each stage that have finished the pass
    inputs = [0] * num_stages
    weights = [0] * num_stages
    done: dict[Kind, list[int]] = {"forward": forwards, "backward_input": inputs, "backward_weight": weights}

    def choose(own: Sequence[int]) -> tuple[Kind, int] | None:
        """Return the next possible pass of a rank, later stages first: their gradients are awaited longest."""
        for stage in reversed(own):
            index = inputs[stage]
            if forwards[stage] > index and (stage == num_stages - 1 or inputs[stage + 1] > index):
                return "backward_input", stage
        is_full = forwards[own[0]] - weights[own[0]] >= len(stages)
        for stage in reversed(own):
            index = forwards[stage]
            held_back = is_full and stage == own[0]
            if index < micro_batches and not held_back and (stage == 0 or forwards[stage - 1] > index):
                return "forward", stage
        return next((("backward_weight", stage) for stage in reversed(own) if inputs[stage] > weights[stage]), None)

    orders: list[list[Action]] = [[] for _ in stages]
    left = 3 * num_stages * micro_batches
    while left:
        taken = [choose(own) for own in stages]
        for order, chosen in zip(orders, taken, strict=True):
            if chosen is not None:
                kind, stage = chosen
                order.append(Action(kind, stage, done[kind][stage]))
                done[kind][stage] += 1
                left -= 1
    return tuple(map(tuple, orders))
