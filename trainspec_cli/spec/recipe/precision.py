"""Number formats. Parameters and optimizer state are kept in fp32; matmuls run in `compute`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, Auto

ComputeFormat = Literal["bf16", "fp16", "fp32", "tf32"]
MatmulFormat = Literal["compute", "fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class PrecisionSpec:
    compute: ComputeFormat | Auto = AUTO
    """auto: bf16 if the chip multiplies it natively, else fp32."""
    reduce: Literal["bf16", "fp32"] = "fp32"
    """The format in which gradients are summed across ranks."""
    matmul: MatmulFormat = "compute"
    """The format in which linear layers multiply; `compute` is the compute format."""
