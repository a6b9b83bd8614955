"""The engines that a recipe is emitted for."""

from __future__ import annotations

from trainspec_cli.interop.target import Target
from trainspec_cli.interop.targets import accelerate, deepspeed, torchtitan, transformers

TARGETS: dict[str, Target] = {
    module.TARGET.name: module.TARGET for module in (deepspeed, accelerate, transformers, torchtitan)
}
"""Name, as `--for` takes it -> target."""
