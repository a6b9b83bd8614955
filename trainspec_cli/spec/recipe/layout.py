"""The layout: sizes of the mesh axes. Their product is the world size (ep divides dp_shard x cp x tp)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, Auto, AutoInt

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: neighbouring ranks share the innermost axis, which needs the fastest links."""

ZeroStage = Literal[1, 2, 3]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
ContextMethod = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class LayoutSpec:
    """The layout as the recipe asks for it; the planner resolves `auto`."""

    dp_replicate: AutoInt = AUTO
    dp_shard: AutoInt = AUTO
    cp: AutoInt = 1
    tp: AutoInt = 1
    pp: AutoInt = 1
    ep: AutoInt = 1
    zero_stage: ZeroStage | Auto = 3
    """What dp_shard shards (ZeRO, arXiv:1910.02054): 1 the optimizer state, 2 the gradients too, 3 the parameters too.

    In the engine 3 frees the gathered parameters after each forward; 2 keeps them until the backward is done.
    """
    etp: AutoInt = 1
    """Tensor parallelism inside each expert."""
    sequence_parallel: bool = True
    """With tp: norms and residuals are split along the sequence (arXiv:2205.05198)."""
    pipeline_schedule: PipelineSchedule | Auto = "1f1b"
    virtual_stages: AutoInt = 1
    """Chunks of layers a pipeline stage holds (the interleaved schedule needs 2 or more)."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage, if uneven; null spreads them evenly."""
    context_method: ContextMethod = "ring"
    """With cp: keys and values go round a ring (arXiv:2310.01889), or go all-to-all (Ulysses, arXiv:2309.14509)."""


@dataclass(frozen=True)
class Layout:
    """A resolved layout: no `auto` left."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: ZeroStage = 3
    etp: int = 1
    sequence_parallel: bool = True
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    context_method: ContextMethod = "ring"

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """`dp_replicate=2 tp=4`: the axes that are not 1."""
        axes = [f"{axis}={getattr(self, axis)}" for axis in (*MESH_AXES, "ep") if getattr(self, axis) > 1]
        return " ".join(axes) or "one process"
