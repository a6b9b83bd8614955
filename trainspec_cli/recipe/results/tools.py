"""The requests and the results of the engine's tools. Each travels as JSON from one process to another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.keys.kernels import KernelTrials
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.results.plan import Plan

Device = Literal["cpu", "cuda"]
Compute = Literal["bf16", "fp32", "fp64"]
REQUEST = "request.json"
RESULT = "tool_result.json"
DRAWN_BATCHES, DRAWN_TOKENS = "batches.npz", "tokens"
"""The file of the batches that a run of the certification was asked to leave, and its array."""


@dataclass(frozen=True)
class ProbeRequest:
    """Measure this machine with all processes at once; the result is a `MachineProbe`."""

    compute: Compute


@dataclass(frozen=True)
class KernelRequest:
    """Try every backend at the shapes of a plan."""

    plan: Plan


@dataclass(frozen=True)
class KernelResult:
    ranks: tuple[KernelTrials, ...]


@dataclass(frozen=True)
class BlockRequest:
    """Count the parameters of a user-defined block."""

    model: OwnModel


@dataclass(frozen=True)
class BlockCount:
    params: int = 0
    problem: Problem | None = None
    """What is wrong with the block; None where it was counted."""


@dataclass(frozen=True)
class TraceRequest:
    """Count one rank's step of a plan under fake tensors."""

    plan: Plan
    rank: int


@dataclass(frozen=True)
class TraceResult:
    """Tensors are counted, not the allocator's holes nor the device's context."""

    rank: int
    state_bytes: float
    """Parameters, gradients and optimizer state, before the first step."""
    peak_memory_bytes: float
    peak_by_cause: dict[str, float]
    flops: float
    comm_bytes: dict[str, float]
    """Bytes by mesh axis and collective: `dp_shard all_gather`."""
    seconds: float = 0.0
    """Time that the trace took."""
    peak_reserved_bytes: float = 0.0
    """Bytes that PyTorch's allocator for CUDA devices would reserve for these tensors, by its rules; devices have more
    streams, each with blocks of its own, and give blocks back when they are full."""


@dataclass(frozen=True)
class ExportRequest:
    """Write a checkpoint's weights, as safetensors files or as another project has them."""

    plan_json: str
    checkpoint: str
    output: str
    dtype: str
    """The dtype as safetensors names it."""
    max_file_bytes: int
    what: Literal["merged", "adapters", "base"] = "merged"
    """The whole weights with LoRA adapters merged in, PEFT's file of the adapters alone, or the weights below them."""
    format: Literal["safetensors", "dcp", "litgpt"] = "safetensors"
    naming: Literal["hf", "torchtitan", "megatron", "litgpt"] = "hf"
    """Whose names the tensors have; other than Hugging Face's only where they are not safetensors files."""


@dataclass(frozen=True)
class ExportResult:
    files: int


@dataclass(frozen=True)
class SpeedRequest:
    """Measure each device of this node by itself."""

    device: Device
    compute: Compute


@dataclass(frozen=True)
class SpeedResult:
    """The slowest device counts."""

    torch: str
    cuda: str | None
    nccl: str | None
    devices: int
    matmul_flops: float
    """FLOP/s."""
    memory_bytes_per_s: float
    slowest_device: int


@dataclass(frozen=True)
class LinksRequest:
    """Measure how fast a job's processes reach one another."""

    device: Device


@dataclass(frozen=True)
class AllReduceRate:
    bytes: int
    seconds: float
    bus_bytes_per_s: float
    """Bytes times 2(n-1)/n over the time, as nccl-tests count it."""


@dataclass(frozen=True)
class PingRate:
    bytes: int
    seconds: float
    """One way."""
    bytes_per_s: float


@dataclass(frozen=True)
class PairRate:
    """The link between the first processes of two nodes."""

    hosts: tuple[str, ...]
    bytes_per_s: float
    """Rate of the largest message."""
    sizes: tuple[PingRate, ...]


@dataclass(frozen=True)
class LinksResult:
    all_reduce: tuple[AllReduceRate, ...]
    pairs: tuple[PairRate, ...]


@dataclass(frozen=True)
class CheckpointRatesRequest:
    """Write and read checkpoints of a plan's state below a folder, which lies on the disk that is measured."""

    plan: Plan
    folder: str


@dataclass(frozen=True)
class CheckpointRates:
    """The quickest of several times; the slowest process counts."""

    bytes: int
    """Size of a checkpoint, over all processes."""
    write_s: float
    """Until all of it is on the disk."""
    read_s: float
    """Until all of it is verified and in place again; the system was asked to hold none of it in memory."""


