"""Run steps of one rank of a plan on the emulated device, without values and without the other ranks.

Tensors have shapes and memory, and exchanges complete at once, so one process can be any rank of any world. Tokens are
spread evenly over experts. Blocks run eagerly, with the default kernels.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trainspec_cli.engine.accelerators import enter
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.files import rng_parts
from trainspec_cli.engine.checkpoint.memory import plan_image
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.parallel.expert import SpreadDispatch, even_splits
from trainspec_cli.engine.run.shortage import PassesOutOfMemory
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.trace import fake_batch, fake_world, kernels_of, traced_micro_batches
from trainspec_cli.planner.hardware.cluster import describe_fabric, efficiency_of
from trainspec_cli.planner.pipeline import actions
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.emulated import KIND, Settings
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog, LoggedBlock
from trainspec_cli.wings.emulated.engine.costs import TIME, ChipCosts
from trainspec_cli.wings.emulated.engine.device import MEMORY, pin
from trainspec_cli.wings.emulated.engine.memory import map_host_memory
from trainspec_cli.wings.emulated.rehearsal import (
    LiveTensors,
    MemoryMoment,
    RankRehearsal,
    RehearsalRequest,
    refuse,
)


def run(request: RehearsalRequest) -> RankRehearsal:
    return rehearse_rank(request.plan, request.rank, request.steps)


def rehearse_rank(plan: Plan, rank: int, steps: int = 2) -> RankRehearsal:
    """Build the rank's part of the plan, make steps, and copy its state to the host as a checkpoint does.

    Call it once, in a separate process whose TRAINSPEC_DEVICE is `emulated` and TRAINSPEC_EMULATED has `sizes=1`: the
    process keeps the device. If memory runs out, the result says where.
    """
    began_s = time.perf_counter()
    refuse(plan)
    device = enter("cpu")
    if MEMORY.has_values:
        raise RuntimeError("a rehearsal needs the emulated device without values: TRAINSPEC_EMULATED=sizes=1")
    log = MEMORY.log = AllocationLog()
    found = RankRehearsal(rank, 0, 0, 0, 0, 0, MemoryMoment("", ()))
    chip = plan.spec.cluster.accelerator
    if chip is not None and plan.layout.pp == 1:
        fabric = describe_fabric(plan.spec.cluster, None)
        eff = efficiency_of(plan.spec.cluster)
        generation = plan.spec.framework.attention_generation
        costs = ChipCosts(replace(chip, sources=None), fabric, rank, eff=eff, attention_generation=generation)
        TIME.use(costs, Settings(sizes=1, launch_us=0.0))
    with fake_world(rank, plan.world_size, f"cpu:fake,{KIND}:fake"), kernels_of(plan.device):
        found = run_steps(plan, device, log, steps, found)
    return replace(found, reserved_bytes=MEMORY.peak_reserved_bytes, seconds=time.perf_counter() - began_s)


def run_steps(plan: Plan, device: torch.device, log: AllocationLog, steps: int, found: RankRehearsal) -> RankRehearsal:
    """Build, step and copy as `rehearse_rank` does, on a device with or without values, and complete `found`."""
    plan = replace(plan, spec=replace(plan.spec, compile=False), kernels=KernelSpec())
    try:
        state = build_train_state(plan, device, build_mesh(plan.layout, device.type))
        found = replace(found, state_bytes=MEMORY.allocated_bytes, build_peak_bytes=MEMORY.peak_bytes)
        found = replace(found, time_s=_make_steps(plan, state, log, steps))
    except (torch.OutOfMemoryError, PassesOutOfMemory):
        failed = log.failed
        assert failed is not None, "this device raises no other error of this kind"
        last = LiveTensors(failed.shape, failed.origin, 1, failed.nbytes)
        moment = _moment(failed.part, log.live_at_failure)
        return replace(found, peak_bytes=MEMORY.peak_bytes, peak=moment, failed=last)
    live = log.at_peak
    # A checkpoint's copy to the host
    log.part = "checkpoint"
    image = plan_image([*state.held.parts(), *rng_parts(found.rank, device)])
    image.fill(pin(map_host_memory(image.bytes)), image.parts)
    return replace(
        found,
        checkpoint_bytes=image.bytes,
        peak_bytes=MEMORY.peak_bytes,
        peak=_moment(live[-1].part, live),
    )


def _make_steps(plan: Plan, state: TrainState, log: AllocationLog, steps: int) -> dict[str, float]:
    """Make the steps, and return the virtual seconds of one by part; empty without virtual time."""
    for part in state.parts:
        for module in part.modules():
            if isinstance(module, SpreadDispatch) and not MEMORY.has_values:
                module.read_splits = even_splits
    # Later micro-batches repeat what the first ones do, except with GPipe, which holds all of them.
    holds_all = plan.layout.pp > 1 and plan.layout.pipeline_schedule == "gpipe"
    run_batches = plan.grad_accum_steps if holds_all else max(traced_micro_batches(plan))
    # Their time follows from a step with fewer, which is made first so that the last step is the one that counts.
    fewer = [1] if TIME.costs is not None and run_batches < plan.grad_accum_steps else []
    times_s: dict[int, dict[str, float]] = {}
    for count in [*fewer, *[run_batches] * steps]:
        MEMORY.peak_bytes = MEMORY.allocated_bytes
        log.begin()
        log.part = "start of the step"
        with state.device:
            batches = [fake_batch(plan, state) for _ in range(plan.grad_accum_steps)]
        state.clock.restart()
        with _noting_parts(state, log, count):
            outcome = train_step(
                state,
                batches[:count],
                global_tokens=plan.tokens_per_step,
                clip_norm=plan.spec.optim.grad_clip_norm,
            )
        assert outcome is not None, "there is one replica group"
        outcome.on_host()
        times_s[count] = state.clock.cut().parts_s()
        del batches, outcome
    if TIME.costs is None:
        return {}
    whole = times_s[run_batches]
    if not fewer:
        return whole
    more = (plan.grad_accum_steps - run_batches) / (run_batches - 1)
    return {part: seconds + more * (seconds - times_s[1][part]) for part, seconds in whole.items()}


@contextmanager
def _noting_parts(state: TrainState, log: AllocationLog, micro_batches: int) -> Iterator[None]:
    """Name the part of the step in the log; the passes come in the order of the schedule."""
    clock = state.clock
    time_part = clock.part
    passes = iter(actions(state.mesh.layout, micro_batches)[state.mesh.rank("pp")])

    @contextmanager
    def part(name: str) -> Iterator[None]:
        outside = log.part
        log.part = name
        if name in ("forward", "backward"):
            action = next(passes)
            log.part = f"{action.kind.replace('_', ' ')} of micro-batch {action.micro_batch}, stage {action.stage}"
        try:
            with time_part(name):
                yield
        finally:
            log.part = outside

    clock.part = part  # type: ignore[method-assign]
    try:
        yield
    finally:
        clock.part = time_part  # type: ignore[method-assign]


def _moment(part: str, live: list[LoggedBlock]) -> MemoryMoment:
    """Group the blocks by shape and origin."""
    numbers: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for block in live:
        key = (block.shape, block.origin)
        numbers[key] += 1
        sizes[key] += block.nbytes
    return MemoryMoment(part, tuple(LiveTensors(*key, numbers[key], size) for key, size in sizes.most_common()))
