"""Split a disturbed run with one replica group where its nodes change: when a node leaves, and when it returns.

What the run does then is decided by `run.recovery.nodes`, as for a real run. Times between the changes are counted in
undisturbed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainspec_cli.balance.disturbance import Disturbance
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery.nodes import NodesDecision, SimulatedSupervisor
from trainspec_cli.run.recovery.reliability import Durations


@dataclass(frozen=True)
class NodePhase:
    """The steps from one change of the nodes to the next."""

    from_step: int
    job: DisturbedJob
    nodes: tuple[int, ...]
    pause_s: float = 0.0
    """Time in seconds without new steps before the first step: lost work, waiting for a node, and the restart."""
    reason: str = ""

    def translate(self, disturbance: Disturbance) -> Disturbance:
        """Return the disturbance of the nodes in use, by their places in the phase. Nobody leaves during a phase."""
        per_node = self.job.devices_per_node
        place_of = {node: place for place, node in enumerate(self.nodes)}
        devices = [
            replace(one, device=place_of[one.device // per_node] * per_node + one.device % per_node)
            for one in disturbance.slow_devices
            if one.device // per_node in place_of
        ]
        nodes = [replace(one, node=place_of[one.node]) for one in disturbance.slow_nodes if one.node in place_of]
        links = [
            one if one.node is None else replace(one, node=place_of[one.node])
            for one in disturbance.narrow_links
            if one.node is None or one.node in place_of
        ]
        return replace(
            disturbance,
            slow_devices=tuple(devices),
            slow_nodes=tuple(nodes),
            narrow_links=tuple(links),
            leaves=(),
        )


@dataclass(frozen=True)
class NodeRules:
    """What decides how a run continues after the loss of a node, and how long that takes."""

    resilience: ResilienceSpec
    spares: int
    job_on: Callable[[int], DisturbedJob | None]
    """Returns the job on fewer nodes; None if no layout fits."""
    takes: Durations
    interval_steps: int
    """Number of steps between two checkpoints."""
    total_steps: int
    """Number of steps of the whole run, which is longer than its simulated part."""


def split_phases(job: DisturbedJob, disturbance: Disturbance, rules: NodeRules, step_s: float) -> list[NodePhase]:
    """Return the phases of the run. `step_s`: duration of an undisturbed step."""
    takes = rules.takes
    supervisor = SimulatedSupervisor(
        rules.resilience,
        job.num_nodes,
        rules.spares,
        lambda nodes: job if nodes == job.num_nodes else rules.job_on(nodes),
    )
    phases = [NodePhase(1, job, supervisor.own)]

    def begin(step: int, decision: NodesDecision[DisturbedJob], pause_s: float, reason: str) -> None:
        phases.append(NodePhase(step, decision.plan, decision.nodes, pause_s, reason))
        supervisor.note_step(step * step_s)

    away: set[int] = set()
    for step, is_return, node, lasts in _changes(disturbance):
        now_s = step * step_s
        if not is_return and node in supervisor.own:
            decision = supervisor.lose_node(now_s, node)
            lost_s = (step - 1 - phases[-1].from_step + 1) % rules.interval_steps * step_s
            pause_s = lost_s + takes.detect_s + takes.start_s + takes.load_s
            if supervisor.is_running:
                away.add(node)
                pause_s += takes.swap_s if decision.joined else 0.0
                begin(step, decision, pause_s, _describe(node, decision.nodes, decision.joined))
            else:  # the run waits for the node, which is absent for the time of its steps
                decision = supervisor.connect(now_s + lasts * step_s, node)
                pause_s += max(0.0, lasts * step_s - takes.detect_s)
                begin(step, decision, pause_s, f"node {node} is absent, and the run waits for it")
        elif is_return and node in away:
            away.remove(node)
            supervisor.connect(now_s, node)
            planned_s = takes.save_s + takes.start_s + takes.load_s
            decision = supervisor.use_spares(now_s, (rules.total_steps - step) * step_s, planned_s)
            if decision.kind != "none":
                begin(
                    step, decision, planned_s, f"node {node} returns: the run restarts on {len(decision.nodes)} nodes"
                )
    return phases


def _changes(disturbance: Disturbance) -> Sequence[tuple[int, bool, int, int]]:
    """Return (step, whether the node returns, node, number of steps that it is absent) in order. A node that does not
    return is absent until the end of the simulated run."""
    changes = []
    for leave in disturbance.leaves:
        steps = disturbance.steps - leave.from_step + 1 if leave.steps is None else leave.steps
        changes += [(leave.from_step, False, leave.node, steps), (leave.from_step + steps, True, leave.node, steps)]
    return sorted(change for change in changes if change[0] <= disturbance.steps)


def _describe(node: int, nodes: Sequence[int], joined: Sequence[int]) -> str:
    with_spare = f", with the spare node {joined[0]}" if joined else ""
    return f"node {node} leaves: the run restarts on {len(nodes)} node{'s' if len(nodes) > 1 else ''}{with_spare}"
