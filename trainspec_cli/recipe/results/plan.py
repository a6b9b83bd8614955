"""A plan: a RunSpec without `auto`, and the predictions made before the run starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import Offload, Recompute, RunSpec
from trainspec_cli.recipe.keys.training import WireFormats
from trainspec_cli.recipe.results.blueprint import Blueprint
from trainspec_cli.recipe.results.tables import MemorySetting

# Predictions: memory by cause and step time by phase for a layout, the ranked candidates, and a run on this machine.


@dataclass(frozen=True)
class MemoryBreakdown:
    """Peak memory of one device, by cause."""

    parameters_bytes: float = 0.0
    """Weights in the compute format, plus gathered copies of sharded weights."""
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    """Master weights and moments."""
    feedback_bytes: float = 0.0
    """Error feedback: the rounding errors of compressed gradients, which are added to the next step's gradients."""
    activations_bytes: float = 0.0
    logits_bytes: float = 0.0
    """Logits, and values that the loss computes from them."""
    comm_buffers_bytes: float = 0.0
    """Staging buffers of collectives, NCCL and the framework."""
    fragmentation_bytes: float = 0.0
    """Memory held by the caching allocator but not used by any tensor."""
    context_bytes: float = 0.0
    """The device context and kernels, outside the allocator."""

    @property
    def total_bytes(self) -> float:
        total: float = sum(vars(self).values())
        return total


@dataclass(frozen=True)
class StepTime:
    """One optimizer step by phase. The parts sum to the step time; communication counts only if it is not hidden behind
    computation."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    """Matrix multiplications without weights: attention scores and values, or the state-space scan."""
    memory_bound_s: float = 0.0
    """Norms, activation functions, residuals, casts, losses."""
    recompute_s: float = 0.0
    """Forward work that is repeated in the backward pass."""
    tp_comm_s: float = 0.0
    cp_comm_s: float = 0.0
    ep_comm_s: float = 0.0
    pp_comm_s: float = 0.0
    dp_comm_s: float = 0.0
    """Reduction of gradients and gathering of parameters."""
    bubble_s: float = 0.0
    """Time that pipeline stages wait, including waits that are due to imbalance between stages."""
    optimizer_s: float = 0.0
    data_s: float = 0.0
    host_s: float = 0.0
    """Time that the device waits for kernel launches or for its slowest peer."""

    @property
    def total_s(self) -> float:
        total: float = sum(vars(self).values())
        return total


@dataclass(frozen=True)
class SizedStep:
    """A step with one of the sizes of a changing batch."""

    samples: int
    """Number of samples across all devices."""
    time: StepTime


@dataclass(frozen=True)
class PoolPart:
    """One pool's part of a step."""

    pool: str
    accelerator: str
    devices: int
    stages: int
    """Number of pipeline stages that it holds; 1 without a pipeline."""
    layers: int
    """Number of the model's layers that it computes."""
    samples: int
    """Number of samples of a step that pass through it."""
    micro_batch_size: int
    """Size of its largest micro-batch."""
    time: StepTime
    """The pool's step time, including the wait for other pools (in `bubble_s` for a pipeline through several pools,
    otherwise in `host_s`)."""
    waiting_s: float
    """Time that the pool waits for other pools in that step."""
    peak_memory_bytes: float
    memory_limit_bytes: float


