"""The optimizer and its schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, get_args

from trainspec_cli.recipe.field_types import (
    AUTO,
    Auto,
    AutoInt,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Option,
    PositiveFloat,
    PositiveInt,
    Range,
)
from trainspec_cli.recipe.keys.layout import ContextMethod, LayoutSpec, PipelineSchedule, ZeroStage

OptimizerName = Literal["adamw", "sgd", "muon", "adamw8bit"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
KeptState = OptimizerName | float
"""State kept per parameter: the name of one of the engine's optimizers, or the number of bytes for a user-defined
one."""
ON_DEVICE: tuple[OptimizerName, ...] = ("muon", "adamw8bit")
"""Optimizers whose state and update stay on the training device."""
STACKED_VALUES = 2**22
"""muon: small matrices of the same shape are orthogonalised together, up to this number of values per rank."""
BLOCK = 256
"""adamw8bit: number of values in a row that share one scale; the last block of a row may be shorter."""
QUANTISED_SIZE, QUANTISED_ROW = 4096, 64
"""adamw8bit: tensors with fewer values than this, or with shorter rows than this, keep fp32 moments; so do all
vectors."""


@dataclass(frozen=True)
class ScheduleSpec:
    """The schedule of the learning rate, which is a pure function of the step (see `balance/batch/batch.py`)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    """constant; cosine: falls to `final_lr_ratio` along a half cosine; wsd: constant, then falling over the last
    `decay_fraction`."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the rate rises from 0 to its peak; a fraction of the run, `3%` or 0.03, is converted
    to steps."""
    decay_fraction: Fraction = 0.2
    """wsd: the rate falls over this last fraction of the run."""
    final_lr_ratio: Fraction = 0.1
    """The learning rate at the last step, as a fraction of the peak."""

    @property
    def lowest_lr_ratio(self) -> float:
        """Return the rate to which the schedule falls, as a fraction of the peak; 1 if it does not fall."""
        falls = self.kind == "cosine" or (self.kind == "wsd" and self.decay_fraction > 0)
        return self.final_lr_ratio if falls else 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of a decoder or hybrid that are trained differently, or not at all."""

    match: str
    """Pattern of the engine's parameter names, in which `*` also matches dots: `*norm*`, `embed.*`, `blocks.0.*`,
    `*.attention.q.weight`. The first group that matches a name applies. A pattern without a match is an error."""
    decay: NonNegativeFloat | None = None
    """Weight decay; null: that of `optim.weight_decay`."""
    lr_scale: PositiveFloat = 1.0
    """Factor of the learning rate."""
    frozen: bool = False
    """Keep the parameters at their initial values: they have no gradients and no optimizer state."""


@dataclass(frozen=True)
class OptimSpec:
    lr: PositiveFloat
    """The peak learning rate."""
    name: OptimizerName | str = "adamw"
    """The optimizer: adamw (arXiv:1711.05101); sgd; muon, which orthogonalises the momentum of the blocks' matrices and
    trains everything else with adamw at the same rate (arXiv:2502.16982); adamw8bit, with 8-bit moments
    (arXiv:2110.02861). A user-defined optimizer is `FILE.py:NAME`, `package.module:NAME`, or a name registered by a
    package."""
    beta1: Annotated[float, Range(0, 1, includes_high=False)] = 0.9
    """adamw, adamw8bit, and muon's adamw part: decay rate of the first moment, the mean of the gradients."""
    beta2: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    """For the same optimizers: decay rate of the second moment, the mean of the squared gradients."""
    eps: PositiveFloat = 1e-8
    """For the same optimizers: value added to the square root of the second moment."""
    momentum: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    """muon: decay rate of a matrix's momentum (Nesterov)."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay, which applies only to matrices, not to norms and biases, unless a group has its own."""
    groups: tuple[ParameterGroup, ...] = ()
    """Other settings for some parameters, such as `[{match: "*norm*", decay: 0}, {match: "embed.*", frozen: true}]`."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """Maximum norm of all gradients together; if it is exceeded, they are scaled down to it. null: no clipping."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """How the learning rate changes during the run."""
    options: dict[str, Option] = field(default_factory=dict)
    """Additional arguments for the user-defined optimizer, by name."""
    state_bytes: NonNegativeFloat | None = None
    """Bytes of state that the user-defined optimizer keeps per parameter, such as 8 for two moments in fp32. The plan
    uses this number; a run measures it before its first step and rejects any other number."""

    @property
    def is_own(self) -> bool:
        """Return whether the optimizer is user-defined code."""
        return self.name not in OPTIMIZERS

    @property
    def kept_state(self) -> KeptState:
        """Return the state that the optimizer keeps per parameter."""
        return self.name if self.name in OPTIMIZERS else self.state_bytes or 0.0


# The batch of a step, how it changes during the run, and how it is divided into micro-batches.


OnLoss = Literal["keep", "shrink"]
ShrinkRule = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class RampStage:
    """One stage of a ramp."""

    from_tokens: PositiveInt
    """Number of tokens (samples, for images and volumes) after which the stage starts."""
    global_batch_size: PositiveInt
    """Number of samples per step from this stage on."""


@dataclass(frozen=True)
class BatchScheduleSpec:
    """How the batch changes during the run (see `balance/batch/batch.py`).

    Every run starts with `batching.global_batch_size` samples per step, and trains on `train.max_steps` times that
    many. Progress is counted in samples, and a growing batch needs fewer steps for them. The learning rate follows
    `optim.schedule`, with its steps converted to samples at the initial size, times a factor for the batch size."""

    kind: Literal["constant", "ramp", "seesaw", "noise"] = "constant"
    """ramp: `stages`. seesaw: as `optim.schedule` reduces the learning rate, the batch grows by the same factor
    (arXiv:2510.14717). noise: the batch follows the measured gradient noise scale (arXiv:1812.06162)."""
    lr_rule: Literal["optimizer", "sqrt", "linear", "none"] = "optimizer"
    """How the learning rate scales with a larger batch: with the square root (arXiv:2205.10287), in proportion
    (arXiv:1706.02677), or not at all. optimizer: linear for sgd, sqrt for all others."""
    stages: tuple[RampStage, ...] = ()
    """ramp: the sizes after the initial one, in order."""
    growth: Annotated[float, Range(1.05, 16)] = 1.5
    """seesaw, noise: each size is the previous one times this factor, rounded to a multiple of an eighth of the initial
    size."""
    max_global_batch_size: PositiveInt | None = None
    """seesaw, noise: the largest size; null (seesaw only): as large as the learning rate implies."""
    interval_steps: PositiveInt = 100
    """noise: number of steps between decisions, each of which changes the size by at most a factor of `growth`."""
    smoothing_steps: PositiveInt = 100
    """noise: number of steps over which measurements are averaged (exponentially: the newest one has weight 1 /
    smoothing_steps)."""
    noise_fraction: PositiveFloat = 1.0
    """noise: the target size as a fraction of the noise scale. At 1, a sample contributes half as much progress as in a
    very small batch; at 0.25, four fifths as much."""


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: PositiveInt
    """Number of samples per step across all ranks; with a `schedule`, the initial number. Samples are divided as evenly
    as possible among the ranks, whatever their number."""
    micro_batch_size: AutoInt = AUTO
    """Maximum number of samples that a rank processes in one forward and backward pass; gradient accumulation covers
    the rest."""
    on_loss: OnLoss = "keep"
    """What to do while a replica group is down: keep the global batch (the others also process its samples, in more
    micro-batches if needed), or shrink it in proportion to the remaining groups."""
    shrink_lr: ShrinkRule = "linear"
    """How the learning rate scales with a smaller batch: in proportion (arXiv:1706.02677), with the square root
    (arXiv:2205.10287), or not at all."""
    schedule: BatchScheduleSpec = field(default_factory=BatchScheduleSpec)
    """How the batch changes during the run."""

    def sizes_up_to(self, largest: float) -> tuple[int, ...]:
        """Return the sizes among which `seesaw` and `noise` choose: the initial size times powers of `schedule.growth`.

        They are rounded to multiples of an eighth of the initial size (or of a quarter, a half or the full size if it
        is not divisible by 8), so that they divide among ranks nearly as well as the initial size."""
        first = self.global_batch_size
        growth = self.schedule.growth
        part = first // math.gcd(first, 8)
        sizes = [first]
        exact = first * growth
        while exact <= largest and (rounded := round(exact / part) * part) <= largest:
            if rounded > sizes[-1]:
                sizes.append(rounded)
            exact *= growth
        return tuple(sizes)


# The scheduler: whether and how a run adapts to the measured speeds of its ranks.


SchedulerMode = Literal["off", "advise", "auto"]
Changeable = Literal["shares", "layers", "layout", "nodes"]


STAGES = ("pp", "pipeline_schedule", "virtual_stages")
"""The keys that determine how layers are divided into stages."""


@dataclass(frozen=True)
class LayoutChangeSpec:
    """A different layout from a given step on. Keys that are null stay as in `layout`."""

    step: PositiveInt
    """Number of updates made before the change."""
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
    """Number of layers per stage. If the change alters the stages without specifying their layers, layers are divided
    by planned time."""
    context_method: ContextMethod | None = None

    def of(self, layout: LayoutSpec) -> LayoutSpec:
        """Return `layout` with this change applied; changes before it are not included."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "step"}
        named = {name: value for name, value in named.items() if value is not None}
        if any(name in named for name in STAGES):
            layout = replace(layout, stage_layers=None)
        return replace(layout, **named)


