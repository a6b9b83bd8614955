"""The layout: the sizes of the mesh axes, whose product is the world size (ep divides dp_shard x cp x tp)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from trainspec_cli.recipe.field_types import AUTO, Auto, AutoInt, PositiveInt

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes, outermost first. Neighbouring ranks are on the innermost axis, which needs the fastest links."""

ZeroStage = Literal[1, 2, 3]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
Sharding = Literal["replicated", "zero1", "zero3"]
"""What data parallelism shards: nothing, the optimizer state (and gradients), or everything."""
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
ContextMethod = Literal["ring", "ulysses"]
SPLIT_SCHEDULES: tuple[PipelineSchedule, ...] = ("zero_bubble", "zbv")
"""Schedules that split the backward pass: input gradients first, and weight gradients later, when a stage would
otherwise wait."""


@dataclass(frozen=True)
class LayoutSpec:
    """The layout that the recipe requests; the planner resolves `auto`."""

    dp_replicate: AutoInt = AUTO
    """Number of replicas of the sharded state (replicated data parallelism)."""
    dp_shard: AutoInt = AUTO
    """Number of data-parallel ranks over which the state is sharded (ZeRO)."""
    cp: AutoInt = 1
    """Number of ranks over which a sequence is divided (context parallelism)."""
    tp: AutoInt = 1
    """Number of ranks over which each matrix is divided (tensor parallelism)."""
    pp: AutoInt = 1
    """Number of stages into which the layers are divided (pipeline parallelism)."""
    ep: AutoInt = 1
    """Number of ranks over which the experts are divided (expert parallelism), taken from the data-parallel ranks."""
    zero_stage: ZeroStage | Auto = 3
    """What dp_shard shards (ZeRO, arXiv:1910.02054): 1 the optimizer state, 2 also the gradients, 3 also the
    parameters.

    With 3, the engine frees the gathered parameters after each forward pass; with 1 and 2, it keeps them until the last
    backward pass of a step."""
    etp: AutoInt = 1
    """Degree of tensor parallelism inside each expert."""
    sequence_parallel: bool = True
    """With tp: whether norms and residuals are split along the sequence (arXiv:2205.05198)."""
    pipeline_schedule: PipelineSchedule | Auto = "1f1b"
    """The order in which a pipeline's stages process micro-batches."""
    virtual_stages: AutoInt = 1
    """Number of layer chunks per pipeline stage (the interleaved schedule needs 2 or more)."""
    stage_layers: tuple[PositiveInt, ...] | None = None
    """Number of layers in each pipeline stage, in the order of the model; null: layers are divided according to planned
    time, minimising the work of the most loaded rank (layers, embedding, head)."""
    context_method: ContextMethod = "ring"
    """With cp. ring: keys and values are passed around a ring (arXiv:2310.01889); ulysses: they are exchanged
    all-to-all (arXiv:2309.14509)."""


@dataclass(frozen=True)
class Layout:
    """A resolved layout, without `auto`."""

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
    """Number of layers in each pipeline stage; None: divided evenly, with the remainder in the first stages."""
    context_method: ContextMethod = "ring"

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    # Sharding

    @property
    def shards(self) -> int:
        """Return the number of ranks over which a parameter is sharded. This includes cp ranks, which have the same
        weights."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks per stage of one replica, which `ep` must divide."""
        return self.dp_shard * self.cp * self.tp

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks that share the state of one expert."""
        return max(1, self.expert_ranks // (self.ep * self.etp))

    @property
    def shards_parameters(self) -> bool:
        """Return whether each micro-batch gathers and frees the parameters (ZeRO-3)."""
        return self.zero_stage == 3 and self.dp_shard > 1

    @property
    def sharding(self) -> Sharding:
        """Return what is sharded across the data-parallel and context-parallel ranks."""
        if self.shards == 1:
            return "replicated"
        return "zero3" if self.zero_stage == 3 else "zero1"

    @property
    def keeps_parameters(self) -> bool:
        """Return whether parameters are kept for all micro-batches of a step (gathered once if sharded). This is the
        case below ZeRO-3, or if every rank has all of them."""
        return self.zero_stage < 3 or (self.shards == 1 and (self.ep == 1 or self.expert_shards == 1))

    @property
    def exchanges_every_backward(self) -> bool:
        """Return whether gradients are reduced after every micro-batch instead of once per step.

        ZeRO-2 and 3 keep gradients sharded from one micro-batch to the next. With replicas, gradients are exchanged
        only once, because the sum over replicas is more expensive. They are also exchanged only once if weight
        gradients are computed separately, after the input gradients."""
        sharded = self.zero_stage >= 2 and self.dp_shard > 1 and self.dp_replicate == 1
        return sharded and not self.splits_backward

    # Pipeline stages: chunks of consecutive layers, numbered along the model

    @property
    def splits_backward(self) -> bool:
        """Return whether the schedule splits the backward pass. A single stage never waits for another one, so its
        backward pass is never split."""
        return self.pp > 1 and self.pipeline_schedule in SPLIT_SCHEDULES

    @property
    def bubble_part(self) -> float:
        """Return how long a stage waits while the pipeline fills and drains, as a fraction of one micro-batch's time on
        all other stages.

        1F1B and GPipe: all of it. Interleaved: divided by the number of chunks per rank (arXiv:2104.04473). ZB-H1: a
        third of it, because weight gradients fill the rest (arXiv:2401.10241), given at least one micro-batch per stage
        (`bubble_of`)."""
        return 1 / 3 if self.pipeline_schedule == "zero_bubble" else 1 / self.virtual_stages

    def bubble_of(self, micro_batches: int) -> float:
        """Return `bubble_part` for a step with this many micro-batches. With fewer micro-batches than stages, zero
        bubble has no weight gradients to fill the wait: stages wait for one another's forward and input gradients,
        which are two thirds of the work."""
        starved = self.pipeline_schedule == "zero_bubble" and micro_batches < self.pp
        return 2 / 3 if starved else self.bubble_part

    @property
    def chunks_per_rank(self) -> int:
        return 2 if self._is_a_v else self.virtual_stages

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks_per_rank

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank that holds a stage: round robin, except for zbv, which goes down and back up (a V), so that
        the first rank also holds the last stage."""
        if self._is_a_v and stage >= self.pp:
            return 2 * self.pp - 1 - stage
        return stage % self.pp

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        if self._is_a_v:
            return rank, 2 * self.pp - 1 - rank
        return tuple(range(rank, self.num_stages, self.pp))

    @property
    def _is_a_v(self) -> bool:
        return self.pipeline_schedule == "zbv" and self.pp > 1

    def describe(self) -> str:
        """Return the axes that are not 1, such as `dp_replicate=2 tp=4`."""
        axes = [f"{axis}={getattr(self, axis)}" for axis in (*MESH_AXES, "ep") if getattr(self, axis) > 1]
        return " ".join(axes) or "one process"
