"""Run steps of one rank of a plan on the emulated device, without values and without the other ranks.

Tensors have shapes and memory, and exchanges complete immediately, so one process can represent any rank of a world of
any size. Tokens are spread evenly across experts. Blocks run eagerly, with the default kernels."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from trainspec_cli.engine.accelerators import enter
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.files import rng_parts
from trainspec_cli.engine.checkpoint.memory import plan_image
from trainspec_cli.engine.digest import elapsed_s
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.observe.clock import Segments
from trainspec_cli.engine.parallel.expert import SpreadDispatch, even_splits
from trainspec_cli.engine.run.shortage import PassesOutOfMemory
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.trace import fake_batch, fake_world, kernels_of, traced_micro_batches
from trainspec_cli.planner.hardware.cluster import describe_fabric, efficiency_of
from trainspec_cli.planner.pipeline import Action, actions
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.emulated import KIND, Settings
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog, LoggedBlock
from trainspec_cli.wings.emulated.engine.costs import TIME, ChipCosts
from trainspec_cli.wings.emulated.engine.device import MEMORY, pin
from trainspec_cli.wings.emulated.engine.host import HOST_MEMORY, HostSizes
from trainspec_cli.wings.emulated.engine.memory import map_host_memory
from trainspec_cli.wings.emulated.engine.timeline import TIMELINE
from trainspec_cli.wings.emulated.rehearsal import (
    ActionSeconds,
    LiveTensors,
    MemoryMoment,
    PipelineSeconds,
    RankRehearsal,
    RehearsalRequest,
)


@dataclass
class LonelyCosts(ChipCosts):
    """Durations on a rank without its pipeline neighbours. A message takes no time here, because its time depends on
    when the other stage sends it. Only a replay of the full schedule determines that (`planned.py`)."""

    per_stage: int = 1
    """Number of ranks per pipeline stage."""
    message_bytes: int = 0
    """The size of the largest message so far."""

    def exchange_s(self, kind: str, ranks: Sequence[int], nbytes: float) -> float:
        # Messages within a stage belong to ring attention, which all ranks reach at the same time.
        if kind in ("send", "recv") and len({rank // self.per_stage for rank in ranks}) > 1:
            self.message_bytes = max(self.message_bytes, int(nbytes))
            return 0.0
        return super().exchange_s(kind, ranks, nbytes)


def run(request: RehearsalRequest) -> RankRehearsal:
    return rehearse_rank(request.plan, request.rank, request.steps)


def rehearse_rank(plan: Plan, rank: int, steps: int = 2) -> RankRehearsal:
    """Build the rank's part of the plan, run steps, and copy its state to the host as a checkpoint does.

    Call this once, in a separate process with TRAINSPEC_DEVICE=emulated and `sizes=1` in TRAINSPEC_EMULATED, because
    the device stays registered in it. If memory runs out, the result states where that happened."""
    began_s = time.perf_counter()
    device = enter("cpu")
    if MEMORY.has_values:
        raise RuntimeError("a rehearsal needs the emulated device without values: set TRAINSPEC_EMULATED=sizes=1")
    log = MEMORY.log = AllocationLog()
    found = RankRehearsal(rank, 0, 0, 0, 0, 0, MemoryMoment("", ()))
    chip = plan.spec.cluster.accelerator
    if chip is not None:
        fabric = describe_fabric(plan.spec.cluster, None)
        eff = efficiency_of(plan.spec.cluster)
        generation = plan.spec.framework.attention_generation
        costs = LonelyCosts(
            replace(chip, sources=None),
            fabric,
            rank,
            eff=eff,
            attention_generation=generation,
            per_stage=plan.group_size // plan.layout.pp,
        )
        TIME.use(costs, Settings(sizes=1, launch_us=0.0))
    TIMELINE.start(log)
    # Without offload, there are no large host tensors, and the mode would only cost time.
    host_sizes: AbstractContextManager[object] = HostSizes() if plan.offload != "none" else nullcontext()
    with fake_world(rank, plan.group_size, f"cpu:fake,{KIND}:fake"), kernels_of(plan.device), host_sizes:
        found = run_steps(plan, device, log, steps, found)
    found = replace(found, timeline=TIMELINE.result())
    return replace(found, reserved_bytes=MEMORY.peak_reserved_bytes, seconds=time.perf_counter() - began_s)


def run_steps(plan: Plan, device: torch.device, log: AllocationLog, steps: int, found: RankRehearsal) -> RankRehearsal:
    """Build, step and copy as in `rehearse_rank`, on a device whose tensors may have values. Return `found` with the
    results."""
    plan = replace(plan, spec=replace(plan.spec, compile=False), kernels=KernelSpec())
    try:
        state = build_train_state(plan, device, build_mesh(plan.layout, device.type))
        found = replace(found, state_bytes=MEMORY.allocated_bytes, build_peak_bytes=MEMORY.peak_bytes)
        MEMORY.peak_reserved_bytes = MEMORY.reserved_bytes
        found = _make_steps(plan, state, log, steps, found)
    except (torch.OutOfMemoryError, PassesOutOfMemory):
        failed = log.failed
        assert failed is not None, "the log contains the failed allocation"
        last = LiveTensors(failed.shape, failed.origin, 1, failed.nbytes)
        moment = _moment(failed.part, log.live_at_failure)
        return replace(found, peak_bytes=MEMORY.peak_bytes, peak=moment, failed=last)
    live = log.at_peak
    TIMELINE.end()
    if plan.offload != "none":
        found = replace(found, host_bytes=HOST_MEMORY.peak_bytes)
    # A checkpoint's copy to the host.
    log.part = "checkpoint"
    image = plan_image([*state.held.parts(), *rng_parts(found.rank, device)])
    image.fill(pin(map_host_memory(image.bytes)), image.parts)
    return replace(
        found,
        checkpoint_bytes=image.bytes,
        peak_bytes=MEMORY.peak_bytes,
        peak=_moment(live[-1].part, live),
    )


def _make_steps(plan: Plan, state: TrainState, log: AllocationLog, steps: int, found: RankRehearsal) -> RankRehearsal:
    """Run the steps. Return `found` with the virtual time of a step, in seconds."""
    for part in state.parts:
        for module in part.modules():
            if isinstance(module, SpreadDispatch) and not MEMORY.has_values:
                module.read_splits = even_splits
    # Later micro-batches repeat the first ones, except with GPipe, which holds all micro-batches in memory.
    is_pipeline = plan.layout.pp > 1
    holds_all = is_pipeline and plan.layout.pipeline_schedule == "gpipe"
    run_batches = plan.grad_accum_steps if holds_all else max(traced_micro_batches(plan))
    # Without a pipeline, extrapolate the time from a second step with fewer micro-batches. That step runs first,
    # because the last step is the one that is reported. The passes of a pipeline are timed individually.
    fewer = [1] if TIME.costs is not None and not is_pipeline and run_batches < plan.grad_accum_steps else []
    times_s: dict[int, dict[str, float]] = {}
    for count in [*fewer, *[run_batches] * steps]:
        MEMORY.peak_bytes = MEMORY.allocated_bytes
        log.begin()
        log.part = "start of the step"
        with state.device:
            batches = [fake_batch(plan, state) for _ in range(plan.grad_accum_steps)]
        TIMELINE.begin(count)
        state.clock.restart()
        with _noting_parts(state, log, count) as passes:
            outcome = train_step(
                state,
                batches[:count],
                global_tokens=plan.tokens_per_step,
                clip_norm=plan.spec.optim.grad_clip_norm,
            )
        assert outcome is not None, "there is one replica group"
        outcome.on_host()
        passes.append((None, state.clock.cut()))
        times_s[count] = _sum_parts(segments for _, segments in passes)
        del batches, outcome
    costs = TIME.costs
    if costs is None:
        return found
    if isinstance(costs, LonelyCosts) and is_pipeline:
        return replace(found, pipeline=_time_pipeline(passes, run_batches, costs.message_bytes))
    whole = times_s[run_batches]
    if not fewer:
        return replace(found, time_s=whole)
    more = (plan.grad_accum_steps - run_batches) / (run_batches - 1)
    return replace(found, time_s={part: s + more * (s - times_s[1][part]) for part, s in whole.items()})


def _sum_parts(together: Iterable[Segments]) -> dict[str, float]:
    """Return the time of each part, in seconds, summed over several segments of a step."""
    total: Counter[str] = Counter()
    for segments in together:
        total.update(segments.parts_s())
    return dict(total)


def _time_pipeline(
    timed: Sequence[tuple[Action | None, Segments]], micro_batches: int, message_bytes: int
) -> PipelineSeconds:
    """Return the times of all passes, and of the work between and after them."""
    passes = []
    for action, segments in timed:
        if action is not None:
            parts_s = segments.parts_s()
            exposed_s = parts_s.pop("exposed_comm")
            passes.append(ActionSeconds(*action, sum(parts_s.values()), exposed_s))
    _, last = timed[-1]
    return PipelineSeconds(
        tuple(passes),
        micro_batches,
        rest_s=_sum_parts(segments for action, segments in timed if action is None),
        after_agreement_s=elapsed_s(last.agreed[0], last.end),
        message_bytes=message_bytes,
    )


@contextmanager
def _noting_parts(
    state: TrainState, log: AllocationLog, micro_batches: int
) -> Iterator[list[tuple[Action | None, Segments]]]:
    """Tell the log which part of the step is running, and yield a list of the passes with their time marks. None stands
    for the work between two passes. The passes are in schedule order."""
    clock = state.clock
    time_part = clock.part
    passes = iter(actions(state.mesh.layout, micro_batches)[state.mesh.rank("pp")])
    timed: list[tuple[Action | None, Segments]] = []

    @contextmanager
    def part(name: str) -> Iterator[None]:
        outside = log.part
        log.part = name
        action = None
        if name in ("forward", "backward"):
            action = next(passes)
            log.part = f"{action.kind.replace('_', ' ')} of micro-batch {action.micro_batch}, stage {action.stage}"
            timed.append((None, clock.cut()))
        try:
            with time_part(name):
                yield
        finally:
            log.part = outside
            if action is not None:
                timed.append((action, clock.cut()))

    clock.part = part  # type: ignore[method-assign]
    try:
        yield timed
    finally:
        clock.part = time_part  # type: ignore[method-assign]


def _moment(part: str, live: list[LoggedBlock]) -> MemoryMoment:
    """Group memory blocks by shape and origin."""
    numbers: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for block in live:
        key = (block.shape, block.origin)
        numbers[key] += 1
        sizes[key] += block.nbytes
    return MemoryMoment(part, tuple(LiveTensors(*key, numbers[key], size) for key, size in sizes.most_common()))
