"""The engines that a recipe is emitted for."""

from __future__ import annotations

from trainspec_cli.interop.target import Target
from trainspec_cli.interop.targets import (
    accelerate,
    axolotl,
    deepspeed,
    kubernetes,
    maxtext,
    megatron,
    megatron_bridge,
    skypilot,
    torchtitan,
    transformers,
)

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
LAUNCHERS = (kubernetes.JOB, kubernetes.JOB_SET, kubernetes.TRAIN_JOB, skypilot.TARGET)
"""Cluster managers, which start trainspec itself."""
TARGETS: dict[str, Target] = {target.name: target for target in (*ENGINES, *LAUNCHERS)}
"""Name, as `--for` takes it -> target."""
