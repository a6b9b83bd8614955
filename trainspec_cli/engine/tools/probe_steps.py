"""Steps of small decoders, made as a worker makes them: next to nothing in size, and references of a middle one.

What the curves of single operations leave out - peers that are waited for, caches that others have filled, what other
programs take of this machine - is in these.
"""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch
import torch.distributed as dist

from trainspec_cli.engine.build.train_state import DTYPES, build_train_state
from trainspec_cli.engine.models.build import build_model
from trainspec_cli.engine.observe.device import measure_peak
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.rundir.events import PARTS
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.probe import Reference

WARMUP_STEPS = 6
"""The first ones allocate; by then the heap hardly grows any more."""


class SmallRun:
    """A decoder that is trained on nothing, a few steps at a time, so that a whole probe's load falls on it."""

    def __init__(self, plan: Plan, *, as_worker: bool = False):
        """`as_worker`: measure the device's speed before the first step, which leaves a hole in the heap."""
        before_bytes = own_bytes()
        self.plan, self.state = plan, build_train_state(plan, torch.device("cpu"))
        if as_worker:
            measure_peak(self.state.device, DTYPES[plan.compute], seconds=0.0)
        self.tokens = torch.zeros(plan.micro_batch_size, plan.spec.data.seq_len, dtype=torch.long)
        self.steps: list[dict[str, float]] = []
        for _ in range(WARMUP_STEPS):
            self._step()
        self.grown_bytes = own_bytes() - before_bytes

    def run(self, steps: int) -> None:
        """The first step after a pause, which finds no cache filled and its peers elsewhere, is left out."""
        dist.barrier()
        self._step()
        self.state.clock.restart()
        for _ in range(steps):
            self._step()
            self.steps.append(self.state.clock.cut().parts_s())

    def _step(self) -> None:
        train_step(
            self.state,
            [(self.tokens, self.tokens)],
            global_tokens=self.plan.tokens_per_step,
            clip_norm=1.0,
        )

    def parts_s(self) -> dict[str, float]:
        """The mean step's parts; the slowest tenth, where something else broke in, is left out."""
        steps = sorted(self.steps, key=lambda parts: sum(parts.values()))
        kept = steps[: max(1, len(steps) * 9 // 10)]
        return {part: sum(step[part] for step in kept) / len(kept) for part in PARTS}

    def reference(self) -> Reference:
        return Reference(self.plan, self.parts_s(), self.grown_bytes)


def resident_bytes() -> float:
    return float(psutil.Process().memory_info().rss)


def own_bytes() -> float:
    """Without the libraries' pages, which come and go with the machine's other needs (macOS does not tell them)."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def empty_plan(compute: str, layers: int) -> Plan:
    return plan_of(DecoderModel(layers, 16, 2, 1, 8, 16, 64, tied_embeddings=True), 8, 1, compute)


def small_plan(compute: str) -> Plan:
    return plan_of(DecoderModel(2, 128, 2, 1, 64, 352, 2048, tied_embeddings=True), 128, 1, compute)


def large_plan(compute: str) -> Plan:
    return plan_of(DecoderModel(3, 256, 4, 2, 64, 704, 4096, tied_embeddings=True), 256, 4, compute)


def plan_of(model: DecoderModel, seq_len: int, samples: int, compute: str) -> Plan:
    """Replicated over all processes, `samples` a process at once."""
    world_size = dist.get_world_size()
    spec = RunSpec(
        model=model,
        data=DataSpec(seq_len=seq_len, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=samples * world_size),
        train=TrainSection(max_steps=1),
    )
    layout = Layout(dp_replicate=world_size)
    plan = Plan(spec, layout, "cpu", 1, world_size, compute, samples, 1, "none", "none", 0, 0.0)  # type: ignore[arg-type]
    with torch.device("meta"):
        module = build_model(model, seq_len)
    return replace(plan, params=sum(parameter.numel() for parameter in module.parameters()))
