"""Find and read the disturbance named by `disturb=NAME|FILE`, and simulate a plan's steps under it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainspec_cli.balance.disturbance import Disturbance, build_disturbance, check_cluster
from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import exists, expand
from trainspec_cli.planner.fewer import plan_fewer
from trainspec_cli.planner.hardware.cluster import describe_fabric
from trainspec_cli.planner.run import forecast
from trainspec_cli.planner.search.space import one_group
from trainspec_cli.recipe.compose.folders import (
    COMMAND_LINE,
    DISTURB,
    SUFFIX,
    Origins,
    find_folders,
    locate,
    read_yaml,
)
from trainspec_cli.recipe.json_schema import plain_schema
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Simulation
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.run.recovery.reliability import durations

if TYPE_CHECKING:
    from trainspec_cli.balance.job import DisturbedJob


@dataclass(frozen=True)
class NamedDisturbance:
    name: str
    disturbance: Disturbance
    origins: Origins
    cwd: Path

    def require(self, problems: Sequence[Problem]) -> None:
        """Raise RecipeError with the line number of each problem, if there are any."""
        if problems:
            raise RecipeError(locate(map(_for_a_file, problems), self.origins, (), self.cwd))

    def simulate(self, spec: RunSpec, plan: CapacityPlan, candidate: Candidate, machine: Machine | None) -> Simulation:
        """Simulate a planned candidate under the disturbance. Raises RecipeError, with line numbers, if the disturbance
        does not match the plan."""
        from trainspec_cli.balance.job import describe_job  # deferred: loads numpy, which other plans do not need
        from trainspec_cli.balance.lost_nodes import NodeRules
        from trainspec_cli.balance.simulate import simulate

        per_node = describe_fabric(spec.cluster, machine).devices_per_node
        _, groups = one_group(spec, candidate.layout)
        nodes = spec.cluster.num_nodes
        self.require(list(check_cluster(self.disturbance, DISTURB, nodes, per_node, groups, spec.resilience)))
        job = describe_job(spec, candidate, machine)
        rules = None
        if groups == 1:
            recovers = forecast.describe_job(spec, plan, candidate, spec.resilience)
            reliability = spec.cluster.reliability

            def job_on(nodes: int) -> DisturbedJob | None:
                found = plan_fewer(spec, candidate.layout, nodes, machine)
                return describe_job(*found, machine) if found else None

            rules = NodeRules(
                spec.resilience,
                reliability.spare_nodes or 0,
                job_on,
                durations(reliability, recovers.state_bytes_per_device, recovers.load_s),
                max(1, round(recovers.interval_s / recovers.step_time_s)),
                spec.train.max_steps,
            )
        return simulate(job, self.disturbance, self.name, rules)


def load_disturbance(arguments: Sequence[str], cwd: Path | None = None) -> NamedDisturbance | None:
    """Return the disturbance named on the command line; None without `disturb=`.

    Raises RecipeError with every mistake in its file and the line number."""
    from trainspec_cli.recipe.compose.values import (
        find_argument,  # deferred: loads hydra, which --help does not need
    )

    given = find_argument(arguments, DISTURB)
    if given is None:
        return None
    cwd = (cwd or Path.cwd()).resolve()
    name = str(given.value)
    path = expand(name)
    file = find_folders(cwd).find_config(f"{DISTURB}/{name}") if name else None
    if path.suffix == SUFFIX and exists(cwd / path):
        file = cwd / path
    if file is None:
        names = find_folders(cwd).options(DISTURB)
        near = closest(name, names)
        hint = f"available: {', '.join(names)}; or specify a {SUFFIX} file"
        if near:
            hint = f"did you mean {DISTURB}={near}? `trainspec list {DISTURB}` shows all"
        message = f"there is no disturbance `{name}`" if name else "`disturb=` names no disturbance"
        problem = Problem("unknown_option", message, DISTURB, hint, COMMAND_LINE, given.number)
        raise RecipeError(locate([problem], {}, arguments, cwd))
    read = read_yaml(file, cwd)
    origins = {f"{DISTURB}.{path}": origin for path, origin in read.origins.items()}
    draft, problems = build_disturbance(read.values(), DISTURB)
    found = NamedDisturbance(file.stem, draft, {DISTURB: read.start} | origins, cwd)
    found.require(problems)
    return found


def disturbance_schema() -> JsonObject:
    """Return the JSON Schema of a file in conf/disturb."""
    return plain_schema(DISTURB, Disturbance)


def _for_a_file(problem: Problem) -> Problem:
    """Reword a recipe problem for a disturbance file, where `disturb.a.0.b=1` is written as `b: 1`."""
    hint = re.sub(rf"set {DISTURB}\.[\w.]*?(\w+)=", r"write \1: ", problem.hint)
    return replace(
        problem, hint=re.sub(rf"{DISTURB}\.([\w.]+)", r"\1", hint), message=problem.message.replace(f"`{DISTURB}.", "`")
    )
