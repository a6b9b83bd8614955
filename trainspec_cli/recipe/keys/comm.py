"""The formats in which data parallelism's exchanges travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.field_types import AUTO, Auto, NonNegativeInt

WireFormat = Literal["full", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class CommSpec:
    """full: in the format in which they are computed or summed.

    Sums are made in fp32 in every format, and what integers lose of a gradient is added to the next one.
    """

    gradients: WireFormat | Auto = "full"
    """Gradients, as they are summed over data-parallel ranks and replica groups. auto: full, bf16 or int8, whichever is
    predicted to take the least time, encoding counted."""
    parameters: WireFormat = "full"
    """Parameters, as dp_shard's ranks gather them. Norms and biases always travel in full."""
    across_nodes: WireFormat | Auto | None = None
    """Gradients, where the ranks of an exchange lie on several nodes; null: as `gradients`."""
    bucket_bytes: NonNegativeInt | None = None
    """Gradients of a rank that are summed in one exchange, at least, on CPUs (on GPUs each block's are); 0: each
    block's. null: the run tries a few sizes in its first steps, unless `scheduler` is off, and each block's are."""

    @property
    def fixed(self) -> WireFormats:
        """The formats, with `auto` as full."""
        across = self.gradients if self.across_nodes is None else self.across_nodes
        return WireFormats(_fixed(self.gradients), self.parameters, _fixed(across))


def _fixed(chosen: WireFormat | Auto) -> WireFormat:
    return "full" if chosen == AUTO else chosen


@dataclass(frozen=True)
class WireFormats:
    """The formats of a run: no `auto` left."""

    gradients: WireFormat = "full"
    parameters: WireFormat = "full"
    across_nodes: WireFormat = "full"
    reason: str = ""
    """Why, where the planner has chosen."""

    def describe(self) -> str:
        """`int8`, or `full inside nodes and int4 across them`."""
        if self.gradients == self.across_nodes:
            return self.gradients
        return f"{self.gradients} inside nodes and {self.across_nodes} across them"
