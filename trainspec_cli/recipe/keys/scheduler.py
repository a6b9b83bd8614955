"""The scheduler: whether and how a run follows the speeds that its ranks really have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from trainspec_cli.recipe.field_types import AUTO, AutoInt, PositiveInt, Range
from trainspec_cli.recipe.keys.layout import ContextMethod, LayoutSpec, PipelineSchedule, ZeroStage

SchedulerMode = Literal["off", "advise", "auto"]
Changeable = Literal["shares", "layers", "layout", "nodes"]


STAGES = ("pp", "pipeline_schedule", "virtual_stages")
"""The keys that a cut into stages depends on."""


@dataclass(frozen=True)
class LayoutChangeSpec:
    """Another layout from a step on. What it leaves out (null) is as in `layout`."""

    step: PositiveInt
    """Updates made before it."""
    dp_replicate: AutoInt | None = None
    dp_shard: AutoInt | None = None
    cp: PositiveInt | None = None
    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    ep: PositiveInt | None = None
    zero_stage: ZeroStage | None = None
    sequence_parallel: bool | None = None
    pipeline_schedule: PipelineSchedule | None = None
    virtual_stages: PositiveInt | None = None
    stage_layers: tuple[PositiveInt, ...] | None = None
    """Where the change names other stages and not their layers, these are cut by planned times."""
    context_method: ContextMethod | None = None

    def of(self, layout: LayoutSpec) -> LayoutSpec:
        """Return `layout` with this change, which does not build on the changes before it."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "step"}
        named = {name: value for name, value in named.items() if value is not None}
        if any(name in named for name in STAGES):
            layout = replace(layout, stage_layers=None)
        return replace(layout, **named)


@dataclass(frozen=True)
class SchedulerSpec:
    mode: SchedulerMode = "advise"
    """off: nothing is measured. advise: write what would be changed, and change nothing. auto: change it.

    Where memory runs out, advise and auto both take smaller micro-batches of the same global batch, then recompute and
    offload, and go on; with off the run ends.

    advise is the default, since two runs of a recipe then compute the same bits whatever their ranks' speeds: other
    shares sum the same gradients in another order.
    """
    may_change: tuple[Changeable, ...] = ("shares", "layers", "layout", "nodes")
    """What auto changes and advise speaks of. shares: samples of the ranks, and of replica groups. layers: of pipeline
    stages. layout: any axis of the layout. nodes: which of them take part."""
    change: Annotated[float, Range(0.01, 1)] = 0.1
    """A rank's speed has changed when several steps in a row take longer or less by this fraction, and by more than
    the rank's own noise."""
    max_micro_batch_size: AutoInt = AUTO
    """Samples of a rank's micro-batch, at most; auto is what memory allows, up to twice the plan's."""
    max_stage_layers: AutoInt = AUTO
    """Layers that a pipeline rank may hold when layers move off a slow one, at most; auto is what the prediction of
    memory allows, and none move where there is no prediction."""
    changes: tuple[LayoutChangeSpec, ...] = ()
    """Layouts that the run changes to while it goes on, in any mode, such as `[{step: 500, pp: 2, dp_shard: 2}]`."""
