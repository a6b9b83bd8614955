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
"""What is kept of each parameter: by the name of an optimizer of the engine, or the bytes of one's own."""
ON_DEVICE: tuple[OptimizerName, ...] = ("muon", "adamw8bit")
"""Optimizers whose state and update stay on the device that trains."""
STACKED_VALUES = 2**22
"""muon: small matrices of one shape are orthogonalised together, as many as hold this number of values."""
BLOCK = 256
"""adamw8bit: values of a row that share a scale; a row ends its last block."""
QUANTISED_SIZE, QUANTISED_ROW = 4096, 64
"""adamw8bit: a tensor with fewer values, or with shorter rows, keeps moments of fp32; so does every vector."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Learning rate over the run, a pure function of the step (see `balance/batch/batch.py`)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    """constant; cosine: down to `final_lr_ratio` by a half cosine; wsd: constant, then falling over the last
    `decay_fraction`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from 0 to its peak; a share of the run, `3%` or 0.03, is turned into steps."""
    decay_fraction: Fraction = 0.2
    """wsd: the last fraction of the run, over which the rate falls."""
    final_lr_ratio: Fraction = 0.1
    """The rate at the last step, as a fraction of the peak."""

    @property
    def lowest_lr_ratio(self) -> float:
        """The rate that the schedule falls to, as a fraction of the peak; 1 where it does not fall."""
        falls = self.kind == "cosine" or (self.kind == "wsd" and self.decay_fraction > 0)
        return self.final_lr_ratio if falls else 1.0


@dataclass(frozen=True)
class OptimSpec:
    lr: PositiveFloat
    """The learning rate at its peak."""
    name: OptimizerName | str = "adamw"
    """The optimizer: adamw (arXiv:1711.05101); sgd; muon, which orthogonalises the momentum of the matrices inside of
    blocks, and trains all else by adamw at the same rate (arXiv:2502.16982); adamw8bit, with moments of 8 bits
    (arXiv:2110.02861). One's own is `FILE.py:NAME`, `package.module:NAME`, or a name that a package registered."""
    beta1: Annotated[float, Range(0, 1, includes_high=False)] = 0.9
    """adamw, adamw8bit, and what muon leaves to adamw: decay of the average of the gradients."""
    beta2: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    """The same optimizers: decay of the average of their squares."""
    eps: PositiveFloat = 1e-8
    """The same optimizers: added to the root of that average."""
    momentum: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    """muon: decay of the average of a matrix's gradients (Nesterov's)."""
    weight_decay: NonNegativeFloat = 0.1
    """Applied only to matrices (not to norms and biases)."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """The norm over all gradients to which larger ones are clipped; null: they are not."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """The course of the learning rate over the run."""
    options: dict[str, Option] = field(default_factory=dict)
    """Further arguments of one's own optimizer, by name."""
    state_bytes: NonNegativeFloat | None = None
    """The bytes of state that one's own optimizer keeps of each parameter: 8 for two averages in fp32. The plan counts
    with them; a run measures them before its first step, and refuses another number."""

    @property
    def is_own(self) -> bool:
        """Return whether the optimizer is the user's own code."""
        return self.name not in OPTIMIZERS

    @property
    def kept_state(self) -> KeptState:
        """Return what says how much state the optimizer keeps of each parameter."""
        return self.name if self.name in OPTIMIZERS else self.state_bytes or 0.0


# The batch of a step, how it changes over the run, and its division into micro-batches.


OnLoss = Literal["keep", "shrink"]
ShrinkRule = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class RampStage:
    """One stage of a ramp."""

    from_tokens: PositiveInt
    """Tokens trained when the stage begins (samples, for images and volumes)."""
    global_batch_size: PositiveInt
    """Samples per step from then on."""


