"""What can be said and planned, but not yet trained: the engine refuses it instead of passing over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from trainspec_cli.errors import Problem
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.recipe.model import ConvModel
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.rules.conv import CONV_RULES
from trainspec_cli.spec.rules.elastic import wanted_groups, whole_hosts
from trainspec_cli.spec.rules.layout import LAYOUT_RULES
from trainspec_cli.spec.rules.precision import float8
from trainspec_cli.spec.rules.rules import Rule, apply
from trainspec_cli.spec.unknown import UNKNOWN

TRAINED: dict[str, tuple[Any, ...]] = {
    "precision.compute": ("bf16", "fp32", AUTO),
    "precision.matmul": ("compute", "fp8"),
    "cluster.device": ("cpu", "cuda", AUTO),
}
"""The values that this version's engine and launcher take; the first is the one to type."""


CLOSED_AXES = ("cp", "tp", "pp", "ep", "etp")
"""What a launch sets to 1 where it is `auto`."""


def close_axes(spec: RunSpec) -> RunSpec:
    """`spec` with the axes beside data parallelism set to 1, where they are `auto`."""
    if spec.layout is UNKNOWN:
        return spec
    closed: dict[str, Any] = {axis: 1 for axis in CLOSED_AXES if _is_auto(getattr(spec.layout, axis))}
    return replace(spec, layout=replace(spec.layout, **closed))


def _is_auto(value: Any) -> bool:
    return value is not UNKNOWN and value == AUTO


def check_engine(spec: RunSpec) -> list[Problem]:
    """What this version's engine cannot run."""
    return apply([*BUILT, elastic_model, group_hosts, *(partial(trained_value, path) for path in TRAINED)], spec)


def check_built(spec: RunSpec) -> list[Problem]:
    """What of the model and its layout the engine cannot build, wherever it is to run."""
    return apply(BUILT, spec)


def trained_model(spec: RunSpec) -> Iterator[Problem]:
    if getattr(spec.model, "prediction_layers", 0):
        message = "the engine does not build layers that predict further tokens; without them the model is the same"
        yield Problem("unsupported", message, "model.prediction_layers", "type model.prediction_layers=0")


def group_hosts(spec: RunSpec) -> Iterator[Problem]:
    yield from whole_hosts(spec.cluster.num_nodes, wanted_groups(spec))


def elastic_model(spec: RunSpec) -> Iterator[Problem]:
    if spec.resilience.mode == "elastic" and isinstance(spec.model, ConvModel):
        message = "batch norm takes its statistics over all samples, and replica groups do not share them"
        yield Problem("unsupported", message, "resilience.mode", "type resilience=restart")


BUILT: tuple[Rule, ...] = (trained_model, *CONV_RULES, *LAYOUT_RULES, float8)


def trained_value(path: str, spec: RunSpec) -> Iterator[Problem]:
    value, allowed = attrgetter(path)(spec), TRAINED[path]
    if value not in allowed:
        choices = " or ".join(str(choice) for choice in allowed)
        message = f"`{path}` is {value}; this version trains with {choices}"
        hint = f"type {path}={allowed[0]}, or {_PLAN}"
        yield Problem(code="unsupported", path=path, message=message, hint=hint)


_PLAN = "trainspec plan with the same arguments says what it would take"
