"""Predict a run's time and memory on this machine before the workers start, and decide whether the run fits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trainspec_cli.balance.batch.division import largest_that_fits
from trainspec_cli.balance.decisions.balance import largest_stage
from trainspec_cli.core import environment_names
from trainspec_cli.core.errors import Interrupted, MachineError, PlanError, Problem
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.planner.calibration import calibrated
from trainspec_cli.planner.hardware.cluster import chip_of
from trainspec_cli.planner.this_machine import (
    Predict,
    device_limit_bytes,
    is_known,
    is_predictable,
    least_memory,
    moving_bytes,
    predict_device,
    predict_local,
    suggest,
)
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan, PlannedLayout
from trainspec_cli.recipe.results.tables import MemorySetting
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.recipe.rules.check import check, check_engine
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.text import describe_prediction
from trainspec_cli.run.memory_limits import read_limits
from trainspec_cli.run.recovery.memory import build_ladder, with_reliefs, with_setting
from trainspec_cli.run.tools import DISTURBED_HOLDS_S, known_probe, probe_machine
from trainspec_cli.session.recipe.load import describe_profile, find_profile

PROBING = (
    "measuring this machine, once per version: short benchmarks of matmuls, memory and exchanges, so that "
    "later launches can be predicted (Ctrl-C skips this)"
)
UNMEASURED = "this machine has not been measured yet"


@dataclass(frozen=True)
class Predictor:
    """The prediction for a plan on this machine, and its memory limit."""

    predict: Predict
    limit_bytes: float
    """Memory limit of one process."""
    limit_text: str
    knows: Callable[[Plan], bool] = lambda _: True
    """Returns whether the plan with another memory setting can be predicted."""
    is_measured: bool = True
    """False if the machine has not been probed; then no time is predicted, and the predicted memory covers only the
    tensors."""


def predict(plan: Plan, machine: Machine, console: PrintableConsole, *, force: bool) -> Plan:
    """Return the plan with its prediction, if one is possible. Raises PlanError if the plan does not fit, unless
    forced.

    This starts no processes, because a machine without a probe is measured after a run (`probe_after_run`)."""
    for note in chip_of(machine)[1] if plan.spec.cluster.device != "cpu" else ():
        console.report(note)
    if plan.comm.reason:
        console.report(f"gradients are exchanged in {plan.comm.describe()}: {plan.comm.reason}")
    if plan.device == "cpu" and plan.compute == "bf16" and not machine.bf16:
        console.report("this processor has no bf16 instructions, so bf16 is many times slower; set precision=fp32")
    predictor = _predictor(plan, machine, console)
    is_measured = predictor is not None and predictor.is_measured
    # Take the peak FLOP/s from this machine's probe, so that workers need not measure it at every start. The plan stays
    # unchanged without a probe, and on several nodes, which may differ.
    if not (plan.peak_flops is not None or plan.device != "cpu" or plan.num_nodes > 1):
        probe = known_probe(plan.as_one_group, machine)
        if probe is not None:
            plan = replace(plan, peak_flops=probe.peak_flops, peak_source=f"best {plan.compute} matmul in the probe")
    plan = replace(plan, memory_ladder=_memory_ladder(plan, predictor if is_measured else None))
    # The ladder of memory settings is built even without a prediction, because the run may then try each setting in
    # turn.
    if predictor is None:
        return replace(plan, prediction=None, largest_stage_layers=None)
    prediction = predictor.predict(plan.as_one_group)
    if is_measured:
        console.report(describe_prediction(prediction, plan.tokens_per_step))
    else:
        later = f" ({environment_names.PROBE}=off)" if _may_not_probe() else "; a launch measures it after its run"
        tensors = f"the run's tensors take {format_bytes(prediction.needed_bytes)} per process"
        console.report(f"{UNMEASURED}{later}: {tensors}, and its time cannot be predicted")
    if prediction.needed_bytes > predictor.limit_bytes:
        change = suggest(plan, predictor.predict, predictor.limit_bytes)
        causes = prediction.memory | prediction.beside
        most = max(causes, key=lambda cause: causes[cause])
        message = (
            f"the plan does not fit: {plan.devices_per_node} x {format_bytes(prediction.needed_bytes)} are needed, "
            f"{predictor.limit_text} (mostly for {most}: {format_bytes(causes[most])} per process)"
        )
        fitting = f"this would fit: {change}" if change else "a smaller model or a shorter data.seq_len would fit"
        problem = Problem("does_not_fit", message, hint=f"{fitting}; --force launches anyway")
        if not force:
            raise PlanError(problem)
        console.report(f"{problem.message}; forced")
    if not is_measured:
        return replace(plan, prediction=None, largest_stage_layers=None)
    return replace(
        plan,
        prediction=prediction,
        largest_micro_batch_size=_smaller(plan.largest_micro_batch_size, _largest_micro_batch(plan, predictor)),
        largest_stage_layers=_largest_stage(plan, predictor),
        changes=tuple(_check_changes(plan, predictor, prediction, console, force=force)),
    )


def _check_changes(
    plan: Plan, predictor: Predictor, before: LocalPrediction, console: PrintableConsole, *, force: bool
) -> Iterator[PlannedLayout]:
    """Return the scheduled layout changes, each with its memory limits. Raises PlanError if a layout, or the change to
    it, does not fit, unless forced."""
    for place, change in enumerate(plan.changes):
        other = plan.with_layout(change)
        if plan.device == "cpu" and not is_predictable(other):
            console.report(f"no prediction for the layout from step {change.step} on, {change.layout.describe()}")
            yield change
            continue
        after = predictor.predict(other)
        needed_bytes, what = max(
            (after.needed_bytes, "the layout"), (moving_bytes(before, after), "the change to the layout")
        )
        if needed_bytes > predictor.limit_bytes:
            layout = f"from step {change.step} on, {change.layout.describe()}"
            message = f"{what} {layout}, takes {format_bytes(needed_bytes)} per process; {predictor.limit_text}"
            if not force:
                hint = "choose another layout for that step, or remove the change; --force launches anyway"
                raise PlanError(Problem("does_not_fit", message, f"scheduler.changes.{place}", hint))
            console.report(f"{message}; forced")
        yield replace(
            change,
            largest_micro_batch_size=_smaller(change.largest_micro_batch_size, _largest_micro_batch(other, predictor)),
            largest_stage_layers=_largest_stage(other, predictor),
        )
        before = after


def with_known_limits(plan: Plan, machine: Machine, console: PrintableConsole) -> Plan:
    """Return the plan with the settings that its earlier runs needed after running out of memory, and report these
    settings. With `scheduler=off`, the plan stays unchanged."""
    if plan.spec.scheduler.mode == "off":
        return plan
    changed = with_reliefs(plan, read_limits(plan, machine).reliefs)
    if changed.memory_setting != plan.memory_setting:
        before = plan.memory_setting.describe()
        now = changed.memory_setting.describe(plan.memory_setting)
        forget = "to forget this: trainspec runs --clear-limits"
        console.report(f"an earlier run with {before} ran out of memory here: this run starts with {now} ({forget})")
    return replace(changed, changes=tuple(_known_change(plan, change, machine) for change in plan.changes))


def _known_change(plan: Plan, change: PlannedLayout, machine: Machine) -> PlannedLayout:
    """Return a scheduled layout change with the micro-batch size that fitted in earlier runs with its layout."""
    other = plan.with_layout(change)
    known = with_reliefs(other, read_limits(other, machine).reliefs)
    return replace(
        change,
        micro_batch_size=known.micro_batch_size,
        grad_accum_steps=known.grad_accum_steps,
        largest_micro_batch_size=known.largest_micro_batch_size,
    )


def _smaller(known: int | None, predicted: int | None) -> int | None:
    """Return the smaller of the limit from earlier runs and the predicted one; None if neither is known."""
    return min((size for size in (known, predicted) if size is not None), default=None)


def _memory_ladder(plan: Plan, predictor: Predictor | None) -> tuple[MemorySetting, ...]:
    """Return the settings that the run tries in turn if it runs out of memory; none with `scheduler=off`."""
    if plan.spec.scheduler.mode == "off":
        return ()

    def needed_bytes(setting: MemorySetting) -> float | None:
        changed = with_setting(plan, setting).as_one_group
        if predictor is None or not predictor.knows(changed):
            return None
        return predictor.predict(changed).needed_bytes

    ladder = build_ladder(
        plan.memory_setting,
        keeps_micro_batches=plan.spec.model.unit == "samples",
        may_offload=plan.device == "cuda",
        needed_bytes=needed_bytes,
    )
    return tuple(setting for setting in ladder if not _refused(plan, setting))


def _refused(plan: Plan, setting: MemorySetting) -> list[Problem]:
    """Return the problems of a memory setting that differs from the plan's."""
    if setting == plan.memory_setting:
        return []
    changed = replace(plan.spec, recompute=setting.recompute, offload=setting.offload)
    return [*check(changed), *check_engine(changed)]


