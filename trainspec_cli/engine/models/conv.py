"""The base of convolutional networks: their published modules and initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainspec_cli.engine.models.batch_norm import BatchNorm

HEAD_STD = 0.01


class ConvNet(nn.Module):
    """Maps images (B, C, ...) to the summed loss of their labels (scalar, fp32), or to predictions without labels.

    Only samples are divided over ranks.
    """

    tensor_cuts: ClassVar[dict[str, int]] = {}
    tensor_partial: ClassVar[tuple[str, ...]] = ()

    def block_modules(self) -> Sequence[nn.Module]:
        """Return the units that are sharded and recomputed as one."""
        raise NotImplementedError

    def compile_modules(self) -> Sequence[nn.Module]:
        return self.block_modules()

    def norm_modules(self) -> Sequence[BatchNorm]:
        """Return the modules whose statistics are taken over the samples of all ranks."""
        return [module for module in self.modules() if isinstance(module, BatchNorm)]

    def region_modules(self) -> Sequence[nn.Module]:
        return []

    def attention_modules(self) -> Sequence[nn.Module]:
        return []

    def expert_modules(self) -> Sequence[nn.Module]:
        return []

    def balance_modules(self) -> Sequence[nn.Module]:
        return []

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Set convolutions to Normal(0, sqrt(2 / inputs)) (arXiv:1502.01852), norms to 1, biases to 0."""
        if full.dim() == 1:
            full.fill_(1.0 if name.endswith("weight") else 0.0)
        elif full.dim() == 2:
            full.normal_(0.0, HEAD_STD, generator=generator)
        else:
            full.normal_(0.0, math.sqrt(2.0 / full[0].numel()), generator=generator)

    def init_buffers(self) -> None:
        for norm in self.norm_modules():
            norm.running_mean.zero_()
            norm.running_variance.fill_(1.0)
