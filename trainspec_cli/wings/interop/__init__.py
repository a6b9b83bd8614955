"""Configurations of other engines: written from a plan, or read into a recipe. No engine is imported."""

from __future__ import annotations

from trainspec_cli.wings.interop.not_carried import NOT_CARRIED
from trainspec_cli.wings.interop.sources import READERS, guess_engine, read_source
from trainspec_cli.wings.interop.table import NO_CONTAINER, Container, RunValues, layout_of, run_values, show
from trainspec_cli.wings.interop.target import (
    EMITTED,
    ReadBack,
    Target,
    Translation,
    nest,
    options,
    read_back,
    translate,
)
from trainspec_cli.wings.interop.targets import (
    accelerate,
    axolotl,
    deepspeed,
    managers,
    maxtext,
    megatron,
    megatron_bridge,
    ray,
    torchtitan,
    transformers,
)

__all__ = [
    "EMITTED",
    "ENGINES",
    "LAUNCHERS",
    "NOT_CARRIED",
    "NO_CONTAINER",
    "READERS",
    "TARGETS",
    "Container",
    "ReadBack",
    "RunValues",
    "Target",
    "Translation",
    "guess_engine",
    "layout_of",
    "nest",
    "options",
    "read_back",
    "read_source",
    "run_values",
    "show",
    "translate",
]

ENGINES = (
    deepspeed.TARGET,
    accelerate.TARGET,
    transformers.TARGET,
    axolotl.TARGET,
    torchtitan.TARGET,
    megatron.TARGET,
    megatron_bridge.TARGET,
    maxtext.TARGET,
)
LAUNCHERS = (
    managers.JOB,
    managers.JOB_SET,
    managers.TRAIN_JOB,
    managers.SKYPILOT,
    ray.KUBERAY,
    ray.SKYPILOT_RAY,
)
"""Cluster managers, which start trainspec itself instead of another engine."""
TARGETS: dict[str, Target] = {target.name: target for target in (*ENGINES, *LAUNCHERS)}
"""Targets by the name passed to `--for`."""