@dataclass(frozen=True)
class BatchScheduleSpec:
    """How the batch changes over the run (see `balance/batch/batch.py`).

    A run begins with `batching.global_batch_size` samples a step and trains `train.max_steps` times as many, whatever
    the schedule: progress is counted in samples, and a batch that grows makes fewer steps of them. The learning rate
    follows `optim.schedule`, whose steps are of the first size, over the samples, times a factor for the batch.
    """

    kind: Literal["constant", "ramp", "seesaw", "noise"] = "constant"
    """ramp: `stages`. seesaw: the batch grows by the factor that `optim.schedule` has taken off the learning rate
    (arXiv:2510.14717). noise: the batch follows the measured gradient noise scale (arXiv:1812.06162)."""
    lr_rule: Literal["optimizer", "sqrt", "linear", "none"] = "optimizer"
    """The factor on the learning rate for a larger batch: its square root (arXiv:2205.10287), in proportion
    (arXiv:1706.02677), or none. optimizer: linear for sgd, sqrt for all others."""
    stages: tuple[RampStage, ...] = ()
    """ramp: the sizes after the first, in their order."""
    growth: Annotated[float, Range(1.05, 16)] = 1.5
    """seesaw, noise: each size is the one before it times this, rounded to an eighth of the first."""
    max_global_batch_size: PositiveInt | None = None
    """seesaw, noise: the largest size; null, which seesaw alone may have: as large as the learning rate asks for."""
    interval_steps: PositiveInt = 100
    """noise: steps between decisions; each changes the size by one `growth` at most."""
    smoothing_steps: PositiveInt = 100
    """noise: steps that the measurements are averaged over (exponentially: the newest weighs 1 / smoothing_steps)."""
    noise_fraction: PositiveFloat = 1.0
    """noise: the size that is aimed at, as a fraction of the noise scale. At 1 a sample is worth half as much as in a
    small batch; at 0.25, four fifths."""


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: PositiveInt
    """Samples per step, over all ranks; with a `schedule`, of the first steps. They are divided as evenly as whole ones
    can be, over any number of ranks."""
    micro_batch_size: AutoInt = AUTO
    """Samples that a rank processes in one forward and backward, at most; the rest is gradient accumulation."""
    on_loss: OnLoss = "keep"
    """While a replica group is away: keep the global batch (the others process its samples too, in more micro-batches
    where they need them), or shrink it in proportion to the groups that are left."""
    shrink_lr: ShrinkRule = "linear"
    """Factor on the learning rate for a smaller batch: in proportion (arXiv:1706.02677), with its square root
    (arXiv:2205.10287), or not at all."""
    schedule: BatchScheduleSpec = field(default_factory=BatchScheduleSpec)
    """How the batch changes over the run."""

    def sizes_up_to(self, largest: float) -> tuple[int, ...]:
        """Return the sizes that `seesaw` and `noise` choose from: powers of `schedule.growth` times the first.

        They are rounded to eighths of the first, or to fourths, halves or wholes where it has no eighths: so they
        divide over ranks nearly as well as the first does.
        """
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


# The scheduler: whether and how a run follows the speeds that its ranks really have.


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


# Low-rank adapters, trained instead of the weights themselves.


NF4_BLOCK = 64
"""Weights of a row that are quantised to 4 bits with one scale."""
NF4_SCALE_BLOCK = 256
"""Such scales that are quantised to 8 bits with one scale of their own."""
NF4_CHUNK = 2**24
"""Weights that are dequantised at a time, which bounds what is held of them in fp32."""
TARGETS = ("q", "k", "v", "out", "gate", "up", "down")
"""The matrices of attention and feed-forward, as the engine names them."""


@dataclass(frozen=True)
class LoraSpec:
    rank: NonNegativeInt = 0
    """0: no adapters, every weight is trained."""
    alpha: PositiveFloat = 16.0
    """The adapters' output is scaled by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """The matrices of each block that get one; routed experts get none."""
    base: Literal["full", "nf4"] = "full"
    """How the frozen matrices of the blocks are kept: in full, or in 4-bit NormalFloat (QLoRA), 4.127 bits a weight, of
    which each data-parallel rank holds a copy; embedding, head and norms stay in full."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def is_quantised(self) -> bool:
        """Return whether the frozen matrices of the blocks are kept in 4 bits."""
        return self.rank > 0 and self.base == "nf4"


# The formats in which data parallelism's exchanges travel between ranks.


