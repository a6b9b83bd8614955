"""`torchrun -m trainspec_cli.engine.tools.probe bf16|fp32 FOLDER`: measure this machine with all processes at once.

Leaves FOLDER/probe.json, a `MachineProbe`: means over the processes, so that what they take from one another counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.comm.joining import join_processes, leave_processes
from trainspec_cli.engine.run.trainer import Trainer  # noqa: F401 - a worker's memory holds what it imports
from trainspec_cli.engine.tools import probe_curves as curves
from trainspec_cli.engine.tools.probe_steps import SmallRun, empty_plan, large_plan, resident_bytes, small_plan
from trainspec_cli.rundir.event_types import PARTS
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.probe import PROBED_HEAD_SIZES, MachineProbe

EMPTY_STEPS = 12
REFERENCE_STEPS, CURVES_BETWEEN = 3, 4
"""Load that comes and goes during the probe falls on the references as it does on a run."""


def main() -> None:
    compute, folder = sys.argv[1], Path(sys.argv[2])
    join_processes("cpu")
    probe = measure(compute)
    if dist.get_rank() == 0:
        write_json(folder / "probe.json", to_plain(probe))
    dist.barrier()
    leave_processes()


def measure(compute: str) -> MachineProbe:
    """Called by every process together; the same on each."""
    torch.manual_seed(0)
    cpu_before_s, delay_before_s = scheduled_s()
    few, many = (SmallRun(empty_plan(compute, layers)) for layers in (2, 6))
    bare_bytes = resident_bytes()
    large = SmallRun(large_plan(compute), as_worker=True)  # before the small one, so that memory has to grow
    small = SmallRun(small_plan(compute))
    measured = {}
    for index, (name, measure_one) in enumerate(operations(DTYPES[compute]).items()):
        if index % CURVES_BETWEEN == 0:
            for reference in (large, small):
                reference.run(REFERENCE_STEPS)
        measured[name] = measure_one()
    for run in (few, many):
        run.run(EMPTY_STEPS)
    few_s, many_s = few.parts_s(), many.parts_s()
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


if __name__ == "__main__":
    main()
