"""The formats in which data parallelism's exchanges travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.field_types import AUTO, Auto, NonNegativeInt, PositiveInt

WireFormat = Literal["full", "bf16", "int8", "int4"]
GradientFormat = Literal[WireFormat, "low_rank"]

FACTORS_WORTH = 0.5
"""`low_rank` sends a matrix in full whose factors have this part of its values, or more."""


def is_worth_factoring(rows: int, columns: int, rank: int) -> bool:
    """Return whether `low_rank` sends factors of such a matrix of a block."""
    return rank * (rows + columns) < FACTORS_WORTH * rows * columns


@dataclass(frozen=True)
class CommSpec:
    """full: in the format in which they are computed or summed.

    Sums are made in fp32 in every format, and what integers lose of a gradient is added to the next one.
    """

    gradients: GradientFormat | Auto = "full"
    """Gradients, as they are summed over data-parallel ranks and replica groups. auto: full, bf16 or
    int8, whichever is predicted to take the least time, encoding counted. low_rank: matrices of blocks as the product
    of two thin ones (PowerSGD), between replicas of a dense decoder; auto never takes it, since it changes the loss."""
    rank: PositiveInt = 4
    """Columns of each of the two factors of low_rank; matrices that these would not halve travel in full."""
    parameters: WireFormat = "full"
    """Parameters, as dp_shard's ranks gather them. Norms and biases always travel in full."""
    across_nodes: GradientFormat | Auto | None = None
    """Gradients, where the ranks of an exchange lie on several nodes; null: as `gradients`."""
    bucket_bytes: NonNegativeInt | None = None
    """Gradients of a rank that are summed in one exchange, at least, on CPUs (on GPUs each block's are); 0: each
    block's. null: the run tries a few sizes in its first steps, unless `scheduler` is off, and each block's are."""

    @property
    def fixed(self) -> WireFormats:
        """The formats, with `auto` as full."""
        across = self.gradients if self.across_nodes is None else self.across_nodes
        return WireFormats(_fixed(self.gradients), self.parameters, _fixed(across), rank=self.rank)


def _fixed(chosen: GradientFormat | Auto) -> GradientFormat:
    return "full" if chosen == AUTO else chosen


@dataclass(frozen=True)
class WireFormats:
    """The formats of a run: no `auto` left."""

    gradients: GradientFormat = "full"
    parameters: WireFormat = "full"
    across_nodes: GradientFormat = "full"
    reason: str = ""
    """Why, where the planner has chosen."""
    rank: int = 4
    """Of low_rank."""

    @property
    def uses_low_rank(self) -> bool:
        return "low_rank" in (self.gradients, self.across_nodes)

    def describe(self) -> str:
        """`int8`, or `full inside nodes and int4 across them`."""
        if self.gradients == self.across_nodes:
            return self.gradients
        return f"{self.gradients} inside nodes and {self.across_nodes} across them"
