"""A plan: a RunSpec with no `auto` left, and the predictions made before the start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import Offload, Recompute, RunSpec
from trainspec_cli.recipe.keys.training import WireFormats
from trainspec_cli.recipe.results.blueprint import Blueprint
from trainspec_cli.recipe.results.tables import MemorySetting

# Predictions: memory by cause and step time by phase of a layout, the ranked candidates, and a run on this machine.


@dataclass(frozen=True)
class MemoryBreakdown:
    """Peak memory of one device, by cause."""

    parameters_bytes: float = 0.0
    """Weights in the compute format, and gathered copies of sharded ones."""
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    """Master weights and moments."""
    feedback_bytes: float = 0.0
    """What compressed gradients have lost so far, which the next step adds."""
    activations_bytes: float = 0.0
    logits_bytes: float = 0.0
    """Logits, and what the loss makes of them."""
    comm_buffers_bytes: float = 0.0
    """Collectives' staging, of NCCL and of the framework."""
    fragmentation_bytes: float = 0.0
    """Held by the caching allocator and used by no tensor."""
    context_bytes: float = 0.0
    """The device's context and kernels, outside the allocator."""

    @property
    def total_bytes(self) -> float:
        total: float = sum(vars(self).values())
        return total


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, by phase. The parts sum to the step; communication is what is not hidden behind work."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    """Scores and values (or the state-space scan): what is not a weight's matrix product."""
    memory_bound_s: float = 0.0
    """Norms, activation functions, residuals, casts, losses."""
    recompute_s: float = 0.0
    """Forward work done a second time in the backward."""
    tp_comm_s: float = 0.0
    cp_comm_s: float = 0.0
    ep_comm_s: float = 0.0
    pp_comm_s: float = 0.0
    dp_comm_s: float = 0.0
    """Gradients' reduction and parameters' gathering."""
    bubble_s: float = 0.0
    """Waiting of a pipeline's stages, the imbalance between them included."""
    optimizer_s: float = 0.0
    data_s: float = 0.0
    host_s: float = 0.0
    """The device waits for kernels to be launched, or for the slowest of its peers."""

    @property
    def total_s(self) -> float:
        total: float = sum(vars(self).values())
        return total


@dataclass(frozen=True)
class SizedStep:
    """A step of one size of a batch that changes."""

    samples: int
    """Over all devices."""
    time: StepTime


@dataclass(frozen=True)
class PoolPart:
    """The part of one pool in a step."""

    pool: str
    accelerator: str
    devices: int
    stages: int
    """Pipeline stages that it holds; 1 without a pipeline."""
    layers: int
    """Layers of the model that it computes."""
    samples: int
    """Samples of a step that go through it."""
    micro_batch_size: int
    """The largest of its micro-batches."""
    time: StepTime
    """Its step, waiting for other pools included (in `bubble_s` of a pipeline through several pools, else in
    `host_s`)."""
    waiting_s: float
    """The part of it in which it waits for other pools."""
    peak_memory_bytes: float
    memory_limit_bytes: float


@dataclass(frozen=True)
class Candidate:
    """One layout and its predicted memory and speed."""

    layout: Layout
    micro_batch_size: int
    grad_accum_steps: int
    recompute: str
    offload: Literal["none", "optimizer"]
    """What waits in host memory."""
    step_time_s: float
    tokens_per_s: float
    """Over all devices; samples a second for a model of images."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs (causal half of attention, no recomputed work) over the chip's peak in the matmul format."""
    hfu: float
    """Executed FLOPs, recomputed work included, over the same peak."""
    peak_memory_bytes: float
    memory_limit_bytes: float
    fit_probability: float
    """By the measured error of predicted memory."""
    expected_step_s: float
    """The step with that in it: what does not fit costs a start, and goes on more slowly with less memory."""
    memory: tuple[MemoryBreakdown, ...]
    """One for each pipeline stage."""
    time: StepTime
    """Times of a step; where the batch changes, of the size that trains most samples, as is every other figure."""
    sized_steps: tuple[SizedStep, ...] = ()
    """Steps of the batch's sizes where it changes, or of some of many, smallest first."""
    pools: tuple[PoolPart, ...] = ()
    """The part of each pool, of a cluster of several."""

    @property
    def pipelines_cross_pools(self) -> bool:
        """Each pipeline goes through several pools, which share its layers; else the pools share samples."""
        return any(part.stages < self.layout.pp for part in self.pools)

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.memory_limit_bytes

    @property
    def fullest_memory(self) -> MemoryBreakdown:
        """The memory of the pipeline stage that takes most."""
        return max(self.memory, key=lambda stage: stage.total_bytes, default=MemoryBreakdown())


ALWAYS_ASSUMED = (
    "MFU counts attention over the causal half of the sequence and no recomputed work",
    "ranked by the step to expect with the chance to fit, by the error of memory predicted for published runs",
)
"""Assumptions of every plan."""


@dataclass(frozen=True)
class CapacityPlan:
    """The search result for a cluster: the layouts that fit, best first, and why the others do not."""

    params: int
    """The model's own; `adapter_params` are beside them."""
    active_params: int
    flops_per_token: float
    """Model FLOPs of forward and backward a token (a sample, for a model of images)."""
    world_size: int
    tokens_per_step: int
    candidates: tuple[Candidate, ...]
    """Layouts that fit: first the one that is chosen, the simplest of those about as fast as the fastest, then the
    others, the shortest expected step first. Where nothing fits, those that do not."""
    usual: Candidate | None = None
    """The layout that an expert would start from, by rules of thumb (`planner.capacity.is_usual`); None where none of
    that kind fits."""
    safest: Candidate | None = None
    """The layout that most probably fits, of those whose step is a tenth longer than the best one's at most."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Layouts refused, counted by reason."""
    advice: tuple[str, ...] = ()
    """Changes that would make the run fit, if no layout does."""
    assumptions: tuple[str, ...] = ()
    considered: int = 0
    adapter_params: int = 0
    """Those that a fine-tune with LoRA trains."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None

    @property
    def fastest(self) -> Candidate | None:
        """The layout with the shortest expected step, which is not `best` where a simpler one is about as fast."""
        fitting = (candidate for candidate in self.candidates if candidate.fits)
        return min(fitting, key=lambda candidate: candidate.expected_step_s, default=None)


@dataclass(frozen=True)
class PlannedLink:
    axis: str
    bytes_per_s: float
    """Bytes that a rank sends in the largest exchange along the axis."""


@dataclass(frozen=True)
class LocalPrediction:
    time_s: dict[str, float]
    """A step's parts, named as in the step events."""
    memory: dict[str, float]
    """Bytes of one process at its peak, by cause: what a run measures."""
    beside: dict[str, float] = field(default_factory=dict)
    """Bytes that a GPU needs beside what its allocator hands out, and a run does not measure."""
    links: tuple[PlannedLink, ...] = ()
    """Links of the axes that are looked at."""

    @property
    def step_time_s(self) -> float:
        return sum(self.time_s.values())

    @property
    def peak_memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def needed_bytes(self) -> float:
        return self.peak_memory_bytes + sum(self.beside.values())


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

    adapter_params: int = 0
    """Those that a fine-tune with LoRA trains, beside the model's own `params`."""

    replica_groups: int = 1
    """Groups of processes, each with the whole model in `layout`; above 1 they survive one another."""

    largest_micro_batch_size: int | None = None
    """The most that memory allows, as far as the scheduler asks; None where that is not known."""

    memory_ladder: tuple[MemorySetting, ...] = ()
    """The settings that a run takes in turn where its memory runs out (`run/recovery/memory.py`), each with less
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
