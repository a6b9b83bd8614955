"""Requests to the engine's tools, and their results. Each is sent between processes as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.keys.kernels import KernelTrials
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import OwnModel, TransformersModel
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan

Device = Literal["cpu", "cuda"]
Compute = Literal["bf16", "fp32", "fp64"]
REQUEST = "request.json"
RESULT = "tool_result.json"
DRAWN_BATCHES, DRAWN_TOKENS = "batches.npz", "tokens"
"""The file and the array where a certification run saves its batches on request."""


@dataclass(frozen=True)
class ProbeRequest:
    """Measure this machine with all processes at the same time; the result is a `MachineProbe`."""

    compute: Compute


@dataclass(frozen=True)
class KernelRequest:
    """Try every backend with a plan's shapes."""

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
    """The problem with the block; None if it was counted."""


@dataclass(frozen=True)
class ModuleRequest:
    """Count and trace a model of transformers, without memory."""

    config: str
    """The content of config.json."""
    folder: str
    seq_len: int
    compute: Literal["bf16", "fp32"]
    lora: LoraSpec
    has_weights: bool
    """Check that the folder contains the model's weights."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ModuleCount:
    model: TransformersModel | None = None
    problems: tuple[Problem, ...] = ()
    """Problems with the folder; none if the model was counted."""


@dataclass(frozen=True)
class TraceRequest:
    """Trace one rank's step of a plan with fake tensors."""

    plan: Plan
    rank: int


@dataclass(frozen=True)
class TraceResult:
    """Memory and communication of tensors, excluding allocator fragmentation and the device context."""

    rank: int
    state_bytes: float
    """Bytes of parameters, gradients and optimizer state before the first step."""
    peak_memory_bytes: float
    peak_by_cause: dict[str, float]
    flops: float
    comm_bytes: dict[str, float]
    """Bytes by mesh axis and collective: `dp_shard all_gather`."""
    seconds: float = 0.0
    """Duration of the trace."""
    peak_reserved_bytes: float = 0.0
    """Bytes that PyTorch's CUDA allocator would reserve for these tensors. Real devices have more streams, each with
    its own blocks, and free cached blocks when memory is full."""


@dataclass(frozen=True)
class ExportRequest:
    """Export a checkpoint's weights, as safetensors files or in another project's format."""

    plan_json: str
    checkpoint: str
    output: str
    dtype: str
    """The dtype's name in safetensors."""
    max_file_bytes: int
    what: Literal["merged", "adapters", "base"] = "merged"
    """All weights with LoRA adapters merged in, only the adapters as a PEFT file, or the base weights."""
    format: Literal["safetensors", "dcp", "litgpt"] = "safetensors"
    naming: Literal["hf", "torchtitan", "megatron", "litgpt"] = "hf"
    """The naming scheme of the tensors. Schemes other than Hugging Face's are only for formats other than
    safetensors."""


@dataclass(frozen=True)
class ExportResult:
    files: int


@dataclass(frozen=True)
class SpeedRequest:
    """Measure each device of this node separately."""

    device: Device
    compute: Compute


@dataclass(frozen=True)
class SpeedResult:
    """The measurements of the slowest device."""

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
    """Measure the speed of the links between a job's processes."""

    device: Device


@dataclass(frozen=True)
class AllReduceRate:
    bytes: int
    seconds: float
    bus_bytes_per_s: float
    """Bus bandwidth as in nccl-tests: bytes times 2(n-1)/n, divided by the time."""


@dataclass(frozen=True)
class PingRate:
    bytes: int
    seconds: float
    """Duration of a message in one direction."""
    bytes_per_s: float


@dataclass(frozen=True)
class PairRate:
    """The link between the first processes of two nodes."""

    hosts: tuple[str, ...]
    bytes_per_s: float
    """Rate with the largest message."""
    sizes: tuple[PingRate, ...]


@dataclass(frozen=True)
class LinksResult:
    all_reduce: tuple[AllReduceRate, ...]
    pairs: tuple[PairRate, ...]


@dataclass(frozen=True)
class CheckpointRatesRequest:
    """Write and read checkpoints of a plan's state in a folder on the disk to be measured."""

    plan: Plan
    folder: str


@dataclass(frozen=True)
class CheckpointRates:
    """The fastest of several repetitions, each of which is timed by its slowest process."""

    bytes: int
    """Size of a checkpoint, over all processes."""
    write_s: float
    """Time until the entire checkpoint is on disk."""
    read_s: float
    """Time until the entire checkpoint is verified and loaded, without the page cache."""


@dataclass(frozen=True)
class CertifyRun:
    """A plan to be trained on samples generated from its seed."""

    plan: Plan
    steps: int
    gradients: bool
    """Whether to save the full gradients of the first step's batch."""
    clip_from: int | None
    """The step from which gradients are clipped to `clip_norm`, regardless of the plan, and from which that step's
    batch is repeated; None: never."""
    clip_norm: float
    save_at: int | None
    """The step after which to write a checkpoint."""
    resume: bool
    """Train the steps after `save_at` again, starting from the checkpoint."""
    continues: str | None
    """The run from whose checkpoint this run starts."""
    exchanges: int = 1
    """Number of times that the first batch's gradients are computed and exchanged without an update; their mean is
    saved."""
    weights: tuple[float, ...] = ()
    """Each data-parallel rank's share of a batch, in any unit; if empty, shares are equal."""
    inputs: bool = False
    """Save first.stage*.npz, which contains the weights before the first step, and `DRAWN_BATCHES`."""
    live: bool = False
    """Run the trainer as in a launch, with the plan's layout changes and faults. Its gradients are those for the batch
    after the last step."""
    killed_at: int | None = None
    """Kill a live run in the middle of its layout change after this many updates, then restart it."""


