"""Rehearse ranks of a plan: the engine's own steps on the emulated device, a process for each rank, without its peers.

This part needs no torch; `engine/rehearse.py` runs in the processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.core.environment_names import DEVICE, EMULATED
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.tools import Tool, one_process, run_tool
from trainspec_cli.wings.emulated import KIND


@dataclass(frozen=True)
class RehearsalRequest:
    plan: Plan
    rank: int
    steps: int


@dataclass(frozen=True)
class LiveTensors:
    """Equal tensors that are in memory at the same time."""

    shape: str
    """Shape and format."""
    origin: str
    """The line of the engine, or the function of FSDP2, that allocated them."""
    number: int
    bytes: int
    """Their total, as the allocator counts it."""


@dataclass(frozen=True)
class MemoryMoment:
    """What fills the memory at a moment."""

    part: str
    """The part of the step: `backward of micro-batch 3, stage 0`."""
    largest: tuple[LiveTensors, ...]
    """Largest first."""


@dataclass(frozen=True)
class RankRehearsal:
    """The memory of a rank's steps, as the allocator counts it, in bytes, and their time."""

    rank: int
    state_bytes: int
    """Parameters, buffers and optimizer state, before the first step."""
    build_peak_bytes: int
    """The peak while the model is built."""
    peak_bytes: int
    """The peak of the last step."""
    reserved_bytes: int
    """The most that the allocator holds during the steps, including memory that is free for reuse by the same stream
    only."""
    checkpoint_bytes: int
    """What a checkpoint copies to the host, if this rank writes everything that it holds."""
    peak: MemoryMoment
    time_s: dict[str, float] = field(default_factory=dict)
    """Virtual seconds of a step by part, with eager blocks; empty if the chip is unknown, for a pipeline, whose stages
    wait for one another, and if memory ran out."""
    failed: LiveTensors | None = None
    """The tensor that did not fit; `peak` is then the moment of the failure."""
    seconds: float = 0.0
    """Duration of the rehearsal."""


REHEARSE = Tool(
    "rehearse",
    RehearsalRequest,
    RankRehearsal,
    "the rehearsal",
    "rehearsal_failed",
    program=("-m", "trainspec_cli.wings.emulated.engine"),
)


def refuse(plan: Plan) -> None:
    """Raise RecipeError if the device cannot rehearse the plan."""
    if plan.offload != "none":
        message = "the layout keeps its parameters in host memory, which a rehearsal does not emulate"
        raise RecipeError(Problem("unsupported", message, "offload", "rehearse a layout without it: offload=none"))


def ends(plan: Plan) -> list[int]:
    """Return a rank of the first and one of the last pipeline stage, between which no stage needs more memory. Along cp
    it is the last rank, whose queries attend to every part of the keys."""
    ranks = distinct(plan)
    return sorted({ranks[0], ranks[-1]})


def distinct(plan: Plan) -> list[int]:
    """Return a rank of each pipeline stage: the others of a stage hold equal parts."""
    layout = plan.layout
    per_stage = plan.world_size // layout.pp
    along_cp = (layout.cp - 1) * layout.tp
    return [stage * per_stage + along_cp for stage in range(layout.pp)]


def rehearse(plan: Plan, rank: int, steps: int, capacity_bytes: float) -> RankRehearsal:
    """Rehearse a rank on a device whose allocator has this capacity. Raises MachineError, Interrupted."""
    settings = f"sizes=1,memory_gib={capacity_bytes / GIB!r}"
    where = one_process({DEVICE: KIND, EMULATED: settings, "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"})
    return run_tool(REHEARSE, RehearsalRequest(plan, rank, steps), where)


def read_ranks(text: str, plan: Plan) -> list[int]:
    """Return the ranks that `text` names: `ends`, `distinct`, or numbers such as `0,8`. Raises RecipeError."""
    named = {"ends": ends, "distinct": distinct}
    if text in named:
        return named[text](plan)
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) < plan.world_size for number in numbers):
        message = f"--ranks {text} does not name ranks of this plan"
        hint = f"ends, distinct, or numbers from 0 to {plan.world_size - 1}, such as 0,8"
        raise RecipeError(Problem("unknown_value", message, "--ranks", hint))
    return sorted({int(number) for number in numbers})