def _largest_micro_batch(plan: Plan, predictor: Predictor) -> int | None:
    """Return the size, in samples, of the largest micro-batch that fits and that the scheduler may assign to a fast
    rank; None if the scheduler does not change sample shares. `scheduler.max_micro_batch_size: auto` allows up to twice
    the plan's size."""
    scheduler = plan.spec.scheduler
    usual = plan.micro_batch_size
    if scheduler.mode == "off" or plan.layout.data_parallel_size == 1:
        return None
    wanted = scheduler.max_micro_batch_size

    def fits(size: int) -> bool:
        prediction = predictor.predict(replace(plan.as_one_group, micro_batch_size=size))
        return prediction.needed_bytes <= predictor.limit_bytes

    return largest_that_fits(usual, 2 * usual if wanted == AUTO else int(wanted), fits)


def _largest_stage(plan: Plan, predictor: Predictor) -> int | None:
    """Return the maximum number of layers that fit on any pipeline rank; None if the scheduler does not move layers."""
    if plan.spec.scheduler.mode == "off":
        return None

    def fits(layout: Layout) -> bool:
        prediction = predictor.predict(replace(plan.as_one_group, layout=layout))
        return prediction.needed_bytes <= predictor.limit_bytes

    return largest_stage(plan.layout, plan.spec.model.num_layers, plan.spec.scheduler.max_stage_layers, fits)


