"""Memory limits for switching to another layout: whether the layout and the change to it fit, and how many layers a
rank can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor

from trainspec_cli.balance.batch.division import largest_that_fits
from trainspec_cli.balance.decisions.balance import largest_stage
from trainspec_cli.planner.capacity import SLACK
from trainspec_cli.planner.memory.predict import layer_memory, memory_limit_bytes, peak_of, predict_memory, room_within
from trainspec_cli.planner.pipeline import Room, cut_layers
from trainspec_cli.planner.search.search import LayerMemories
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.this_machine import MOVING_BYTES
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.recipe.results.plan import MemoryBreakdown


class LayoutMemory:
    """Memory use of setups that differ only in layout and micro-batches."""

    def __init__(self, scheduler: SchedulerSpec, recompute: str):
        self._scheduler = scheduler
        self.recompute = recompute
        self._layers = LayerMemories(layer_memory)
        self._stages: dict[Setup, int | None] = {}
        self._known: dict[tuple[Layout, float, int], tuple[MemoryBreakdown, ...]] = {}

    def fits(self, setup: Setup) -> bool:
        fullest_bytes = max(stage.total_bytes for stage in self.of_stages(setup))
        return fullest_bytes <= memory_limit_bytes(setup.fabric.chip)

    def may_fit(self, setup: Setup) -> bool:
        """Return whether a layout with an even layer split fits, according to the rough estimate of the planner's
        search."""
        peak_bytes = peak_of(setup, self._layers.of(setup, self.recompute))
        return peak_bytes <= SLACK * memory_limit_bytes(setup.fabric.chip)

    def of_stages(self, setup: Setup) -> tuple[MemoryBreakdown, ...]:
        """Return the memory of each pipeline rank."""
        key = setup.layout, setup.micro_batch_size, setup.grad_accum
        if key not in self._known:
            self._known[key] = predict_memory(setup, self.recompute)
        return self._known[key]

    # The largest micro-batches

    def most_samples(self, setup: Setup) -> int:
        """Return the largest micro-batch that the recipe allows, in samples. `auto` allows twice the setup's size."""
        usual = int(setup.micro_batch_size)
        wanted = self._scheduler.max_micro_batch_size
        return 2 * usual if wanted == AUTO else max(usual, int(wanted))

    def largest_micro_batch(self, setup: Setup) -> int:
        """Return the size, in samples, of the largest micro-batch that fits, up to the recipe's limit."""
        usual = int(setup.micro_batch_size)
        return largest_that_fits(
            usual, self.most_samples(setup), lambda size: self.fits(replace(setup, micro_batch_size=float(size)))
        )

    # The largest stages

    def room(self, setup: Setup) -> Room:
        """Return a rough limit on the number of layers per pipeline rank, based on how much the estimate grows with
        each layer."""
        room = room_within(setup, self.of_stages(setup))
        wanted = self._scheduler.max_stage_layers
        layers = setup.model.num_layers
        most = layers if wanted == AUTO else int(wanted)
        rows = zip(room.layer_bytes, room.capacity_bytes, strict=True)
        return even_room(layers, [min(most, floor(capacity_bytes / each[0])) for each, capacity_bytes in rows])

    def largest_stage_layers(self, setup: Setup) -> int | None:
        """Return the maximum number of layers that fits on any pipeline rank; None if layers cannot move."""
        if setup not in self._stages:
            self._stages[setup] = largest_stage(
                setup.layout,
                setup.model.num_layers,
                self._scheduler.max_stage_layers,
                lambda layout: self.fits(replace(setup, layout=layout)),
            )
        return self._stages[setup]

    # The memory during a change to another layout

    def may_move(self, before: Setup, after: Setup) -> bool:
        """Return whether every rank can hold its old and new state at the same time during the change."""
        limit_bytes = memory_limit_bytes(before.fabric.chip)
        olds = self.of_stages(before)
        news = self.of_stages(after)
        # Pipeline ranks are contiguous. If they are divided into len(olds) * len(news) equal parts, each part has one
        # old stage and one new stage.
        places = range(len(olds) * len(news))
        pairs = {(olds[place // len(news)], news[place // len(olds)]) for place in places}
        return all(
            _state_bytes(old) + old.fragmentation_bytes + old.context_bytes + _state_bytes(new) + MOVING_BYTES
            <= limit_bytes
            for old, new in pairs
        )

    def moved_bytes(self, before: Setup, after: Setup) -> float:
        """Return the largest number of bytes of state that any rank receives: its new layers if only the layer split
        changes, and otherwise its complete state."""
        old = before.layout
        new = after.layout
        states = [_state_bytes(stage) for stage in self.of_stages(after)]
        if replace(old, stage_layers=new.stage_layers) != new or new.num_stages > new.pp:
            return max(states)
        layers = after.model.num_layers
        pairs = zip(cut_layers(layers, old), cut_layers(layers, new), states, strict=True)
        return max(size * len(set(then) - set(now)) / len(then) for now, then, size in pairs)


def even_room(num_layers: int, most: Sequence[int]) -> Room:
    """Return the room on pipeline ranks that can hold at most `most` layers each, no matter which layers."""
    return Room([[1.0] * num_layers] * len(most), [float(held) for held in most])


def _state_bytes(stage: MemoryBreakdown) -> float:
    return stage.parameters_bytes + stage.optimizer_bytes