@dataclass(frozen=True)
class CertifyRequest:
    folder: str
    """The folder where each run saves NAME/result.json (a `CertifyRunResult`), gradients.stage*.npz and
    weights.stage*.npz."""
    runs: dict[str, CertifyRun]
    """Runs by name, in order."""


@dataclass(frozen=True)
class TrainedSteps:
    losses: tuple[float | None, ...]
    """The loss of each step; None if it is not finite."""
    least_clipped_norm: float | None
    """The smallest norm of a gradient that needed clipping; None if there was none or it is not finite."""
    weights_sha256: str
    taken: tuple[tuple[int, ...], ...] = ()
    """The sorted positions of all samples that the ranks train on in each step. A sample that several ranks train on is
    repeated."""


@dataclass(frozen=True)
class LiveSteps:
    """Measurements from a trainer run."""

    starts: tuple[int, ...]
    """Number of updates before each start of the run."""
    layouts: tuple[Layout, ...]
    """The layout of each step."""
    largest_micro_batches: tuple[int, ...]
    """Maximum number of samples that the first rank processed together in each step."""
    written_bytes: int
    """Growth of the run folder in bytes, excluding logs, while no checkpoint was due."""


@dataclass(frozen=True)
class CertifyRunResult:
    trained: TrainedSteps
    resumed: TrainedSteps | None
    live: LiveSteps | None = None


@dataclass(frozen=True)
class CertifyResult:
    runs: int


# Results of a short probe of a machine without GPUs, with all processes of a run active at the same time.


PROBED_TOKENS = 1024
"""Number of tokens in the probed matrix multiplications and attention."""
PROBED_HEADS = 4
PROBED_HEAD_SIZES = (16, 64)
"""Head sizes that are probed. The cost of scores and softmax does not depend on the head size, while that of the matrix
multiplications grows with it."""


BUSY = 0.1
"""A probe that is preempted for a larger fraction of its time than this measures other processes as much as the
machine."""


@dataclass(frozen=True)
class Curve:
    """Time in seconds by size. The first size is nearly zero, and its time is the cost of the call itself."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Return the time in seconds for a size: log-log interpolation between two points; beyond the last point,
        proportional to size."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        points = list(zip(self.sizes, self.seconds, strict=True))
        (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if b[0] >= size)
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))

    def beyond_call(self, size: float) -> float:
        """Return the cost of a size in excess of the cost of the call itself."""
        return max(0.0, self.at(size) - self.seconds[0])


@dataclass(frozen=True)
class Passes:
    """An operation's forward and backward passes."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class MatmulCurves:
    """The three matrix multiplications of training with `PROBED_TOKENS` tokens, as functions of a matrix's number of
    elements. Their relative speed depends on the CPU."""

    forward: Curve
    input_gradient: Curve
    weight_gradient: Curve


@dataclass(frozen=True)
class Reference:
    """A medium-sized model, trained for a few steps at several times during the probe."""

    plan: Plan
    parts_s: dict[str, float]
    """Duration of each part of a step, named as in step events."""
    grown_bytes: float
    """Resident memory that it adds to the process."""


@dataclass(frozen=True)
class MachineProbe:
    processes: int
    compute: str
    empty_step_s: dict[str, float]
    """Parts of a step of a nearly empty model, without its blocks: host time and small collectives."""
    empty_block_s: dict[str, float]
    """The time that each of its blocks adds."""
    small: Reference
    large: Reference
    matmul: MatmulCurves
    attention: Passes
    """Attention as a function of sequence length, for `PROBED_TOKENS` tokens and `PROBED_HEADS`, with the larger head
    size."""
    attention_narrow: Passes
    """Attention with the smaller head size."""
    norm: Passes
    """This curve and the following ones are functions of the number of elements."""
    rope: Passes
    swiglu: Passes
    loss: Curve
    """The loss as a function of the number of logits, including their gradient."""
    add: Curve
    cast: Curve
    optimizer: Curve
    """Time of the gradient norm and the update, as a function of the number of parameters."""
    all_reduce: Curve
    """Collectives as a function of bytes, each measured after the processes have done separate work."""
    all_gather: Curve
    reduce_scatter: Curve
    bare_bytes: float
    """Resident memory of a worker with a nearly empty model."""
    displaced: float
    """Fraction of the time during which a process was ready to run while another had the core."""
    peak_flops: float
    """FLOP/s of a process's best matrix multiplication, on which MFU is based."""

    @property
    def is_disturbed(self) -> bool:
        return self.displaced > BUSY

    @property
    def references(self) -> tuple[Reference, Reference]:
        return self.small, self.large
