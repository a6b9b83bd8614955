"""A run of the engine in this process: its plan, what is predicted of it, and steps that are watched from beside."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.core.environment_names import STORE_FILE
from trainspec_cli.engine.accelerators import allocator_count, on_chip, release_unused, synchronise
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.optim.optimizer import set_learning_rate
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.engine.tools.trace import trace_rank
from trainspec_cli.planner.this_machine import is_known, predict_device
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.session.recipe.load import load, plan_on, this_machine

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
STAND_IN = "NVIDIA H200"
"""Whose figures a run on a CPU is held against, to run this through: they say nothing."""
MESHES = Meshes()


def plan_of(arguments: Sequence[str]) -> Plan:
    loaded = load([*arguments])
    return plan_on(loaded, this_machine(loaded.spec))


def predicted(plan: Plan) -> dict[str, Any]:
    """Return what the planner says of the plan on this machine's GPU; of a CPU's run, on the stand-in."""
    machine = this_machine(plan.spec)
    if plan.device == "cpu":
        plan, machine = replace(plan, device="cuda"), replace(machine, gpu_names=(STAND_IN,))
    if not is_known(plan, machine):
        return {"chip": None}
    found = predict_device(plan, machine)
    return {
        "chip": machine.gpu_names[0],
        "peak_memory_bytes": found.peak_memory_bytes,
        "needed_bytes": found.needed_bytes,
        "memory_bytes": found.memory,
        "beside_bytes": found.beside,
        "step_time_s": found.step_time_s,
        "time_s": found.time_s,
    }


def traced(plan: Plan) -> dict[str, Any]:
    """Return what the engine's own step takes under fake tensors; before the process has joined a group."""
    found = trace_rank(plan, 0)
    return {
        "peak_memory_bytes": found.peak_memory_bytes,
        "peak_by_cause": found.peak_by_cause,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "flops": found.flops,
    }


def join(device_type: str) -> torch.device:
    """Join a process group of this process alone."""
    os.environ |= ALONE | {STORE_FILE: str(Path(tempfile.mkdtemp(), "store"))}
    return join_processes(device_type)


@dataclass
class LiveRun:
    """A model with its optimizer on the device."""

    plan: Plan
    device: torch.device

    def __post_init__(self) -> None:
        self.state = build_train_state(self.plan, self.device, MESHES.of(self.plan.layout, self.device.type))
        samples = self.plan.spec.batching.global_batch_size
        own = even_division_of(self.plan).of_rank(0, 0, samples)
        self.batch = drawn_batch(self.plan.spec, self.state, own)
        model = self.plan.spec.model
        self.units = samples if model.unit == "samples" else samples * self.plan.spec.data.seq_len
        set_learning_rate(self.state.optimizer, 1e-4)

    def step(self) -> float:
        """Make a step and return its seconds on the device's clock."""
        self.state.clock.restart()
        train_step(self.state, self.batch, global_tokens=self.units, clip_norm=1.0)
        return sum(self.state.clock.cut().parts_s().values())

    def timed(self, warmup: int, steps: int) -> dict[str, Any]:
        """Return the seconds of steps after the first ones, and the driver's allocations in them."""
        for _ in range(warmup):
            self.step()
        synchronise(self.device)
        before = allocator_count(self.device, "num_device_alloc")
        seconds = [self.step() for _ in range(steps)]
        return {
            "step_s": statistics.median(seconds),
            "steps_s": seconds,
            "device_allocations": allocator_count(self.device, "num_device_alloc") - before,
            "units_a_step": self.units,
        }

    def close(self) -> None:
        """Let go of the model, for the next one."""
        self.state.stages.parts.clear()
        self.state.shares.clear()
        self.state.optimizer.state.clear()
        self.__dict__.clear()
        torch.compiler.reset()
        gc.collect()
        release_all()


def release_all() -> None:
    chip = torch.accelerator.current_accelerator(check_available=True)
    if chip:
        release_unused(chip)


def memory_statistics(device: torch.device) -> dict[str, int]:
    """Return the allocator's own statistics: current and peak, by pool; none on a CPU."""
    found = torch.accelerator.memory_stats(device) if on_chip(device) else {}
    return {key: value for key, value in found.items() if not key.endswith((".allocated", ".freed"))}
