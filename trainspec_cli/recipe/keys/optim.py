"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from trainspec_cli.recipe.field_types import Fraction, NonNegativeFloat, NonNegativeInt, Option, PositiveFloat, Range

OptimizerName = Literal["adamw", "sgd", "muon", "adamw8bit"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
KeptState = OptimizerName | float
"""What is kept of each parameter: by the name of an optimizer of the engine, or the bytes of one's own."""
ON_DEVICE: tuple[OptimizerName, ...] = ("muon", "adamw8bit")
"""Optimizers whose state and update stay on the device that trains."""
STACKED_VALUES = 2**22
"""muon: small matrices of one shape are orthogonalised together, as many as hold this number of values."""
BLOCK = 256
"""adamw8bit: values of a row that share a scale; a row ends its last block."""
QUANTISED_SIZE, QUANTISED_ROW = 4096, 64
"""adamw8bit: a tensor with fewer values, or with shorter rows, keeps moments of fp32; so does every vector."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Learning rate over the run, a pure function of the step (see `policy/batch/learning_rate.py`)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    """constant; cosine: down to `final_lr_ratio` by a half cosine; wsd: constant, then falling over the last
    `decay_fraction`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from 0 to its peak; a share of the run, `3%` or 0.03, is turned into steps."""
    decay_fraction: Fraction = 0.2
    """wsd: the last fraction of the run, over which the rate falls."""
    final_lr_ratio: Fraction = 0.1
    """The rate at the last step, as a fraction of the peak."""

    @property
    def lowest_lr_ratio(self) -> float:
        """The rate that the schedule falls to, as a fraction of the peak; 1 where it does not fall."""
        falls = self.kind == "cosine" or (self.kind == "wsd" and self.decay_fraction > 0)
        return self.final_lr_ratio if falls else 1.0


@dataclass(frozen=True)
class OptimSpec:
    lr: PositiveFloat
    """The learning rate at its peak."""
    name: OptimizerName | str = "adamw"
    """The optimizer: adamw (arXiv:1711.05101); sgd; muon, which orthogonalises the momentum of the matrices inside of
    blocks, and trains all else by adamw at the same rate (arXiv:2502.16982); adamw8bit, with moments of 8 bits
    (arXiv:2110.02861). One's own is `FILE.py:NAME`, `package.module:NAME`, or a name that a package registered."""
    beta1: Annotated[float, Range(0, 1, includes_high=False)] = 0.9
    """adamw, adamw8bit, and what muon leaves to adamw: decay of the average of the gradients."""
    beta2: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    """The same optimizers: decay of the average of their squares."""
    eps: PositiveFloat = 1e-8
    """The same optimizers: added to the root of that average."""
    momentum: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    """muon: decay of the average of a matrix's gradients (Nesterov's)."""
    weight_decay: NonNegativeFloat = 0.1
    """Applied only to matrices (not to norms and biases)."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """The norm over all gradients to which larger ones are clipped; null: they are not."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """The course of the learning rate over the run."""
    options: dict[str, Option] = field(default_factory=dict)
    """Further arguments of one's own optimizer, by name."""
    state_bytes: NonNegativeFloat | None = None
    """The bytes of state that one's own optimizer keeps of each parameter: 8 for two averages in fp32. The plan counts
    with them; a run measures them before its first step, and refuses another number."""

    @property
    def is_own(self) -> bool:
        """Return whether the optimizer is the user's own code."""
        return self.name not in OPTIMIZERS

    @property
    def kept_state(self) -> KeptState:
        """Return what says how much state the optimizer keeps of each parameter."""
        return self.name if self.name in OPTIMIZERS else self.state_bytes or 0.0
