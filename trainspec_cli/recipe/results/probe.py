"""The results of a short probe of a machine without GPUs, with all of a run's processes running at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from trainspec_cli.recipe.results.plan import Plan

PROBED_TOKENS = 1024
"""Tokens that go through the probed matrix products and attention."""
PROBED_HEADS = 4
PROBED_HEAD_SIZES = (16, 64)
"""Sizes of the probed heads: a head costs its scores and softmax, whatever its size, and products that grow with it."""


BUSY = 0.1
"""A probe displaced for a larger fraction of its time measures other processes as much as the machine."""


@dataclass(frozen=True)
class Curve:
    """Seconds over size. The first size is next to nothing: what it takes is the cost of the call itself."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Straight between two points on logarithmic axes; beyond the last one proportional to size."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        points = list(zip(self.sizes, self.seconds, strict=True))
        (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if b[0] >= size)
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))

    def beyond_call(self, size: float) -> float:
        """Return the cost that the size adds to the cost of the call."""
        return max(0.0, self.at(size) - self.seconds[0])


@dataclass(frozen=True)
class Passes:
    """An operation's forward and backward."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class MatmulCurves:
    """The three products of training over a matrix's elements, for `PROBED_TOKENS` tokens; CPUs differ in them."""

    forward: Curve
    input_gradient: Curve
    weight_gradient: Curve


@dataclass(frozen=True)
class Reference:
    """A model of middle size, really trained for some steps over the whole of the probe."""

    plan: Plan
    parts_s: dict[str, float]
    """Times of a step's parts, named as in the step events."""
    grown_bytes: float
    """Resident memory that it added to the process."""


@dataclass(frozen=True)
class MachineProbe:
    processes: int
    compute: str
    empty_step_s: dict[str, float]
    """The parts of a step of a model next to nothing, without its blocks: hosts' time, small collectives."""
    empty_block_s: dict[str, float]
    """The time that each of its blocks adds."""
    small: Reference
    large: Reference
    matmul: MatmulCurves
    attention: Passes
    """Attention by sequence length, for `PROBED_TOKENS` tokens and `PROBED_HEADS`, of the larger head size."""
    attention_narrow: Passes
    """Attention of the smaller head size."""
    norm: Passes
    """This and what follows over elements."""
    rope: Passes
    swiglu: Passes
    loss: Curve
    """Over logits, their gradient included."""
    add: Curve
    cast: Curve
    optimizer: Curve
    """The gradients' norm and the update, over parameters."""
    all_reduce: Curve
    """Collectives over bytes, each process with work of its own before."""
    all_gather: Curve
    reduce_scatter: Curve
    bare_bytes: float
    """Resident memory of a worker with a model next to nothing."""
    displaced: float
    """Part of the time that a process was ready to run and another had the core."""
    peak_flops: float
    """FLOP/s of a process's best matrix product, that MFU is taken of."""

    @property
    def is_disturbed(self) -> bool:
        return self.displaced > BUSY

    @property
    def references(self) -> tuple[Reference, Reference]:
        return self.small, self.large