@dataclass(frozen=True)
class Candidate:
    """One layout with its predicted memory and speed."""

    layout: Layout
    micro_batch_size: int
    grad_accum_steps: int
    recompute: str
    offload: Literal["none", "optimizer"]
    """The state that is kept in host memory."""
    step_time_s: float
    tokens_per_s: float
    """Total rate of all devices; for an image model, in samples per second."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs utilisation: model FLOPs (causal half of attention, no recomputation) relative to the chip's peak in
    the matmul format."""
    hfu: float
    """Executed FLOPs, including recomputation, relative to the same peak."""
    peak_memory_bytes: float
    memory_limit_bytes: float
    fit_probability: float
    """Probability that it fits, given the measured error of predicted memory."""
    expected_step_s: float
    """The expected step time, given this probability: a layout that does not fit costs a restart, and then runs more
    slowly with settings that use less memory."""
    memory: tuple[MemoryBreakdown, ...]
    """One value per pipeline stage."""
    time: StepTime
    """Times of a step. If the batch size changes, these and all other values are for the size that accounts for the
    most samples."""
    sized_steps: tuple[SizedStep, ...] = ()
    """Steps with the sizes of a changing batch (or with some of them, if there are many), smallest first."""
    pools: tuple[PoolPart, ...] = ()
    """Each pool's part, in a cluster with several pools."""

    @property
    def pipelines_cross_pools(self) -> bool:
        """Return whether each pipeline passes through several pools, which divide its layers. Otherwise, the pools
        divide the samples."""
        return any(part.stages < self.layout.pp for part in self.pools)

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.memory_limit_bytes

    @property
    def fullest_memory(self) -> MemoryBreakdown:
        """Return the memory of the pipeline stage that needs the most memory."""
        return max(self.memory, key=lambda stage: stage.total_bytes, default=MemoryBreakdown())


ALWAYS_ASSUMED = (
    "MFU counts only the causal half of attention, and no recomputed work",
    "ranked by expected step time, including the risk of running out of memory (from errors on published runs)",
)
"""Assumptions made in every plan."""


