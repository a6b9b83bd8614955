"""The report of a plan, and of the plans of a sweep, which the terminal, the page and the JSON show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.blueprint import Blueprint
from trainspec_cli.recipe.results.forecast import RunForecast
from trainspec_cli.recipe.results.planes import PlanesPlan
from trainspec_cli.recipe.results.pools import PoolsPlan
from trainspec_cli.recipe.results.prediction import Candidate, CapacityPlan
from trainspec_cli.recipe.results.simulation import Simulation

if TYPE_CHECKING:
    from trainspec_cli.report.plan.trace import TraceReport  # loads tables of results, which few plans have


@dataclass(frozen=True)
class PlanSection:
    """A wing's part of a plan: a table with text below it."""

    key: str
    """Its key in the plan as JSON."""
    figures: JsonObject
    title: str
    about: str
    """Follows the title."""
    headings: tuple[str, ...]
    """The first two are those of text."""
    rows: tuple[tuple[str, ...], ...]
    text: str
    known: str
    """What is known of it, and where from."""


@dataclass(frozen=True)
class PlanReport:
    """A plan, with those of its parts that were asked for and exist."""

    spec: RunSpec
    capacity: CapacityPlan
    run: RunForecast | None = None
    """None where no layout fits; then `capacity.advice` says what would."""
    blueprint: Blueprint | None = None
    planes: PlanesPlan | None = None
    sections: tuple[PlanSection, ...] = ()
    """Those of the wings that the recipe uses."""
    simulation: Simulation | None = None
    trace: TraceReport | None = None
    pools: PoolsPlan | None = None
    """The plans on some of the pools of a cluster that has several."""
    defaults: tuple[str, ...] = ()
    """Overrides that stand for what nobody has given, where no recipe is named."""

    profile: str = ""
    """The line of the cluster's profile: what it changed, or why it is not used."""

    @property
    def best(self) -> Candidate | None:
        return self.capacity.best

    @property
    def rejected(self) -> dict[str, int]:
        """Layouts refused, counted by reason, the most frequent first."""
        return dict(sorted(self.capacity.rejected.items(), key=lambda item: -item[1]))

    @property
    def device(self) -> str:
        """The accelerator's name, or the kind of device where the cluster names none."""
        cluster = self.spec.cluster
        if cluster.pools:
            return " + ".join(dict.fromkeys(pool.accelerator.name for pool in cluster.pools))
        return cluster.accelerator.name if cluster.accelerator else cluster.device


@dataclass(frozen=True)
class SweepPoint:
    values: dict[str, str]
    """The value of each swept key."""
    plan: PlanReport

    @property
    def value(self) -> str:
        return ", ".join(self.values.values())


@dataclass(frozen=True)
class SweepReport:
    """One plan for each combination of the swept keys' values."""

    points: tuple[SweepPoint, ...]

    @property
    def key(self) -> str:
        return ", ".join(self.points[0].values)
