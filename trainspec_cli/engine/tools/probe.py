"""The probe: this machine measured with all processes at once.

Figures are means over the processes, so that what they take from one another counts. Beside the curves of single
operations (`probe_curves`) small decoders are trained as a worker trains them: peers that are waited for, caches that
others have filled, what other programs take of this machine is in these steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainspec_cli.engine.build.assemble import build_model, build_train_state
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.observe.counters import measure_peak
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.trainer import Trainer  # noqa: F401 - a worker's memory holds what it imports
from trainspec_cli.engine.tools import probe_curves as curves
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import PROBED_HEAD_SIZES, MachineProbe, ProbeRequest, Reference
from trainspec_cli.run.folder.event_types.events import PARTS

EMPTY_STEPS = 12
WARMUP_STEPS = 6
"""The first ones allocate; by then the heap hardly grows any more."""
REFERENCE_STEPS, CURVES_BETWEEN = 3, 4
"""Load that comes and goes during the probe falls on the references as it does on a run."""
LONG_STEP_S = 1.0
"""A reference whose step takes longer (in a format that the processor does not have) makes as few as tell something."""


def run(request: ProbeRequest) -> MachineProbe:
    join_processes("cpu")
    return measure(request.compute)


def measure(compute: str) -> MachineProbe:
    """Called by every process together; the same on each."""
    torch.manual_seed(0)
    cpu_before_s, delay_before_s = scheduled_s()
    few, many = (SmallRun(empty_plan(compute, layers)) for layers in (2, 6))
    bare_bytes = float(psutil.Process().memory_info().rss)
    large = SmallRun(large_plan(compute))  # before the small one, so that memory has to grow
    small = SmallRun(small_plan(compute))
    measured = {}
    for index, (name, measure_one) in enumerate(operations(DTYPES[compute]).items()):
        if index % CURVES_BETWEEN == 0:
            for reference in (large, small):
                reference.run(REFERENCE_STEPS)
        measured[name] = measure_one()
    for run in (few, many):
        run.run(EMPTY_STEPS)
    few_s = few.parts_s()
    many_s = many.parts_s()
    block_s = {part: max(0.0, (many_s[part] - few_s[part]) / 4) for part in PARTS}
    cpu_s, delay_s = (now - before for now, before in zip(scheduled_s(), (cpu_before_s, delay_before_s), strict=True))
    probe = MachineProbe(
        processes=dist.get_world_size(),
        compute=compute,
        empty_step_s={part: max(0.0, few_s[part] - 2 * block_s[part]) for part in PARTS},
        empty_block_s=block_s,
        small=small.reference(),
        large=large.reference(),
        bare_bytes=bare_bytes,
        displaced=delay_s / (cpu_s + delay_s) if cpu_s else 0.0,
        peak_flops=measure_peak(torch.device("cpu"), DTYPES[compute]).flops,
        **measured,
    )
    return average(probe)


def operations(dtype: torch.dtype) -> Mapping[str, Callable[[], Any]]:
    """The curves of a `MachineProbe`, by field."""
    small_head, large_head = PROBED_HEAD_SIZES
    return {
        "matmul": partial(curves.measure_matmul, dtype),
        "attention": partial(curves.measure_attention, dtype, large_head),
        "attention_narrow": partial(curves.measure_attention, dtype, small_head),
        "norm": lambda: curves.measure_passes(lambda n: curves.norm_passes(n, dtype)),
        "rope": lambda: curves.measure_passes(lambda n: curves.rope_passes(n, dtype)),
        "swiglu": lambda: curves.measure_passes(lambda n: curves.swiglu_passes(n, dtype)),
        "loss": lambda: curves.measure_curve(curves.ELEMENTS, lambda n: curves.loss_run(n, dtype)),
        "add": lambda: curves.measure_curve(curves.ELEMENTS, lambda n: curves.add_run(n, dtype)),
        "cast": lambda: curves.measure_curve(curves.ELEMENTS, lambda n: curves.cast_run(n, dtype)),
        "optimizer": lambda: curves.measure_curve(curves.ELEMENTS, curves.optimizer_run),
        "all_reduce": partial(curves.measure_collective, curves.all_reduce),
        "all_gather": partial(curves.measure_collective, curves.all_gather),
        "reduce_scatter": partial(curves.measure_collective, curves.reduce_scatter),
    }


def scheduled_s(schedstat: Path = Path("/proc/self/schedstat")) -> tuple[float, float]:
    """Seconds that this thread ran, and that it was ready to and had to wait; zeros where the system does not say."""
    try:
        cpu_ns, delay_ns, _ = schedstat.read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(cpu_ns) / 1e9, int(delay_ns) / 1e9


def average(value: Any) -> Any:
    """The mean over the processes, of every number in nested dataclasses, dictionaries and tuples."""
    if isinstance(value, dict):
        return {name: average(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(average(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type | Plan):
        return type(value)(**{field.name: average(getattr(value, field.name)) for field in fields(value)})
    if not isinstance(value, float):
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# Steps of small decoders


class SmallRun:
    """A decoder that is trained on nothing, a few steps at a time, so that a whole probe's load falls on it."""

    def __init__(self, plan: Plan):
        before_bytes = own_bytes()
        self.plan, self.state = plan, build_train_state(plan, torch.device("cpu"))
        self.tokens = torch.zeros(plan.micro_batch_size, plan.spec.data.seq_len, dtype=torch.long)
        self.steps: list[dict[str, float]] = []
        self.is_long = False
        """Its steps are few."""
        for number in range(WARMUP_STEPS):
            started = time.perf_counter()
            self._step()
            self.is_long = curves.longest_s(time.perf_counter() - started) > LONG_STEP_S
            if self.is_long and number:  # the first one allocates
                break
        self.grown_bytes = own_bytes() - before_bytes

    def run(self, steps: int) -> None:
        """The first step after a pause, which finds no cache filled and its peers elsewhere, is left out; but where
        steps are long, it is the only one."""
        dist.barrier()
        if not self.is_long:
            self._step()
        self.state.clock.restart()
        for _ in range(1 if self.is_long else steps):
            self._step()
            self.steps.append(self.state.clock.cut().parts_s())

    def _step(self) -> None:
        train_step(self.state, [(self.tokens, self.tokens)], global_tokens=self.plan.tokens_per_step, clip_norm=1.0)

    def parts_s(self) -> dict[str, float]:
        """The mean step's parts; the slowest tenth, where something else broke in, is left out."""
        steps = sorted(self.steps, key=lambda parts: sum(parts.values()))
        kept = steps[: max(1, len(steps) * 9 // 10)]
        return {part: sum(step[part] for step in kept) / len(kept) for part in PARTS}

    def reference(self) -> Reference:
        return Reference(self.plan, self.parts_s(), self.grown_bytes)


def own_bytes() -> float:
    """Leave out the libraries' pages, which come and go with the machine's other needs (macOS does not count them)."""
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