@dataclass(frozen=True)
class CertifyRun:
    """A plan to be trained on samples that are drawn from its seed."""

    plan: Plan
    steps: int
    gradients: bool
    """Leave the full gradients of the first step's batch."""
    clip_from: int | None
    """The step from which gradients are clipped to `clip_norm`, whatever the plan says, and its batch is seen again and
    again; None: never."""
    clip_norm: float
    save_at: int | None
    """The step after which a checkpoint is written."""
    resume: bool
    """Train the steps after `save_at` a second time, from the checkpoint."""
    continues: str | None
    """The run whose checkpoint this one begins with."""
    exchanges: int = 1
    """How often those gradients are computed and exchanged, with no update between; their mean is left."""
    weights: tuple[float, ...] = ()
    """The shares of the data-parallel ranks of each batch, in any unit; none: they are equal."""
    inputs: bool = False
    """Leave first.stage*.npz, the weights before the first step, and `DRAWN_BATCHES`."""
    live: bool = False
    """The trainer makes it, as in a launch, with the plan's changes of layout and faults; its gradients are those of
    the batch after the last step."""
    killed_at: int | None = None
    """A live run is ended in the middle of its change of layout after so many updates, and started again."""


@dataclass(frozen=True)
class CertifyRequest:
    folder: str
    """Below it each run leaves NAME/result.json (a `CertifyRunResult`), gradients.stage*.npz and weights.stage*.npz."""
    runs: dict[str, CertifyRun]
    """Runs by name, in order."""


@dataclass(frozen=True)
class TrainedSteps:
    losses: tuple[float | None, ...]
    """None for what is not finite."""
    least_clipped_norm: float | None
    """The smallest norm of a gradient that was to be clipped; None where none was, or where it is not finite."""
    weights_sha256: str
    taken: tuple[tuple[int, ...], ...] = ()
    """The positions of the samples that all ranks together took in each step, in order: one that several took stands
    there as often."""


@dataclass(frozen=True)
class LiveSteps:
    """The figures of a run of the trainer."""

    starts: tuple[int, ...]
    """The updates made when each start of the run began."""
    layouts: tuple[Layout, ...]
    """The layout of each step."""
    largest_micro_batches: tuple[int, ...]
    """Samples that the first rank processed together in each step, at most."""
    written_bytes: int
    """Bytes by which the run's folder grew, logs apart, while no checkpoint was due."""


@dataclass(frozen=True)
class CertifyRunResult:
    trained: TrainedSteps
    resumed: TrainedSteps | None
    live: LiveSteps | None = None


@dataclass(frozen=True)
class CertifyResult:
    runs: int


# The results of a short probe of a machine without GPUs, with all of a run's processes running at once.


PROBED_TOKENS = 1024
"""Tokens that go through the probed matrix products and attention."""
PROBED_HEADS = 4
PROBED_HEAD_SIZES = (16, 64)
"""Sizes of the probed heads: a head costs its scores and softmax, whatever its size, and products that grow with it."""


BUSY = 0.1
"""A probe displaced for a larger fraction of its time measures other processes as much as the machine."""


@dataclass(frozen=True)
class Curve:
    """Seconds over size. The first size is next to nothing: what it takes is the cost of the call itself."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Straight between two points on logarithmic axes; beyond the last one proportional to size."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        points = list(zip(self.sizes, self.seconds, strict=True))
        (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if b[0] >= size)
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))

    def beyond_call(self, size: float) -> float:
        """Return the cost that the size adds to the cost of the call."""
        return max(0.0, self.at(size) - self.seconds[0])


@dataclass(frozen=True)
class Passes:
    """An operation's forward and backward."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class MatmulCurves:
    """The three products of training over a matrix's elements, for `PROBED_TOKENS` tokens; CPUs differ in them."""

    forward: Curve
    input_gradient: Curve
    weight_gradient: Curve


@dataclass(frozen=True)
class Reference:
    """A model of middle size, really trained for some steps over the whole of the probe."""

    plan: Plan
    parts_s: dict[str, float]
    """Times of a step's parts, named as in the step events."""
    grown_bytes: float
    """Resident memory that it added to the process."""


@dataclass(frozen=True)
class MachineProbe:
    processes: int
    compute: str
    empty_step_s: dict[str, float]
    """The parts of a step of a model next to nothing, without its blocks: hosts' time, small collectives."""
    empty_block_s: dict[str, float]
    """The time that each of its blocks adds."""
    small: Reference
    large: Reference
    matmul: MatmulCurves
    attention: Passes
    """Attention by sequence length, for `PROBED_TOKENS` tokens and `PROBED_HEADS`, of the larger head size."""
    attention_narrow: Passes
    """Attention of the smaller head size."""
    norm: Passes
    """This and what follows over elements."""
    rope: Passes
    swiglu: Passes
    loss: Curve
    """Over logits, their gradient included."""
    add: Curve
    cast: Curve
    optimizer: Curve
    """The gradients' norm and the update, over parameters."""
    all_reduce: Curve
    """Collectives over bytes, each process with work of its own before."""
    all_gather: Curve
    reduce_scatter: Curve
    bare_bytes: float
    """Resident memory of a worker with a model next to nothing."""
    displaced: float
    """Part of the time that a process was ready to run and another had the core."""
    peak_flops: float
    """FLOP/s of a process's best matrix product, that MFU is taken of."""

    @property
    def is_disturbed(self) -> bool:
        return self.displaced > BUSY

    @property
    def references(self) -> tuple[Reference, Reference]:
        return self.small, self.large
