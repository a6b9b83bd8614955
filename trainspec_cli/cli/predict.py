"""Before the workers start: what the run will take on this machine, and whether it fits."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from trainspec_cli.errors import MachineError, PlanError, Problem
from trainspec_cli.launch.probing import probe_machine
from trainspec_cli.planner.local import fits, is_predictable, predict_local, suggest
from trainspec_cli.report.text import describe_prediction
from trainspec_cli.spec.cluster import Machine
from trainspec_cli.spec.local import LocalPrediction
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.probe import MachineProbe
from trainspec_cli.units import format_bytes


def predict(plan: Plan, machine: Machine, console: Console, *, force: bool) -> Plan:
    """The plan with its prediction, where one can be made. Raises PlanError where it does not fit, unless forced."""
    if not is_predictable(plan):
        return plan
    probe = _probe(plan, machine, console)
    if probe is None:
        return plan
    prediction = predict_local(plan, probe)
    _say(console, describe_prediction(prediction, plan.tokens_per_step))
    if not fits(prediction, plan, machine.memory_bytes):
        problem = _does_not_fit(plan, machine, prediction, probe)
        if not force:
            raise PlanError(problem)
        _say(console, f"{problem.message}; forced")
    return replace(plan, prediction=prediction)


def _probe(plan: Plan, machine: Machine, console: Console) -> MachineProbe | None:
    """None where it failed: the launch goes on without a prediction, and says so."""
    try:
        return probe_machine(plan, machine, lambda: _say(console, "probing this machine, once"))
    except MachineError as error:
        _say(console, f"{error}\n\nso this run starts without a prediction")
        return None


def _does_not_fit(plan: Plan, machine: Machine, prediction: LocalPrediction, probe: MachineProbe) -> Problem:
    change = suggest(plan, probe, machine.memory_bytes)
    most = max(prediction.memory, key=lambda cause: prediction.memory[cause])
    message = (
        f"the plan does not fit: {plan.devices_per_node} x {format_bytes(prediction.peak_memory_bytes)} are needed, "
        f"this machine has {format_bytes(machine.memory_bytes)} "
        f"(most goes to {most}, {format_bytes(prediction.memory[most])} a process)"
    )
    fitting = f"this would fit: {change}" if change else "a smaller model or a shorter data.seq_len would fit"
    return Problem("does_not_fit", message, hint=f"{fitting}; --force launches all the same")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
