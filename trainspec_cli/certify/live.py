"""The runs that change while they go on: other layouts, changes that fail or are cut short, memory that runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainspec_cli.spec.recipe.layout import Layout

STEPS, EVERY_STEPS = 14, 2
"""Steps of a run, and steps between its changes."""
SAVE_EVERY_STEPS = 3
"""A run that is killed has a checkpoint of the step before its second change, in the layout after its first."""
CHANGED_AT = EVERY_STEPS
KILLED_AT = 2 * EVERY_STEPS
SHORT_AT, FITTING_SAMPLES = 5, 2
"""The step from which memory is short, and the samples of a micro-batch that fit then."""

Disturbance = Literal["none", "killed", "move_oom", "oom"]


@dataclass(frozen=True)
class Live:
    """The changes that a run of the trainer meets."""

    changes: tuple[Layout, ...] = ()
    """Its layouts after the first, in turn, each for `EVERY_STEPS` steps and the last one to the end."""
    disturbance: Disturbance = "none"

    @property
    def words(self) -> list[str]:
        """Return what distinguishes its name from that of a run which keeps its layout."""
        undisturbed = "changed" if self.changes else "kept"
        return ["live", undisturbed if self.disturbance == "none" else self.disturbance]

    def steps_of_changes(self) -> list[tuple[int, Layout]]:
        return [(EVERY_STEPS * number, layout) for number, layout in enumerate(self.changes, 1)]

    def fault(self, ranks: int) -> str:
        """Return the recipe's `fault`."""
        if self.disturbance == "move_oom":
            return f"move_oom(step={CHANGED_AT},rank={ranks - 1})"
        if self.disturbance == "oom":
            shortages = (f"oom(step={SHORT_AT},rank={rank},above={FITTING_SAMPLES})" for rank in range(ranks))
            return "; ".join(shortages)
        return ""


MOVING = (Layout(pp=2), Layout(dp_shard=2, pp=2, pipeline_schedule="zero_bubble"))
"""Pipelines whose layers move."""
TOURS = (
    (
        *(Layout(dp_shard=2), Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp_shard=2, ep=2)),
        *(Layout(dp_shard=2, zero_stage=1), Layout(dp_replicate=2)),
    ),
    (
        *(Layout(dp_replicate=2, dp_shard=2), Layout(tp=2, pp=2), Layout(dp_shard=2, cp=2), Layout(dp_shard=4)),
        *(Layout(dp_shard=2, pp=2, pipeline_schedule="zbv"), Layout(dp_shard=4, ep=2)),
    ),
)
"""Layouts that a run has in turn, as far as its family has them."""
SHORT = (Layout(), Layout(dp_shard=2), Layout(pp=2, pipeline_schedule="gpipe"))
"""Layouts in which memory runs out. In gpipe all messages between stages have arrived before the first backward: the
processes leave none of them behind when they go on with another start."""


def moves(layout: Layout, num_layers: int) -> tuple[Layout, ...]:
    """Return the cuts that a pipeline of two stages has in turn: layers go one way, the other way, and back."""
    cuts = ((num_layers - 1, 1), (1, num_layers - 1), None)
    return tuple(replace(layout, stage_layers=cut) for cut in cuts)


def live_runs(
    num_layers: int, is_legal: Callable[[Layout], bool], *, keeps_micro_batches: bool
) -> Iterator[tuple[str, Layout, Live]]:
    """Yield the runs of a family for each clause: its first layout, and what happens to it."""
    for pipeline in filter(is_legal, MOVING):
        if all(map(is_legal, cuts := moves(pipeline, num_layers))):
            yield "LIVE-1", pipeline, Live(cuts)
            yield "LIVE-4", pipeline, Live(cuts[:1], "move_oom")
    tours = ([layout for layout in tour if is_legal(layout)] for tour in TOURS)
    for first, *others in (tour for tour in tours if len(tour) > 1):
        yield "LIVE-2", first, Live(tuple(others))
        if len(others) > 1:
            yield "LIVE-3", first, Live(tuple(others), "killed")
        yield "LIVE-4", first, Live(tuple(others[:1]), "move_oom")
    if not keeps_micro_batches:
        yield from (("LIVE-5", layout, Live(disturbance="oom")) for layout in SHORT if is_legal(layout))
