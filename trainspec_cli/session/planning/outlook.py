"""The planner's advice for an undisturbed run, based on the run folder and its machine."""

from __future__ import annotations

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.planner.what_if import ALONE, look_ahead
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.plan import Plan, PlannedLayout
from trainspec_cli.reporter.diagnosis.conclude import Outlook
from trainspec_cli.reporter.diagnosis.gather import RunReader
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.tools import known_probe


def outlook_of(run: RunDir, reader: RunReader) -> Outlook:
    """Return the planner's advice for the run's current layout; no advice for a plan from another version."""
    try:
        plan = _in_force(read_plan(run), reader.changed)
    except TrainspecError as error:
        return Outlook(f"{error.problems[0].message}: {ALONE}")
    if plan.device == "cuda":
        # The machine is described by the GPUs that the workers reported.
        gpu_names = (reader.device_name,) * plan.devices_per_node if reader.device_name else ()
        return look_ahead(plan, Machine(hostname="", cpu_cores=1, memory_bytes=0, gpu_names=gpu_names), None)
    machine = detect(look_for_gpus=False)
    return look_ahead(plan, machine, known_probe(plan, machine))


def _in_force(plan: Plan, change: DirectiveEvent | None) -> Plan:
    """Return the plan with the layout of its most recent change."""
    if change is None or isinstance(change.layout, Absent):
        return plan
    size = change.micro_batch_size
    number = change.micro_batches
    return plan.with_layout(
        PlannedLayout(
            step=change.step,
            layout=change.layout,
            micro_batch_size=plan.micro_batch_size if isinstance(size, Absent) else size,
            grad_accum_steps=plan.grad_accum_steps if isinstance(number, Absent) else number,
        )
    )