@dataclass(frozen=True)
class SchedulerSpec:
    mode: SchedulerMode = "advise"
    """off: nothing is measured. advise: report possible changes, but change nothing. auto: apply them.

    If the run runs out of memory, advise and auto both continue with smaller micro-batches of the same global batch,
    then with recompute and offload; with off, the run ends.

    advise is the default, so that two runs of a recipe are bitwise identical regardless of the speed of their ranks:
    different sample shares would sum the same gradients in a different order."""
    may_change: tuple[Changeable, ...] = ("shares", "layers", "layout", "nodes")
    """What auto changes and what advise reports. shares: samples per rank and per replica group. layers: layers per
    pipeline stage. layout: any axis of the layout. nodes: the nodes that take part."""
    change: Annotated[float, Range(0.01, 1)] = 0.1
    """A rank's speed is treated as changed if several consecutive steps are slower or faster by this fraction and by
    more than the rank's own noise."""
    max_micro_batch_size: AutoInt = AUTO
    """Maximum number of samples in a rank's micro-batch; auto: what memory allows, up to twice the planned number."""
    max_stage_layers: AutoInt = AUTO
    """Maximum number of layers that a pipeline rank may hold when layers move off a slow rank; auto: what the memory
    prediction allows (without a prediction, no layers move)."""
    changes: tuple[LayoutChangeSpec, ...] = ()
    """Layouts that the run switches to during training, in any mode, such as `[{step: 500, pp: 2, dp_shard: 2}]`."""


