"""Everything that a rank needs for training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.accelerators import keep_busy
from trainspec_cli.engine.checkpoint.files import Held
from trainspec_cli.engine.comm.codec import WireMeter
from trainspec_cli.engine.comm.compressed import Compression
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.mesh import Mesh
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.links import LinkTimers
from trainspec_cli.engine.parallel.data_parallel import ModuleLosses
from trainspec_cli.engine.parallel.gradient_sums import GradientSums
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import Hidden, Lines, WeightQueue
from trainspec_cli.engine.shares import Share
from trainspec_cli.planner.pipeline import Kind
from trainspec_cli.recipe.keys.layout import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Throttle:
    """An injected fault that slows down passes; usually None."""

    parts: Mapping[int, float]
    """Fraction of the model's layers in each of this rank's stages."""
    sample_s: float = 0.0
    """Additional time for all passes of one sample through all layers, in seconds."""
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    def wait(self, kind: Kind, stage: int, samples: int) -> None:
        """Sleep for a pass's additional time. A full backward pass takes twice as long as a forward pass."""
        if self.sample_s:
            seconds = self.sample_s * self.parts[stage] * samples * (2 if kind == "backward" else 1) / 3
            keep_busy(self.device, seconds)


@dataclass
class Allowance:
    """An injected fault that limits how many samples fit in memory at a time; usually None."""

    samples: int | None = None

    def check(self, kind: Kind, samples: int) -> None:
        """Raise an out-of-memory error in the backward pass of a micro-batch that is too large."""
        if self.samples is not None and samples > self.samples and kind.startswith("backward"):
            raise torch.OutOfMemoryError(f"a fault injected by the recipe: {samples} samples do not fit")


@dataclass(frozen=True)
class Stages:
    """This rank's pipeline stages, and its connections to other stages."""

    layout: Layout
    parts: dict[int, Any]
    """Maps each stage to its part of the model."""
    lines: Lines
    queue: WeightQueue
    hidden: Hidden
    clock: StepClock
    throttle: Throttle
    allowance: Allowance
    noise: NoiseProbe


@dataclass(frozen=True)
class LateSum:
    """Gradients that are summed over a process group after the backward passes."""

    shares: Sequence[Share]
    peers: Peers


@dataclass
class TrainState:
    """Everything that a rank needs for training: its stages of the model, its shares of their parameters, the
    optimizer, and the mesh."""

    device: torch.device
    mesh: Mesh
    clock: StepClock
    links: LinkTimers
    stages: Stages
    shares: list[Share]
    optimizer: torch.optim.Optimizer
    late_sums: Sequence[LateSum]
    positions_S: Tensor | None
    """The positions of each sequence that this rank holds; None for all positions."""
    routers: Sequence[Any]
    """Routers whose experts' load the engine balances."""
    spread_experts: Collection[str] = ()
    """Names of the parameters that are spread over ep."""
    compression: Compression = field(default_factory=Compression)
    wire: WireMeter = field(default_factory=WireMeter)
    sums: GradientSums | None = None
    """Sums gradients over data-parallel ranks during the backward pass; None on a GPU, or if there is only one such
    rank."""
    losses: list[ModuleLosses] = field(default_factory=list)
    """The errors of compressed gradient exchanges, by module."""
    beyond: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that a coordinator saves in addition to the model, under names that no other rank or layout uses."""

    @property
    def parts(self) -> list[Any]:
        return list(self.stages.parts.values())

    def await_sums(self) -> Callable[[], object]:
        """Return a function that waits for the gradient sums over data-parallel ranks that have been started so far. It
        may be called in any thread."""
        return self.sums.await_added() if self.sums is not None else lambda: None

    @property
    def held(self) -> Held:
        return Held(self.shares, self.parts, self.optimizer, self.compression.saved | self.beyond)
