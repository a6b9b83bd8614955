"""Predictions: memory by cause and step time by phase of a layout, the ranked candidates, and a run on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.recipe.keys.layout import Layout


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


@dataclass(frozen=True)
class CapacityPlan:
    """The search result for a cluster: the layouts that fit, best first, and why the others do not."""

    params: int
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