def _predictor(plan: Plan, machine: Machine, console: PrintableConsole) -> Predictor | None:
    plan = plan.as_one_group
    if is_known(plan, machine):
        limit_bytes = device_limit_bytes(plan, machine)
        limit_text = f"a GPU has {format_bytes(limit_bytes)}"
        return Predictor(lambda other: predict_device(other, machine), limit_bytes, limit_text)
    if not is_predictable(plan):
        if plan.device == "cuda" and machine.gpu_names:
            console.report(f"no prediction: the catalogue has no accelerator like {machine.gpu_names[0]}")
        elif plan.device == "cpu":
            console.report(
                "no prediction: on a CPU, the model must be an eager Llama, fully trained on one node, data-parallel"
            )
        return None
    limit_bytes = machine.memory_bytes / plan.devices_per_node
    limit_text = f"this machine has {format_bytes(machine.memory_bytes)}"
    probe = known_probe(plan, machine)
    if probe is None:
        return Predictor(least_memory, limit_bytes, limit_text, is_predictable, is_measured=False)
    profile, _ = find_profile(plan.spec, machine)
    factors = profile.factors if profile else {}
    if profile:
        console.report(describe_profile(profile))
    return Predictor(
        lambda other: calibrated(predict_local(other, probe), factors), limit_bytes, limit_text, is_predictable
    )


def probe_after_run(plan: Plan, machine: Machine, console: PrintableConsole) -> None:
    """Probe the machine after a run, for later launches, if the plan's prediction needs a probe and no valid one
    exists. Without a probe, a run just has no prediction, so a failure here is reported and has no other effect. A
    terminal shows the elapsed time meanwhile."""
    if not is_predictable(plan.as_one_group) or _may_not_probe():
        return
    sys.stdout.flush()  # so that a program that reads the result from a pipe need not wait for the probe
    try:
        with ExitStack() as shown:

            def begin() -> None:
                console.report("", PROBING)
                if console.is_terminal:
                    columns = (TextColumn("measuring", markup=False), BarColumn(), TimeElapsedColumn())
                    bar = shown.enter_context(Progress(*columns, console=console, transient=True))
                    bar.add_task("", total=None)
                measured.append(True)

            measured: list[bool] = []
            probe = probe_machine(plan.as_one_group, machine, begin)
    except (MachineError, Interrupted) as error:
        console.report(f"{error}\n\nso later launches have no prediction until a run has measured this machine")
        return
    for line in describe_load(probe) if measured else ():
        console.report(line)


def _may_not_probe() -> bool:
    return os.environ.get(environment_names.PROBE) == "off"


def describe_load(probe: MachineProbe | None) -> Iterator[str]:
    """Yield a note if other programs disturbed the probe. It is shown after the measurement and in a dry run, but not
    at every launch, where it would be noise."""
    if probe is not None and probe.is_disturbed:
        taken = f"other programs kept the probe from running for {probe.displaced:.0%} of the time"
        later = f"a run that ends {DISTURBED_HOLDS_S / 3600:.0f} hours later will repeat it"
        yield f"{taken}: predictions assume the same load, and {later}"
