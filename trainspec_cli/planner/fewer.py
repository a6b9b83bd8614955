"""The plan of the same run on fewer nodes, for the supervisor after the loss of a node and for forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.planner.capacity import plan_best
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.recipe.rules.check import check

KEPT_AXES = ("cp", "tp", "pp", "ep", "etp")
"""Axes that keep the run's value if the recipe leaves them open. The search is then short, and the state moves less."""
SEARCHED_DEVICES = 128
"""Up to this many devices, a forecast considers the same layouts as the supervisor. With more devices, the search would
take seconds for each number of nodes."""


def specs_on_fewer(spec: RunSpec, layout: Layout, nodes: int) -> Iterator[tuple[RunSpec, bool]]:
    """Yield the recipe on `nodes` nodes with each layout to try, and whether it must be predicted to fit in memory.
    `layout` is the one on all nodes.

    The recipe's layout is kept if it divides the nodes evenly. Otherwise, first only data parallelism changes, then
    also the number of pipeline stages; finally, the search may choose any layout. Layout changes scheduled by the
    recipe are dropped, because they need all nodes."""
    wanted = spec.layout
    wanted = replace(wanted, **{axis: getattr(layout, axis) for axis in KEPT_AXES if getattr(wanted, axis) == AUTO})
    fewer = replace(spec, cluster=replace(spec.cluster, num_nodes=nodes), scheduler=replace(spec.scheduler, changes=()))
    data = {"dp_replicate": 1, "dp_shard": AUTO} if layout.dp_shard > 1 else {"dp_replicate": AUTO, "dp_shard": 1}
    for pp in range(layout.pp, 0, -1):
        kept = wanted if pp == layout.pp else replace(wanted, pp=pp, stage_layers=None)
        yield replace(fewer, layout=kept), False
        yield replace(fewer, layout=replace(kept, **data)), False  # type: ignore[arg-type]
    axes = dict.fromkeys(("dp_replicate", "dp_shard", *KEPT_AXES), AUTO)
    yield replace(fewer, layout=replace(wanted, stage_layers=None, **axes)), True  # type: ignore[arg-type]


def plan_fewer(spec: RunSpec, layout: Layout, nodes: int, machine: Machine | None) -> tuple[RunSpec, Candidate] | None:
    """Return the recipe on `nodes` nodes and its best layout; None if no layout fits. On large clusters, only data
    parallelism changes."""
    tries = specs_on_fewer(spec, layout, nodes)
    if layout.world_size > SEARCHED_DEVICES:
        replica = layout.cp * layout.tp * layout.pp
        if nodes * layout.world_size // spec.cluster.num_nodes % replica:
            return None
        tries = islice(tries, 2)
    known = {(problem.code, problem.path) for problem in check(spec)}
    for fewer, _ in tries:
        if any((problem.code, problem.path) not in known for problem in check(fewer)):
            continue
        try:
            best = plan_best(fewer, machine)
        except TrainspecError:
            continue
        if best is not None:
            return fewer, best
    return None


def speeds_on_fewer(
    spec: RunSpec, candidate: Candidate, machine: Machine | None, step_time_s: Callable[[RunSpec, Candidate], float]
) -> Callable[[int], float | None]:
    """Return a function that plans the run on fewer nodes when it is called, and returns the speed relative to
    `candidate`; None if no layout fits. `step_time_s` returns the mean step time of a plan."""

    @cache
    def speed_on(nodes: int) -> float | None:
        found = plan_fewer(spec, candidate.layout, nodes, machine)
        return step_time_s(spec, candidate) / step_time_s(*found) if found else None

    return speed_on
