"""Before the workers start: what the run will take on this machine, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from trainspec_cli.errors import MachineError, PlanError, Problem
from trainspec_cli.launch.measuring import DISTURBED_HOLDS_S, probe_machine, probe_path, read_probe
from trainspec_cli.planner.hardware.device import device_limit_bytes, is_known, predict_device
from trainspec_cli.planner.local import is_predictable, predict_local
from trainspec_cli.planner.search.fitting import Predict, suggest
from trainspec_cli.report.text import describe_prediction
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.local import LocalPrediction
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.probe import MachineProbe
from trainspec_cli.units import format_bytes


@dataclass(frozen=True)
class Oracle:
    """What a prediction for this machine is made with."""

    predict: Predict
    limit_bytes: float
    """What one process may take."""
    limit_words: str


def predict(plan: Plan, machine: Machine, console: Console, *, force: bool, may_probe: bool = True) -> Plan:
    """The plan with its prediction, where one can be made. Raises PlanError where it does not fit, unless forced.

    Without `may_probe` nothing is started: a machine that was never probed gives no prediction, and this says so.
    """
    oracle = _oracle(plan, machine, console, may_probe=may_probe)
    if oracle is None:
        return plan
    prediction = oracle.predict(plan.as_one_group)
    _say(console, describe_prediction(prediction, plan.tokens_per_step))
    if prediction.needed_bytes > oracle.limit_bytes:
        problem = _does_not_fit(plan, prediction, oracle)
        if not force:
            raise PlanError(problem)
        _say(console, f"{problem.message}; forced")
    return replace(plan, prediction=prediction)


def _oracle(plan: Plan, machine: Machine, console: Console, *, may_probe: bool) -> Oracle | None:
    plan = plan.as_one_group
    if is_known(plan, machine):
        limit_bytes = device_limit_bytes(plan, machine)
        words = f"a GPU can give {format_bytes(limit_bytes)}"
        return Oracle(lambda other: predict_device(other, machine), limit_bytes, words)
    if not is_predictable(plan):
        if plan.device == "cuda" and machine.gpu_names:
            _say(console, f"no prediction: the catalogue has no accelerator like {machine.gpu_names[0]}")
        return None
    probe = _probe(plan, machine, console) if may_probe else _known_probe(plan, machine, console)
    if probe is None:
        return None
    words = f"this machine has {format_bytes(machine.memory_bytes)}"
    return Oracle(lambda other: predict_local(other, probe), machine.memory_bytes / plan.devices_per_node, words)


def _probe(plan: Plan, machine: Machine, console: Console) -> MachineProbe | None:
    """None where it failed: the launch goes on without a prediction, and says so."""
    try:
        probe = probe_machine(plan, machine, lambda: _say(console, "probing this machine, once"))
    except MachineError as error:
        _say(console, f"{error}\n\nso this run starts without a prediction")
        return None
    if probe.is_disturbed:
        taken = f"other programs kept the probe from running for {probe.displaced:.0%} of its time"
        later = f"a launch {DISTURBED_HOLDS_S / 60:.0f} minutes after it probes again"
        _say(console, f"{taken}: the prediction is for such a load, and {later}")
    return probe


def _known_probe(plan: Plan, machine: Machine, console: Console) -> MachineProbe | None:
    probe = read_probe(probe_path(plan, machine))
    if probe is None:
        _say(console, "no prediction: this machine was not probed yet; the first launch does that, in some seconds")
    return probe


def _does_not_fit(plan: Plan, prediction: LocalPrediction, oracle: Oracle) -> Problem:
    change = suggest(plan, oracle.predict, oracle.limit_bytes)
    causes = prediction.memory | prediction.beside
    most = max(causes, key=lambda cause: causes[cause])
    message = (
        f"the plan does not fit: {plan.devices_per_node} x {format_bytes(prediction.needed_bytes)} are needed, "
        f"{oracle.limit_words} (most goes to {most}, {format_bytes(causes[most])} a process)"
    )
    fitting = f"this would fit: {change}" if change else "a smaller model or a shorter data.seq_len would fit"
    return Problem("does_not_fit", message, hint=f"{fitting}; --force launches all the same")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
