"""A plan: a RunSpec with no `auto` left, and the predictions made before the start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trainspec_cli.recipe.keys.comm import WireFormats
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import Offload, Recompute, RunSpec
from trainspec_cli.recipe.results.blueprint import Blueprint
from trainspec_cli.recipe.results.memory import MemorySetting
from trainspec_cli.recipe.results.prediction import LocalPrediction


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that a run has from a step on, and the micro-batches that go with it."""

    step: int
    """Updates made before it."""
    layout: Layout
    micro_batch_size: int
    grad_accum_steps: int
    largest_micro_batch_size: int | None = None
    largest_stage_layers: int | None = None


@dataclass(frozen=True)
class LayoutProposal:
    """Another layout for a run whose ranks are not equally fast, and what it is expected to save.

    Seconds are the planner's: where nothing measured stands behind them (on a CPU), their ratio alone counts.
    """

    layout: Layout
    micro_batch_size: int
    grad_accum_steps: int
    """Micro-batches of each rank in a step, over ranks that are equally fast."""
    largest_micro_batch_size: int
    largest_stage_layers: int | None
    """Layers that memory allows on a pipeline rank; None where none move."""
    before_s: float
    """A step in the present layout, with the shares and the cut into stages that are best for the measured speeds."""
    expected_s: float
    """A step in the proposed one, likewise; where planned times are rough, without what it would save on equally fast
    ranks too."""
    reason: str

    def planned_from(self, step: int) -> PlannedLayout:
        """Return the layout as one that the run has after `step` updates."""
        return PlannedLayout(
            step,
            self.layout,
            self.micro_batch_size,
            self.grad_accum_steps,
            self.largest_micro_batch_size,
            self.largest_stage_layers,
        )


@dataclass(frozen=True)
class Plan:
    """The plan that `launch` writes to `plan.json` and the workers run."""

    spec: RunSpec
    """The recipe as it was asked for (`auto`s included, for the record)."""
    layout: Layout
    device: Literal["cpu", "cuda"]
    num_nodes: int
    devices_per_node: int
    compute: Literal["bf16", "fp32", "fp64"]
    """fp64 is for references alone: no recipe asks for it."""
    micro_batch_size: int
    """Samples of the largest micro-batch."""
    grad_accum_steps: int
    """Micro-batches of each rank in a step."""
    recompute: Recompute
    offload: Offload
    params: int
    flops_per_token: float
    """Model FLOPs of forward and backward a token: 6 per matmul parameter, and attention over the causal half."""
    peak_flops: float | None = None
    """FLOP/s of one device that MFU is taken of; None: the workers measure their best matmul."""
    peak_source: str = ""

    replica_groups: int = 1
    """Groups of processes, each with the whole model in `layout`; above 1 they survive one another."""

    largest_micro_batch_size: int | None = None
    """The most that memory allows, as far as the scheduler asks; None where that is not known."""

    memory_ladder: tuple[MemorySetting, ...] = ()
    """The settings that a run takes in turn where its memory runs out (`policy/recovery/memory.py`), each with less
    memory than the one before; empty where it ends."""

    largest_stage_layers: int | None = None
    """Layers that memory allows on a pipeline rank, as far as the scheduler asks; None where that is not known."""

    layer_flops: tuple[float, ...] = ()
    """Operations of a micro-batch's forward by layer, by which the scheduler moves layers; empty without a pipeline."""
    head_flops: float = 0.0

    kernels: KernelSpec = field(default_factory=KernelSpec)
    """The kernel of each operation; `auto` is resolved by measuring, just before the launch."""

    comm: WireFormats = field(default_factory=WireFormats)

    steps: int | None = None
    """Steps of the run, where its batch changes; at most so many where it follows what is measured. None:
    `train.max_steps`."""

    changes: tuple[PlannedLayout, ...] = ()
    """Layouts that the recipe changes to while the run goes on, in the order of their steps."""

    prediction: LocalPrediction | None = None
    """Memory and time of a run on this machine's CPU; None where no probe speaks of it."""

    blueprint: Blueprint | None = None
    """Communication of a run on several nodes whose network is described; None elsewhere."""

    @property
    def memory_setting(self) -> MemorySetting:
        return MemorySetting(self.micro_batch_size, self.recompute, self.offload)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def group_size(self) -> int:
        """Processes of one replica group."""
        return self.world_size // self.replica_groups

    @property
    def group_backend(self) -> str:
        """The backend that replica groups exchange over: the devices' own (`engine/elastic/cross_group.py`)."""
        return {"cpu": "gloo", "cuda": "nccl"}[self.device]

    def nodes_of_group(self, group: int) -> range:
        """Nodes of a replica group: some whole ones, or one that several groups share."""
        first = group * self.num_nodes // self.replica_groups
        return range(first, first + max(1, self.num_nodes // self.replica_groups))

    @property
    def as_one_group(self) -> Plan:
        """The same work by one group, whose replicas the groups then are."""
        layout = replace(self.layout, dp_replicate=self.layout.dp_replicate * self.replica_groups)
        return replace(self, layout=layout, replica_groups=1)

    def with_layout(self, other: PlannedLayout) -> Plan:
        """The same run in another layout."""
        return replace(
            self,
            layout=other.layout,
            micro_batch_size=other.micro_batch_size,
            grad_accum_steps=other.grad_accum_steps,
            largest_micro_batch_size=other.largest_micro_batch_size,
            largest_stage_layers=other.largest_stage_layers,
        )

    @property
    def total_steps(self) -> int:
        return self.spec.train.max_steps if self.steps is None else self.steps

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step of the first size; or its samples, where they are the unit: their `seq_len` is 1."""
        return self.spec.batching.global_batch_size * self.spec.data.seq_len
