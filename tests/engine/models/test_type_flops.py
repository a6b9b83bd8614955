"""Planned FLOPs of the model types of transformers are those of the matrix products that the engine computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.models import type_layouts_worker as worker
from torch.utils.flop_counter import FlopCounterMode

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.planner.workload import flops_per_token, mixing_flops_per_token
from trainspec_cli.recipe.keys.model import DecoderModel

SEQ_LEN = 64
CASES = worker.cases()
DECODERS = {
    name: model
    for name, model in worker.MODELS.items()
    # Limited scores are computed by matrix products, which would be counted with the others.
    if isinstance(model, DecoderModel) and model.attention_softcap is None
}


def grouped(a: list[int], b: list[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * a[-2] * a[-1] * b[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_matrix_products_are_planned_as_they_are_computed(name: str) -> None:
    """Without attention's own products, which fused kernels compute uncounted. Routers are not model FLOPs."""
    model = DECODERS[name]
    module: Any = build_model(model, SEQ_LEN)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module.init_buffers()
    tokens = torch.randint(1, 90, (2, SEQ_LEN))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        module(tokens, tokens.clone()).backward()
    counted = counter.get_total_flops() / (2 * SEQ_LEN)
    planned = flops_per_token(model, SEQ_LEN) - mixing_flops_per_token(model, SEQ_LEN)
    assert planned == pytest.approx(counted, rel=1e-9 if model.experts is None else 0.02)
