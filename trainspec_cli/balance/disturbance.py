"""Disturbances of a simulated run: slow devices, slow links and absent nodes, each with its first step and duration."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any

from trainspec_cli.core.errors import Problem
from trainspec_cli.planner.time.samples import Tier
from trainspec_cli.recipe.field_types import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Range
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.rules.run import forget_out_of_range
from trainspec_cli.run.recovery.nodes import groups_of_node
from trainspec_cli.run.recovery.recovery import enough_groups

MAX_STEPS = 100_000
MAX_EVENTS = 1_000
Slowdown = Annotated[float, Range(1, 1000, includes_low=False)]
"""Factor by which the usual time is multiplied."""


@dataclass(frozen=True, kw_only=True)
class Spell:
    """First step and number of steps of an event; with null, it lasts until the end of the run."""

    from_step: PositiveInt = 1
    """The first step of the event. Steps are counted from 1."""
    steps: PositiveInt | None = None

    def holds(self, step: int) -> bool:
        return self.from_step <= step and (self.steps is None or step < self.from_step + self.steps)

    def describe(self) -> str:
        if self.steps is None:
            return f"from step {self.from_step} on"
        return f"steps {self.from_step} to {self.from_step + self.steps - 1}"


@dataclass(frozen=True, kw_only=True)
class SlowDevice(Spell):
    device: NonNegativeInt
    """Number of the device in the entire cluster, counted from 0, node by node."""
    factor: Slowdown
    """Factor by which the device's compute times are multiplied."""

    def describe(self) -> str:
        return f"device {self.device:,} takes {self.factor:g} times as long to compute, {super().describe()}"


@dataclass(frozen=True, kw_only=True)
class SlowNode(Spell):
    node: NonNegativeInt
    factor: Slowdown

    def describe(self) -> str:
        return f"node {self.node:,} takes {self.factor:g} times as long to compute, {super().describe()}"


@dataclass(frozen=True, kw_only=True)
class NarrowLink(Spell):
    node: NonNegativeInt | None = None
    """Number of the node; null means every node."""
    tier: Tier = "network"
    factor: Slowdown
    """Factor by which the times of transfers over these links are multiplied."""

    def describe(self) -> str:
        where = "every node" if self.node is None else f"node {self.node:,}"
        return f"the {self.tier} links of {where} take {self.factor:g} times as long, {super().describe()}"


@dataclass(frozen=True, kw_only=True)
class Leave(Spell):
    """A node is absent. Its replica group is absent with it; a run with one group restarts as
    `resilience.after_node_loss` says."""

    node: NonNegativeInt

    def describe(self) -> str:
        return f"node {self.node:,} is absent, {super().describe()}"


@dataclass(frozen=True, kw_only=True)
class ByChance:
    """Random slowdowns. Start and place are distributed uniformly, durations log-uniformly."""

    count: Annotated[int, Range(1, MAX_EVENTS)]
    shortest_s: PositiveFloat
    longest_s: PositiveFloat
    least_factor: Slowdown
    most_factor: Slowdown
    """Factors are uniformly distributed between `least_factor` and `most_factor`."""
    network_share: Fraction = 0.0
    """The fraction of events that slow a node's network; all others slow a device."""


Event = SlowDevice | SlowNode | NarrowLink | Leave


