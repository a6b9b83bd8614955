"""Rules for a layout that changes while the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.layout import LAYOUT_RULES
from trainspec_cli.recipe.unknown import UNKNOWN

PATH = "scheduler.changes"


def changed_specs(spec: RunSpec) -> list[RunSpec]:
    """Return the recipe as it would be with each of the layouts that it changes to from the start on."""
    if spec.layout is UNKNOWN:
        return []
    return [replace(spec, layout=change.of(spec.layout)) for change in spec.scheduler.changes]


def changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """Each layout that the run changes to is legal in itself."""
    for place, (changed, change) in enumerate(zip(changed_specs(spec), spec.scheduler.changes, strict=False)):
        for problem in (found for rule in LAYOUT_RULES for found in rule(changed)):
            field = problem.path.rpartition(".")[2]
            path = f"{PATH}.{place}.{field}" if hasattr(change, field) else problem.path
            message = f"the layout from step {change.step} on: {problem.message}"
            hint = problem.hint and f"in {PATH}.{place}: {problem.hint.replace('layout.', '')}"
            yield replace(problem, message=message, path=path, hint=hint)


def order_of_changes(spec: RunSpec) -> Iterator[Problem]:
    """Changes come one after another, before the last step."""
    changes = spec.scheduler.changes
    for place, (before, change) in enumerate(pairwise(changes), 1):
        if change.step <= before.step:
            message = f"`{PATH}.{place}.step` is {change.step}, and the change before it comes at {before.step}"
            hint = f"put the changes in their order, each at a later step: {before.step + 1} or more"
            yield Problem("out_of_range", message, f"{PATH}.{place}.step", hint)
    late = [place for place, change in enumerate(changes) if change.step >= spec.train.max_steps]
    if late and spec.batching.schedule.kind == "constant":
        message = f"`{PATH}.{late[0]}.step` is {changes[late[0]].step}, in a run of {spec.train.max_steps} steps"
        yield Problem("out_of_range", message, f"{PATH}.{late[0]}.step", f"type {spec.train.max_steps - 1} or less")


def one_replica_group(spec: RunSpec) -> Iterator[Problem]:
    """Replica groups heal from one another part by part, and so keep one layout."""
    if spec.scheduler.changes and spec.resilience.mode == "elastic":
        message = "replica groups (`resilience.mode` is elastic) keep their layout: they heal from one another"
        yield Problem("unsupported", message, PATH, f"type resilience=restart, or ~{PATH}")


def closed_axes(spec: RunSpec) -> Iterator[Problem]:
    """A change builds on axes that are known before the search for a layout."""
    for place, (changed, change) in enumerate(zip(changed_specs(spec), spec.scheduler.changes, strict=False)):
        open_axes = [axis for axis in ("cp", "tp", "pp", "ep") if getattr(changed.layout, axis) == AUTO]
        if open_axes:
            message = f"the layout from step {change.step} on leaves {', '.join(open_axes)} to the planner"
            hint = f"name {open_axes[0]} in {PATH}.{place}, or type layout.{open_axes[0]}=1"
            yield Problem("unsupported", message, f"{PATH}.{place}.{open_axes[0]}", hint)


RELAYOUT_RULES = (changed_layouts, order_of_changes, one_replica_group, closed_axes)
