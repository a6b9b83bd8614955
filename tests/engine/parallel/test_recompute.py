"""Which operations come again in the backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainspec_cli.engine.models.decoder import Block
from trainspec_cli.engine.models.rope import rope_angles
from trainspec_cli.engine.parallel.expert import COSTLY, apply_recompute
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import Recompute

MODEL = DecoderModel(1, 16, 2, 1, 8, 24, 32)
MATRICES = 7
"""The matrices of a block: queries, keys, values, the output, the gate, up and down."""


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward_of(recompute: Recompute, compiled: bool = False) -> Counter[str]:
    """Count the operations of a block's backward."""
    block = Block(MODEL, 0)
    apply_recompute([block], recompute, compiled=compiled)
    angles = torch.cat([rope_angles(4, 8, 1e4)] * 2, dim=-1)
    out = block(torch.randn(1, 4, 16, requires_grad=True), angles.cos(), angles.sin())
    with Counting() as counting:
        out.sum().backward()
    return counting.seen


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("recompute", "compiled", "products", "attentions", "activations"),
    [
        ("none", False, 2 * MATRICES, 0, 0),
        ("selective", False, 2 * MATRICES, 0, 1),
        ("selective", True, 2 * MATRICES, 0, 1),
        ("full", False, 3 * MATRICES - 1, 1, 1),
    ],
)
def test_selective_repeats_the_cheap_part_alone_and_full_everything(
    recompute: Recompute, compiled: bool, products: int, attentions: int, activations: int
) -> None:
    """Full stops once the last saved tensor is there: the last product's own result is not needed."""
    seen = backward_of(recompute, compiled)
    assert (seen["mm"], seen[ATTENTION], seen["silu"]) == (products, attentions, activations)


def test_what_is_kept_are_products_convolutions_and_attention() -> None:
    assert {operation._overloadpacket.__name__ for operation in COSTLY} == {
        *("mm", "addmm", "bmm", "convolution", "_grouped_mm", "_scaled_mm"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        ATTENTION,
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }


@pytest.mark.slow
def test_a_block_that_no_compiler_takes_whole_is_compiled_in_parts() -> None:
    """An exchange of tp, or a product whose weight's gradient comes later, cuts a block's graph; without recomputation
    the parts are compiled, and so they are with it."""

    class Cut(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.compiler.disable(torch.sin)(x.exp() * 2).exp() * 3

    x, block = torch.randn(8, requires_grad=True), Cut()
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    apply_recompute([block], "full", compiled=True)
    block.compile()
    torch._dynamo.utils.counters.clear()
    (found,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(found, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