# Low-rank adapters, trained instead of the weights themselves.


NF4_BLOCK = 64
"""Number of weights in a row that share one scale in 4-bit quantisation."""
NF4_SCALE_BLOCK = 256
"""Number of these scales that share one scale when they are quantised to 8 bits."""
NF4_CHUNK = 2**24
"""Number of weights that are dequantised at a time; this limits the memory that fp32 values take."""
TARGETS = ("q", "k", "v", "out", "gate", "up", "down")
"""The matrices of attention and feed-forward, by their names in the engine."""
EXPERT_TARGETS = ("experts.up", "experts.down")
"""The matrices of routed experts; the first contains those of the gate."""
GROUPED_ROWS = 8
"""Grouped matmuls need rows of whole 16 bytes, so experts' adapters need a rank that is a multiple of this."""


@dataclass(frozen=True)
class LoraSpec:
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: no adapters, so all weights are trained."""
    alpha: PositiveFloat = 16.0
    """The output of the adapters is scaled by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """The matrices of each block that get an adapter: `q k v out gate up down`, and those of routed experts,
    `experts.up` (with the gate) and `experts.down`, one adapter for each expert. These need a rank that is a multiple
    of 8."""
    magnitude: bool = False
    """Also train the length of each row of the adapted matrices (DoRA, arXiv:2402.09353); adapters then change only the
    rows' directions."""
    base: Literal["full", "nf4"] = "full"
    """How the frozen matrices of the blocks are stored: unquantised, or in 4-bit NormalFloat (QLoRA), with 4.127 bits
    per weight and a copy on each data-parallel rank. Embedding, head and norms are never quantised."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def is_quantised(self) -> bool:
        """Return whether the frozen matrices of the blocks are stored in 4 bits."""
        return self.rank > 0 and self.base == "nf4"

    @property
    def expert_targets(self) -> tuple[str, ...]:
        """Return the targets that are matrices of routed experts."""
        return tuple(target for target in self.targets if target in EXPERT_TARGETS)


# The formats in which data-parallel ranks exchange data.


WireFormat = Literal["full", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class CommSpec:
    """Wire formats. full: the format in which the values are computed or summed.

    Values are summed in fp32 in every format, and the rounding error of gradients in integer formats is added to the
    next gradient."""

    gradients: WireFormat | Auto = "full"
    """Gradients, which are summed across data-parallel ranks and replica groups. auto: full, bf16 or int8, whichever is
    predicted to take the least time, including encoding."""
    parameters: WireFormat = "full"
    """Parameters, which are gathered by the ranks of dp_shard. Norms and biases are always exchanged uncompressed."""
    across_nodes: WireFormat | Auto | None = None
    """Gradients in exchanges that cross node boundaries; null: the same as `gradients`."""
    bucket_bytes: NonNegativeInt | None = None
    """On CPUs: the minimum number of gradient bytes per exchange. 0: block by block. null: the run tries a few sizes in
    its first steps, unless `scheduler` is off. Rejected on GPUs, which always exchange block by block."""

    @property
    def fixed(self) -> WireFormats:
        """Return the formats, with `auto` replaced by full."""
        across = self.gradients if self.across_nodes is None else self.across_nodes
        return WireFormats(_fixed(self.gradients), self.parameters, _fixed(across))


def _fixed(chosen: WireFormat | Auto) -> WireFormat:
    return "full" if chosen == AUTO else chosen


@dataclass(frozen=True)
class WireFormats:
    """The formats of a run, without `auto`."""

    gradients: WireFormat = "full"
    parameters: WireFormat = "full"
    across_nodes: WireFormat = "full"
    reason: str = ""
    """The planner's reason for the format, if it chose the format."""

    def describe(self) -> str:
        """Return `int8`, or `full inside nodes and int4 across them`."""
        if self.gradients == self.across_nodes:
            return self.gradients
        return f"{self.gradients} inside nodes and {self.across_nodes} across them"