@dataclass(frozen=True)
class CapacityPlan:
    """The result of searching a cluster: the layouts that fit, best first, and why others were rejected."""

    params: int
    """Number of the model's own parameters, without `adapter_params`."""
    active_params: int
    flops_per_token: float
    """Model FLOPs per token (for an image model, per sample) of the forward and backward passes."""
    world_size: int
    tokens_per_step: int
    candidates: tuple[Candidate, ...]
    """Layouts that fit. The first one is the chosen layout: the simplest of those about as fast as the fastest. The
    others are sorted by expected step time. If nothing fits, these are layouts that do not fit."""
    usual: Candidate | None = None
    """The layout that an expert would start from, by rules of thumb (`planner.capacity.is_usual`); None if no such
    layout fits."""
    safest: Candidate | None = None
    """The layout most likely to fit, among those whose step takes at most 10% longer than the best one's."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejected layouts by reason."""
    advice: tuple[str, ...] = ()
    """If no layout fits, changes that would make the run fit."""
    assumptions: tuple[str, ...] = ()
    considered: int = 0
    adapter_params: int = 0
    """Number of parameters trained by LoRA fine-tuning."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None

    @property
    def fastest(self) -> Candidate | None:
        """Return the layout with the shortest expected step. It differs from `best` if a simpler one is about as
        fast."""
        fitting = (candidate for candidate in self.candidates if candidate.fits)
        return min(fitting, key=lambda candidate: candidate.expected_step_s, default=None)


@dataclass(frozen=True)
class PlannedLink:
    axis: str
    bytes_per_s: float
    """Bytes per second that a rank sends in the largest exchange along the axis."""


@dataclass(frozen=True)
class LocalPrediction:
    time_s: dict[str, float]
    """Duration of each part of a step, named as in the step events."""
    memory: dict[str, float]
    """Peak bytes of one process by cause, as measured by a run."""
    beside: dict[str, float] = field(default_factory=dict)
    """Bytes that a GPU needs outside its allocator; a run does not measure them."""
    links: tuple[PlannedLink, ...] = ()
    """The links of the axes whose exchanges a run measures."""

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
    """A layout that a run uses from a given step on, with its micro-batches."""

    step: int
    """Number of updates before it takes effect."""
    layout: Layout
    micro_batch_size: int
    grad_accum_steps: int
    largest_micro_batch_size: int | None = None
    largest_stage_layers: int | None = None


@dataclass(frozen=True)
class LayoutProposal:
    """A new layout for a run whose ranks differ in speed, and the time that it is expected to save.

    Times come from the planner. Where they are only rough (for example, on a CPU), only their ratio is meaningful."""

    layout: Layout
    micro_batch_size: int
    grad_accum_steps: int
    """Number of micro-batches per rank per step, for ranks of equal speed."""
    largest_micro_batch_size: int
    largest_stage_layers: int | None
    """Maximum number of layers that fit in a pipeline rank's memory; None if no layers move."""
    before_s: float
    """Step time in the current layout, with the best sample shares and stages for the measured speeds."""
    expected_s: float
    """Step time in the proposed layout under the same conditions. If planned times are rough, it excludes savings that
    the layout would also bring on ranks of equal speed."""
    reason: str

    def planned_from(self, step: int) -> PlannedLayout:
        """Return the proposed layout as a change that takes effect after `step` updates."""
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
    """The plan that `launch` writes to `plan.json` and the workers execute."""

    spec: RunSpec
    """The recipe as requested (including each `auto`, for the record)."""
    layout: Layout
    device: Literal["cpu", "cuda"]
    num_nodes: int
    devices_per_node: int
    compute: Literal["bf16", "fp32", "fp64"]
    """fp64 is only for reference runs; recipes cannot request it."""
    micro_batch_size: int
    """Number of samples in the largest micro-batch."""
    grad_accum_steps: int
    """Number of micro-batches per rank per step."""
    recompute: Recompute
    offload: Offload
    params: int
    flops_per_token: float
    """Model FLOPs per token of the forward and backward passes: 6 per matmul parameter, plus the causal half of
    attention."""
    peak_flops: float | None = None
    """FLOP/s of one device, on which MFU is based; None: the workers measure their best matmul."""
    peak_source: str = ""

    adapter_params: int = 0
    """Number of parameters trained by LoRA fine-tuning, in addition to the model's own `params`."""

    replica_groups: int = 1
    """Number of replica groups, each of which has the full model in `layout`. With more than one, a group survives the
    loss of others."""

    largest_micro_batch_size: int | None = None
    """The largest size that memory allows, limited to what the scheduler needs; None if unknown."""

    memory_ladder: tuple[MemorySetting, ...] = ()
    """The settings that a run tries in turn when it runs out of memory (`run/recovery/memory.py`), each of which uses
    less memory than the previous one. If empty, the run ends."""

    largest_stage_layers: int | None = None
    """Maximum number of layers that fit in a pipeline rank's memory, limited to what the scheduler needs; None if
    unknown."""

    layer_flops: tuple[float, ...] = ()
    """FLOPs of a micro-batch's forward pass, by layer; the scheduler uses them to move layers. Empty without a
    pipeline."""
    head_flops: float = 0.0

    kernels: KernelSpec = field(default_factory=KernelSpec)
    """The kernel of each operation; `auto` is resolved by measurement just before the launch."""

    comm: WireFormats = field(default_factory=WireFormats)

    steps: int | None = None
    """Number of steps if the batch size changes; the largest possible number if it depends on measurements. None:
    `train.max_steps`."""

    changes: tuple[PlannedLayout, ...] = ()
    """Layouts that the recipe switches to during the run, in step order."""

    prediction: LocalPrediction | None = None
    """Memory and time of a run on this machine's CPU; None without a suitable probe."""

    blueprint: Blueprint | None = None
    """Communication of a run on several nodes with a described network; None otherwise."""

    @property
    def memory_setting(self) -> MemorySetting:
        return MemorySetting(self.micro_batch_size, self.recompute, self.offload)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def group_size(self) -> int:
        """Return the number of processes in one replica group."""
        return self.world_size // self.replica_groups

    @property
    def group_backend(self) -> str:
        """Return the backend for exchanges between replica groups, which is the devices' native one
        (`engine/elastic/cross_group.py`)."""
        return {"cpu": "gloo", "cuda": "nccl"}[self.device]

    def nodes_of_group(self, group: int) -> range:
        """Return the nodes of a replica group: several complete nodes, or a single one that several groups share."""
        first = group * self.num_nodes // self.replica_groups
        return range(first, first + max(1, self.num_nodes // self.replica_groups))

    @property
    def as_one_group(self) -> Plan:
        """Return a plan for the same work with a single group, which contains the replicas of all original groups."""
        layout = replace(self.layout, dp_replicate=self.layout.dp_replicate * self.replica_groups)
        return replace(self, layout=layout, replica_groups=1)

    def with_layout(self, other: PlannedLayout) -> Plan:
        """Return the plan of the same run in another layout."""
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
        """Return the number of tokens in a step of the initial size; for image and volume models, whose `seq_len` is 1,
        the number of samples."""
        return self.spec.batching.global_batch_size * self.spec.data.seq_len
