"""Pipeline schedules: each rank's passes in order, as pure data.

The engine runs these actions, and the planner's replay of its memory follows the same ones. Stages are chunks of
consecutive layers, numbered along the model; a rank holds one of them, or several (interleaved, zbv).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from trainspec_cli.policy.partition.cut import cut_evenly
from trainspec_cli.spec.recipe.layout import Layout

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True)
class Action:
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
    done: _Done = {kind: [0] * num_stages for kind in _SPLIT_KINDS}
    orders: list[list[Action]] = [[] for _ in stages]
    left = 3 * num_stages * micro_batches
    while left:
        taken = [_choose(own, len(stages), micro_batches, done) for own in stages]
        for order, action in zip(orders, taken, strict=True):
            if action is not None:
                order.append(action)
                done[action.kind][action.stage] += 1
                left -= 1
    return tuple(map(tuple, orders))


_Done = dict[Kind, list[int]]
"""The number of micro-batches that have finished each kind of pass of each stage."""


def _choose(stages: Sequence[int], most: int, micro_batches: int, done: _Done) -> Action | None:
    """Return the next possible action of a rank of `stages`, later stages first: their gradients are awaited
    longest."""
    full = done["forward"][stages[0]] - done["backward_weight"][stages[0]] >= most
    for kind in _SPLIT_KINDS:
        for stage in reversed(stages):
            index = done[kind][stage]
            held_back = full and kind == "forward" and stage == stages[0]
            if index < micro_batches and not held_back and _is_ready(kind, stage, index, done):
                return Action(kind, stage, index)
    return None


def _is_ready(kind: Kind, stage: int, index: int, done: _Done) -> bool:
    """Return True if everything that a pass needs is done."""
    if kind == "forward":
        return stage == 0 or done["forward"][stage - 1] > index
    if kind == "backward_weight":
        return done["backward_input"][stage] > index
    last = stage == len(done["forward"]) - 1
    return done["forward"][stage] > index and (last or done["backward_input"][stage + 1] > index)


_SPLIT_KINDS: tuple[Kind, ...] = ("backward_input", "forward", "backward_weight")