# Faults to inject into a run: `kill(group=1,step=40); slow(step=60,seconds=0.2,steps=5)`.


FaultKind = Literal[
    "kill",
    "stop",
    "hang",
    "exception",
    "oom",
    "slow",
    "throttle",
    "bitflip",
    "disk_full",
    "lighthouse",
    "move_kill",
    "move_oom",
    "lose_node",
    "lose_link",
    "lose_plane",
]
ONLY_REHEARSED = ("lose_node", "lose_link", "lose_plane")
"""Faults whose cost `trainspec rehearse` predicts, and which no run can inject."""


@dataclass(frozen=True)
class Fault:
    """A fault, which is injected once per run, after `step` updates, during the next gradient exchange."""

    kind: FaultKind
    """kill: SIGKILL. stop: SIGSTOP. hang: the worker waits forever. exception, oom: it raises that error. slow: it
    sleeps.

    oom with `above`: from `step` on, after every start, the backward pass of any micro-batch with more samples runs out
    of memory.

    throttle: forward and backward take `seconds` longer per sample, as on a slower device.

    bitflip: one bit of a parameter changes. disk_full: no file that the worker writes can grow beyond one page.
    lighthouse: the rendezvous server of the replica groups is killed. move_kill, move_oom: like kill and oom, but
    halfway through moving the state to another layout.

    Only for `trainspec rehearse`: lose_node: the node of `rank` is lost. lose_link: for `seconds`, its NIC has no link
    in one plane of the network. lose_plane: no NIC has a link in one plane.
    """
    step: int
    group: int = 0
    rank: int = 0
    """The rank within the replica group."""
    seconds: float = 1.0
    """slow: the delay in seconds per step; throttle: per sample; lose_link, lose_plane: the duration."""
    steps: int = 1
    """slow, throttle, disk_full: number of steps."""
    above: int | None = None
    """oom: the largest number of samples that fits in memory."""

    def lasts_at(self, step: int) -> bool:
        """Return whether a fault that lasts for several steps is still active after update `step`."""
        return self.step <= step < self.step + self.steps


class FaultSyntaxError(ValueError):
    """A fault's text is invalid; the message states what is allowed."""


_ONE = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_NUMBERS = {"step": int, "group": int, "rank": int, "seconds": float, "steps": int, "above": int}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults that are separated by `;`. Raises FaultSyntaxError."""
    return tuple(_parse(part) for part in text.split(";") if part.strip())


def _parse(text: str) -> Fault:
    match = _ONE.fullmatch(text)
    if match is None:
        raise FaultSyntaxError(f"`{text.strip()}` is not a fault; write, for example, kill(group=1,step=40)")
    kind = match.group(1)
    arguments = dict(_arguments(match.group(2)))
    if kind not in get_args(FaultKind):
        raise FaultSyntaxError(f"unknown fault `{kind}` (known: {', '.join(get_args(FaultKind))})")
    if "step" not in arguments:
        raise FaultSyntaxError(f"`{text.strip()}` has no step; write, for example, {kind}(step=40)")
    return Fault(kind, **arguments)  # type: ignore[arg-type]


def _arguments(text: str) -> Iterator[tuple[str, float]]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _NUMBERS:
            names = ", ".join(field.name for field in fields(Fault) if field.name != "kind")
            raise FaultSyntaxError(f"a fault has no argument `{name}`; it has {names}")
        try:
            number = _NUMBERS[name](value)
        except ValueError:
            raise FaultSyntaxError(f"`{part}` needs a number") from None
        if number < 0:
            raise FaultSyntaxError(f"`{part}` is below 0")
        yield name, number
