"""Number formats. Parameters and optimizer state are kept in fp32; matmuls run in `compute`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, Auto


@dataclass(frozen=True)
class PrecisionSpec:
    compute: Literal["bf16", "fp32"] | Auto = AUTO
    """auto: bf16 where the chip multiplies it natively, else fp32."""
    reduce: Literal["bf16", "fp32"] = "fp32"
    """Gradients are summed across ranks in this."""
