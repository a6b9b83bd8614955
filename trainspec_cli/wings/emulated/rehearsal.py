"""Rehearse ranks of a plan: run the engine's steps on the emulated device, with one process per rank and without the
rank's peers.

This module does not need torch, unlike `engine/rehearse.py`, which runs in the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainspec_cli.core.environment_names import DEVICE, EMULATED
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.pipeline import Kind
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.tools import Tool, one_process, run_tool
from trainspec_cli.wings.emulated import KIND
from trainspec_cli.wings.emulated.timeline import Timeline


@dataclass(frozen=True)
class RehearsalRequest:
    plan: Plan
    rank: int
    steps: int


@dataclass(frozen=True)
class LiveTensors:
    """A group of identical tensors that are in memory at the same time."""

    shape: str
    """Shape and number format of the tensors."""
    origin: str
    """The engine line, or the function of FSDP2, that allocated the tensors."""
    number: int
    bytes: int
    """Total size of the tensors in bytes, as counted by the allocator."""


@dataclass(frozen=True)
class MemoryMoment:
    """The content of the memory at one point in time."""

    part: str
    """The part of the step, such as `backward of micro-batch 3, stage 0`."""
    largest: tuple[LiveTensors, ...]
    """Groups of tensors, largest first."""


@dataclass(frozen=True)
class ActionSeconds:
    """The virtual time of one micro-batch's pass through a stage, without waiting for its input."""

    kind: Kind
    stage: int
    micro_batch: int
    compute_s: float
    exposed_s: float
    """Exposed communication inside the stage: the time of exchanges without concurrent computation."""


@dataclass(frozen=True)
class PipelineSeconds:
    """The virtual time of a pipeline rank's step, without messages between stages."""

    actions: tuple[ActionSeconds, ...]
    """Passes in schedule order. A step with many micro-batches is rehearsed with fewer."""
    micro_batches: int
    """Number of micro-batches in the rehearsed step."""
    rest_s: dict[str, float]
    """Times of the other parts of the step: reducing gradients, agreeing on the norm, and the optimizer."""
    after_agreement_s: float
    """The time in `rest_s` from the agreement on the norm, which all ranks reach together, to the first pass of the
    next step."""
    message_bytes: int
    """Size in bytes of a message to another stage."""


@dataclass(frozen=True)
class RankRehearsal:
    """A rank's memory in bytes, as counted by the allocator, and the time of its steps."""

    rank: int
    state_bytes: int
    """Size of parameters, buffers and optimizer state before the first step."""
    build_peak_bytes: int
    """Peak memory while the model is built."""
    peak_bytes: int
    """Peak memory in the last step."""
    reserved_bytes: int
    """Maximum memory that the allocator holds during the steps, including memory that only one stream can reuse."""
    checkpoint_bytes: int
    """Size of the data that a checkpoint copies to the host if this rank writes all of its state."""
    peak: MemoryMoment
    time_s: dict[str, float] = field(default_factory=dict)
    """Virtual step time in seconds by part, with eager blocks. Empty if the chip is unknown, for a pipeline (see
    `pipeline`), and if memory ran out."""
    pipeline: PipelineSeconds | None = None
    """The times of a pipeline rank. None if there is no pipeline, if the chip is unknown, or if memory ran out."""
    host_bytes: int = 0
    """Peak host memory of offloaded parameters, gradients and optimizer state. Page-locked tensors are rounded up to a
    power of two."""
    failed: LiveTensors | None = None
    """The tensor that did not fit, if memory ran out. `peak` is then the moment of the failure."""
    seconds: float = 0.0
    """Real time that the rehearsal took, in seconds."""
    timeline: Timeline | None = None
    """The work done in the last step, or until memory ran out; None if there is no virtual time."""


@dataclass(frozen=True)
class FaultCost:
    """The costs of a fault, compared with the same run without the fault."""

    fault: str
    wall_s: float | None
    """Delay of the end of the run, in seconds; None if the fault ends the run."""
    lost_steps: float
    """Number of steps that the run must repeat."""
    pause_s: float
    """Seconds from the fault until the first new step starts; 0 if the run continues."""
    device_hours: float
    """Device hours spent during `wall_s` or, for a run that ends, on the lost steps."""
    usd: float | None
    """Cost in US dollars; None if no price is known."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """`wall_s` by cause, as in the plan's goodput. Empty for a slow rank or link."""


REHEARSE = Tool(
    "rehearse",
    RehearsalRequest,
    RankRehearsal,
    "the rehearsal",
    "rehearsal_failed",
    program=("-m", "trainspec_cli.wings.emulated.engine"),
)


def distinct(plan: Plan) -> list[int]:
    """Return one rank of each pipeline stage, because the other ranks of a stage hold equal parts. Along cp, the first
    rank needs the most memory (`ring` in `planner/memory/engine/blocks.py`)."""
    per_stage = plan.group_size // plan.layout.pp
    return [stage * per_stage for stage in range(plan.layout.pp)]


def stage_of(plan: Plan, rank: int) -> int:
    """Return the pipeline rank that a rank of a replica group belongs to."""
    return rank * plan.layout.pp // plan.group_size


def rehearse(
    plan: Plan, rank: int, steps: int, capacity_bytes: float, requests: StopRequests | None = None
) -> RankRehearsal:
    """Rehearse a rank on a device whose allocator has this capacity. `requests` may request a stop. Raises MachineError
    and Interrupted."""
    settings = f"sizes=1,memory_gib={capacity_bytes / GIB!r}"
    where = one_process({DEVICE: KIND, EMULATED: settings, "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"})
    return run_tool(REHEARSE, RehearsalRequest(plan, rank, steps), where, requests=requests)


def read_ranks(text: str, plan: Plan, kinds: Sequence[int]) -> list[int]:
    """Return the ranks specified in `text`: `ends`, `distinct`, `all`, or numbers such as `0,8`. Raises RecipeError.

    `kinds`: for each pipeline rank, the first rank whose stages do the same work. `ends` contains one rank each of the
    first stage, the last stage and every other kind of stage. Among identical stages, the first one needs the most
    memory, and computing the step time requires one rank of every kind."""
    layout = plan.layout
    each = distinct(plan)
    if text == "ends":
        return sorted({each[0], each[-1], *(each[kind] for kind in kinds)})
    if text == "distinct":
        return each
    if text == "all":
        return [rank + place * layout.tp for rank in each for place in range(layout.cp)]
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) < plan.group_size for number in numbers):
        message = f"--ranks {text} does not name ranks of this plan"
        hint = f"ends, distinct, all, or numbers from 0 to {plan.group_size - 1}, such as 0,8"
        raise RecipeError(Problem("unknown_value", message, "--ranks", hint))
    return sorted({int(number) for number in numbers})


def equal_ranks(plan: Plan) -> int:
    """Return the number of ranks that do the same work as this rank. In all replica groups, these are the ranks with
    the same pipeline stages and the same part of the sequences."""
    return plan.world_size // (plan.layout.pp * plan.layout.cp)