WireFormat = Literal["full", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class CommSpec:
    """full: in the format in which they are computed or summed.

    Sums are made in fp32 in every format, and what integers lose of a gradient is added to the next one.
    """

    gradients: WireFormat | Auto = "full"
    """Gradients, as they are summed over data-parallel ranks and replica groups. auto: full, bf16 or int8, whichever is
    predicted to take the least time, encoding counted."""
    parameters: WireFormat = "full"
    """Parameters, as dp_shard's ranks gather them. Norms and biases always travel in full."""
    across_nodes: WireFormat | Auto | None = None
    """Gradients, where the ranks of an exchange lie on several nodes; null: as `gradients`."""
    bucket_bytes: NonNegativeInt | None = None
    """Gradients of a rank that are summed in one exchange, at least, on CPUs (on GPUs each block's are); 0: each
    block's. null: the run tries a few sizes in its first steps, unless `scheduler` is off, and each block's are."""

    @property
    def fixed(self) -> WireFormats:
        """The formats, with `auto` as full."""
        across = self.gradients if self.across_nodes is None else self.across_nodes
        return WireFormats(_fixed(self.gradients), self.parameters, _fixed(across))


def _fixed(chosen: WireFormat | Auto) -> WireFormat:
    return "full" if chosen == AUTO else chosen


@dataclass(frozen=True)
class WireFormats:
    """The formats of a run: no `auto` left."""

    gradients: WireFormat = "full"
    parameters: WireFormat = "full"
    across_nodes: WireFormat = "full"
    reason: str = ""
    """Why, where the planner has chosen."""

    def describe(self) -> str:
        """`int8`, or `full inside nodes and int4 across them`."""
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
]


@dataclass(frozen=True)
class Fault:
    """A fault, injected once in a run after `step` updates, during the gradient exchange of the next."""

    kind: FaultKind
    """kill: SIGKILL. stop: SIGSTOP. hang: the worker waits forever. exception, oom: it raises one. slow: it sleeps.

    oom with `above`: from `step` on, in every start, the backward of a micro-batch of more samples finds no memory.

    throttle: its passes take `seconds` longer for each sample, as on a slower device.

    bitflip: one bit of a parameter changes. disk_full: no file that it writes grows beyond a page. lighthouse: the
    rendezvous server, where the replica groups meet, is killed. move_kill, move_oom: as kill and oom, when half of the
    state has been moved to another layout.
    """
    step: int
    group: int = 0
    rank: int = 0
    """The rank within the replica group."""
    seconds: float = 1.0
    """slow: the delay per step; throttle: per sample."""
    steps: int = 1
    """slow, throttle, disk_full: the number of steps."""
    above: int | None = None
    """oom: the samples that there is memory for."""

    def lasts_at(self, step: int) -> bool:
        """Return whether a fault of several steps goes on after update `step`."""
        return self.step <= step < self.step + self.steps


class FaultSyntaxError(ValueError):
    """The text of a fault is wrong; the message says what is allowed."""


_ONE = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_NUMBERS = {"step": int, "group": int, "rank": int, "seconds": float, "steps": int, "above": int}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults separated by `;`. Raises FaultSyntaxError."""
    return tuple(_parse(part) for part in text.split(";") if part.strip())


def _parse(text: str) -> Fault:
    match = _ONE.fullmatch(text)
    if match is None:
        raise FaultSyntaxError(f"`{text.strip()}` is not a fault; write, for example, kill(group=1,step=40)")
    kind = match.group(1)
    arguments = dict(_arguments(match.group(2)))
    if kind not in get_args(FaultKind):
        raise FaultSyntaxError(f"there is no fault `{kind}`; there are {', '.join(get_args(FaultKind))}")
    if "step" not in arguments:
        raise FaultSyntaxError(f"`{text.strip()}` has no step; write, for example, {kind}(step=40)")
    return Fault(kind, **arguments)  # type: ignore[arg-type]


def _arguments(text: str) -> Iterator[tuple[str, float]]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _NUMBERS:
            names = ", ".join(field.name for field in fields(Fault) if field.name != "kind")
            raise FaultSyntaxError(f"a fault has no `{name}`; it has {names}")
        try:
            number = _NUMBERS[name](value)
        except ValueError:
            raise FaultSyntaxError(f"`{part}` needs a number") from None
        if number < 0:
            raise FaultSyntaxError(f"`{part}` is below 0")
        yield name, number
