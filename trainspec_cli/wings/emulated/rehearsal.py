"""Rehearse ranks of a plan: run the engine's steps on the emulated device, in one process per rank, without the rank's
peers.

This module does not need torch; `engine/rehearse.py` runs in the processes.
"""

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
    """A group of equal tensors that are in memory at the same time."""

    shape: str
    """Shape and format."""
    origin: str
    """The line of the engine, or the function of FSDP2, that allocated them."""
    number: int
    bytes: int
    """Their total size in bytes, as counted by the allocator."""


@dataclass(frozen=True)
class MemoryMoment:
    """The content of the memory at a moment."""

    part: str
    """The part of the step, such as `backward of micro-batch 3, stage 0`."""
    largest: tuple[LiveTensors, ...]
    """Largest first."""


@dataclass(frozen=True)
class ActionSeconds:
    """The virtual time of a pass of one micro-batch through one stage, without waiting for its input."""

    kind: Kind
    stage: int
    micro_batch: int
    compute_s: float
    exposed_s: float
    """Time of exchanges inside the stage during which it does not compute."""


@dataclass(frozen=True)
class PipelineSeconds:
    """The virtual time of a step of a pipeline rank, without messages between stages."""

    actions: tuple[ActionSeconds, ...]
    """Passes in the order of the schedule. A step with many micro-batches is rehearsed with fewer."""
    micro_batches: int
    """Number of micro-batches in the rehearsed step."""
    rest_s: dict[str, float]
    """The other parts of the step: reducing gradients, agreeing on the norm, and the optimizer."""
    after_agreement_s: float
    """The part of `rest_s` between the agreement, which all ranks reach together, and the first pass of the next
    step."""
    message_bytes: int
    """Size in bytes of a message to another stage."""


@dataclass(frozen=True)
class RankRehearsal:
    """The memory used by a rank's steps, in bytes as counted by the allocator, and the time of these steps."""

    rank: int
    state_bytes: int
    """Size of parameters, buffers and optimizer state before the first step."""
    build_peak_bytes: int
    """Peak memory while the model is built."""
    peak_bytes: int
    """Peak memory in the last step."""
    reserved_bytes: int
    """Maximum memory that the allocator holds during the steps, including memory that only the same stream can
    reuse."""
    checkpoint_bytes: int
    """Size of the data that a checkpoint copies to the host, if this rank writes everything that it holds."""
    peak: MemoryMoment
    time_s: dict[str, float] = field(default_factory=dict)
    """Virtual time of a step in seconds by part, with eager blocks. Empty if the chip is unknown, for a pipeline (see
    `pipeline`), and if memory ran out."""
    pipeline: PipelineSeconds | None = None
    """None if there is no pipeline, if the chip is unknown, or if memory ran out."""
    host_bytes: int = 0
    """The most host memory that offloaded parameters, gradients and optimizer state use; page-locked tensors are
    rounded up to a power of two."""
    failed: LiveTensors | None = None
    """The tensor that did not fit. In this case, `peak` is the moment of the failure."""
    seconds: float = 0.0
    """Duration of the rehearsal."""
    timeline: Timeline | None = None
    """The last step, or the part of it before memory ran out; None without virtual time."""


@dataclass(frozen=True)
class FaultCost:
    """What a fault costs, compared with the same run without it."""

    fault: str
    wall_s: float | None
    """Delay of the run's end in seconds; None if the fault ends the run."""
    lost_steps: float
    """Number of steps that are repeated."""
    pause_s: float
    """Seconds from the fault until the first new step begins; 0 if the run continues."""
    device_hours: float
    """The devices' time for `wall_s`, or for the lost steps of a run that ends."""
    usd: float | None
    """None if no price is known."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """`wall_s` by cause, as in the plan's goodput; empty for a slow rank or link."""


REHEARSE = Tool(
    "rehearse",
    RehearsalRequest,
    RankRehearsal,
    "the rehearsal",
    "rehearsal_failed",
    program=("-m", "trainspec_cli.wings.emulated.engine"),
)


def distinct(plan: Plan) -> list[int]:
    """Return one rank of each pipeline stage, because the other ranks of a stage hold equal parts. Along cp it is the
    last rank, whose queries attend to all parts of the keys."""
    layout = plan.layout
    per_stage = plan.group_size // layout.pp
    along_cp = (layout.cp - 1) * layout.tp
    return [stage * per_stage + along_cp for stage in range(layout.pp)]


def stage_of(plan: Plan, rank: int) -> int:
    """Return the pipeline rank of a rank of a replica group."""
    return rank * plan.layout.pp // plan.group_size


def rehearse(
    plan: Plan, rank: int, steps: int, capacity_bytes: float, requests: StopRequests | None = None
) -> RankRehearsal:
    """Rehearse a rank on a device whose allocator has this capacity. `requests`: requests to stop. Raises MachineError
    and Interrupted."""
    settings = f"sizes=1,memory_gib={capacity_bytes / GIB!r}"
    where = one_process({DEVICE: KIND, EMULATED: settings, "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"})
    return run_tool(REHEARSE, RehearsalRequest(plan, rank, steps), where, requests=requests)


def read_ranks(text: str, plan: Plan, kinds: Sequence[int]) -> list[int]:
    """Return the ranks named in `text`: `ends`, `distinct`, `all`, or numbers such as `0,8`. Raises RecipeError.

    `kinds`: for each pipeline rank, the first rank whose stages do the same work. `ends` contains a rank of the first
    stage, of the last stage and of each other kind, because among equal stages none needs more memory than the first,
    and the time of a step requires one rank of each kind.
    """
    layout = plan.layout
    each = distinct(plan)
    if text == "ends":
        return sorted({each[0], each[-1], *(each[kind] for kind in kinds)})
    if text == "distinct":
        return each
    if text == "all":
        return [rank - (layout.cp - 1 - place) * layout.tp for rank in each for place in range(layout.cp)]
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) < plan.group_size for number in numbers):
        message = f"--ranks {text} does not name ranks of this plan"
        hint = f"ends, distinct, all, or numbers from 0 to {plan.group_size - 1}, such as 0,8"
        raise RecipeError(Problem("unknown_value", message, "--ranks", hint))
    return sorted({int(number) for number in numbers})


def equal_ranks(plan: Plan) -> int:
    """Return the number of ranks that do the same work as a given rank: those with the same pipeline stages and part of
    the sequences, in all replica groups."""
    return plan.world_size // (plan.layout.pp * plan.layout.cp)
