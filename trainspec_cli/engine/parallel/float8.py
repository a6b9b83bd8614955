"""Linear layers that multiply in fp8, by torchao (extra `float8`): inputs and weights rounded to e4m3, gradients of
outputs to e5m2, one scale a tensor, sums in fp32 (arXiv:2209.05433).

Parameters stay what they are: sharding, checkpoints and the optimizer see no difference. A rank's scales are those of
its own parts. On a CPU the rounding is exact and the product is one of fp32: right in numbers, slow.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def apply_float8(blocks: Sequence[nn.Module], *, emulate: bool) -> None:
    """Replace every linear layer of the blocks (on meta) in place; experts' grouped products and the head stay."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)  # kernels take multiples of 16
    for block in blocks:
        linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        for name, linear in linears:
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, Float8Linear.from_float(linear, config))