@dataclass(frozen=True)
class Disturbance:
    description: str = ""
    steps: Annotated[int, Range(1, MAX_STEPS)] = 300
    """Number of steps of the simulated run."""
    noise: Annotated[float, Range(0, 0.5)] = 0.02
    """Relative standard deviation of a rank's measured times."""
    seed: NonNegativeInt = 0
    slow_devices: tuple[SlowDevice, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    narrow_links: tuple[NarrowLink, ...] = ()
    leaves: tuple[Leave, ...] = ()
    by_chance: ByChance | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        return (*self.slow_devices, *self.slow_nodes, *self.narrow_links, *self.leaves)

    def drawn(self, step_s: float, num_nodes: int, devices_per_node: int) -> Disturbance:
        """Return the disturbance with its random events drawn for a run whose steps take `step_s`."""
        if self.by_chance is None:
            return self
        wanted = self.by_chance
        chance = random.Random(f"disturbance {self.seed}")
        devices = list(self.slow_devices)
        links = list(self.narrow_links)
        for _ in range(wanted.count):
            lasts_s = math.exp(chance.uniform(math.log(wanted.shortest_s), math.log(wanted.longest_s)))
            from_step = chance.randint(1, self.steps)
            steps = max(1, round(lasts_s / step_s))
            factor = chance.uniform(wanted.least_factor, wanted.most_factor)
            node = chance.randrange(num_nodes)
            place = chance.randrange(devices_per_node)
            if chance.random() < wanted.network_share:
                links.append(NarrowLink(from_step=from_step, steps=steps, node=node, factor=factor))
            else:
                device = node * devices_per_node + place
                devices.append(SlowDevice(from_step=from_step, steps=steps, device=device, factor=factor))
        return replace(self, slow_devices=tuple(devices), narrow_links=tuple(links), by_chance=None)


# Read a disturbance


def build_disturbance(content: Mapping[str, object], path: str) -> tuple[Disturbance, list[Problem]]:
    """Return a draft, in which wrong values are replaced by UNKNOWN, and all problems, each with its path below
    `path`."""
    draft, problems = build(Disturbance, content, f"{path}.")
    draft, wrong = _forget_out_of_range(draft, f"{path}.")
    return draft, [*problems, *wrong, *(_inside_out(draft, path) if not problems and not wrong else ())]


def _forget_out_of_range(section: Any, prefix: str) -> tuple[Any, list[Problem]]:
    """Replace out-of-range values with UNKNOWN, as in a recipe, including those in lists of sections."""
    section, problems = forget_out_of_range(section, prefix)
    for field in fields(section):
        items = getattr(section, field.name)
        if isinstance(items, tuple):
            for number, item in enumerate(items):
                if is_dataclass(item):
                    problems += forget_out_of_range(item, f"{prefix}{field.name}.{number}.")[1]
    return section, problems


def _inside_out(disturbance: Disturbance, path: str) -> Iterator[Problem]:
    """Yield a problem for each lower bound above its upper bound."""
    chance = disturbance.by_chance
    if chance is None:
        return
    for least, most in (("shortest_s", "longest_s"), ("least_factor", "most_factor")):
        low = getattr(chance, least)
        high = getattr(chance, most)
        if low > high:
            name = f"{path}.by_chance.{least}"
            message = f"`{name}` is {low:g}, and `{most}` is {high:g}"
            yield Problem("out_of_range", message, name, f"set {name}={high:g} or less")


def check_cluster(
    disturbance: Disturbance,
    path: str,
    num_nodes: int,
    devices_per_node: int,
    replica_groups: int,
    resilience: ResilienceSpec,
) -> Iterator[Problem]:
    """Yield a problem for each event that never takes effect, or that names a device or node outside the cluster."""
    devices = num_nodes * devices_per_node
    for kind in ("slow_devices", "slow_nodes", "narrow_links", "leaves"):
        for number, event in enumerate(getattr(disturbance, kind)):
            place = f"{path}.{kind}.{number}"
            name, there_are = ("device", devices) if kind == "slow_devices" else ("node", num_nodes)
            value = getattr(event, name)
            if value is not None and value >= there_are:
                message = f"`{place}.{name}` is {value:,}, but the cluster has only {there_are:,} {name}s"
                hint = f"set {place}.{name}={there_are - 1} or less; they are counted from 0"
                yield Problem("out_of_range", message, f"{place}.{name}", hint)
            if event.from_step > disturbance.steps:
                message = (
                    f"`{place}.from_step` is {event.from_step:,}, but the run ends with step {disturbance.steps:,}"
                )
                hint = f"set {place}.from_step={disturbance.steps} or less"
                yield Problem("out_of_range", message, f"{place}.from_step", hint)
    yield from _check_leaves(disturbance, path, num_nodes, replica_groups, resilience)


def _check_leaves(
    disturbance: Disturbance, path: str, num_nodes: int, replica_groups: int, resilience: ResilienceSpec
) -> Iterator[Problem]:
    if replica_groups == 1:
        if disturbance.leaves and resilience.mode == "none":
            message = "a node leaves, and `resilience.mode` is none: the run ends"
            yield Problem("unsupported", message, f"{path}.leaves", "set resilience=restart on the command line")
        return
    for number, leave in enumerate(disturbance.leaves):
        away = {
            group
            for other in disturbance.leaves
            if other.holds(leave.from_step)
            for group in groups_of_node(other.node, num_nodes, replica_groups)
        }
        if not enough_groups(resilience, replica_groups - len(away)):
            there = f"{replica_groups - len(away)} of {replica_groups} replica groups are left at step"
            message = f"{there} {leave.from_step:,}, but the run needs {resilience.min_groups}"
            yield Problem(
                "unsupported", message, f"{path}.leaves.{number}", "allow fewer absent nodes at the same time"
            )
