"""Virtual durations follow from what a GPU's kernels read, write and multiply."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainspec_cli.engine.models.decoder import Block
from trainspec_cli.engine.tools.trace import kernels_of
from trainspec_cli.planner.hardware.cluster import Fabric
from trainspec_cli.planner.hardware.rates import build_accelerator, load_group
from trainspec_cli.planner.memory.engine.blocks import Shape, mixer_kernels
from trainspec_cli.planner.time.step import EAGER_CAST_BYTES, EAGER_CAST_KERNELS, gemm_s
from trainspec_cli.planner.workload import Gemm
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, LatentAttentionSpec
from trainspec_cli.wings.emulated import Settings
from trainspec_cli.wings.emulated.engine.costs import ATTENTION, ChipCosts, VirtualTime, costs_of, traffic_bytes

FREE = ("empty", "new_empty", "detach", "_unsafe_view")
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
H100 = load_group("accelerator", build_accelerator)["h100_sxm"]


class Traffic(TorchDispatchMode):
    """Sums the traffic of operations other than matrix products and attention."""

    nbytes = 0
    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in (*PRODUCTS, *ATTENTION) and not name.startswith(FREE) and not func.is_view:
            self.nbytes += traffic_bytes(func, args, kwargs or {}, result)
            self.kernels += 1
        return result


def test_a_norm_takes_the_traffic_of_one_kernel_per_direction() -> None:
    x = torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(512, dtype=torch.bfloat16, requires_grad=True)
    with kernels_of("gpu"):
        with Traffic() as forward:
            y = F.rms_norm(x, (512,), weight)
        dy = torch.ones_like(y)
        with Traffic() as backward:
            torch.autograd.grad(y, (x, weight), dy)
    assert forward.nbytes == pytest.approx(4 * x.numel(), rel=0.01)
    assert backward.nbytes == pytest.approx(6 * x.numel(), rel=0.01)


def test_products_in_fp8_take_half_the_time_of_those_in_bf16() -> None:
    costs = ChipCosts(H100, Fabric(H100, 1, 1, 1, 900, 400))
    first = torch.empty(8192, 8192, device="meta")
    seconds = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        op = torch.ops.aten.mm.default if dtype == torch.bfloat16 else torch.ops.aten._scaled_mm.default
        seconds[dtype] = costs.operation_s(op, (first.to(dtype), first.to(dtype).t()), {}, first.bfloat16())
    assert seconds[torch.float8_e4m3fn] == seconds[torch.float8_e5m2]
    assert 0.45 < seconds[torch.float8_e4m3fn] / seconds[torch.bfloat16] < 0.65


def test_a_cast_to_fp8_has_the_planned_traffic_and_kernels() -> None:
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    with Traffic() as cast:
        scaling.hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, None)
    # The product adds a padded copy, and the reciprocal of the scale.
    assert cast.nbytes == pytest.approx((EAGER_CAST_BYTES - 2) * x.numel(), rel=0.01)
    assert cast.kernels == EAGER_CAST_KERNELS - 2


@pytest.mark.parametrize("wide", [True, False])
def test_products_of_a_layer_take_the_planned_time_in_both_directions(wide: bool) -> None:
    """Also if a dimension does not fill the tiles: the gradient of the weights is contiguous along the inputs."""
    tokens, outputs, inputs = 1728, 18_992, 1024
    costs = ChipCosts(H100, Fabric(H100, 1, 1, 1, 900, 400))
    op = torch.ops.aten.mm.default
    size = (tokens, outputs, inputs) if wide else (tokens, inputs, outputs)
    x, weight, dy = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((size[0], size[2]), (size[1], size[2]), (size[0], size[1]))
    )
    factors = ((x, weight.t()), (dy, weight), (dy.t(), x))
    expected = gemm_s(Gemm(*size, wide=False), costs.rates(torch.bfloat16), costs.eff)
    assert [costs.operation_s(op, both, {}, None) for both in factors] == pytest.approx(expected)


def test_attention_runs_at_the_rate_of_kernels_for_an_older_chip() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.empty(1, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
    seconds = [
        ChipCosts(H100, Fabric(H100, 1, 1, 1, 900, 400), attention_generation=generation).operation_s(
            op, (query, query, query, 0.0, True), {}, None
        )
        for generation in (2, 3)
    ]
    assert seconds[0] > 1.2 * seconds[1]


@pytest.mark.parametrize("way", ["forward", "inputs", "weights"])
def test_the_products_of_all_experts_take_the_time_of_one_launch(way: str) -> None:
    """The rate is that of the plan, not that of convolutions."""
    rows, hidden, width, experts = 8192, 4096, 1024, 8
    gemm = Gemm(rows / experts, width, hidden, experts, wide=False)
    shapes = {
        "forward": ((rows, hidden), (experts, hidden, width)),
        "inputs": ((rows, width), (experts, width, hidden)),
        "weights": ((hidden, rows), (rows, width)),
    }
    first, second = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes[way])
    costs = ChipCosts(H100, Fabric(H100, 1, 1, 1, 900, 400))
    ends = torch.empty(experts, dtype=torch.int32, device="meta")
    op = torch.ops.aten._grouped_mm.default
    expected = dict(zip(shapes, gemm_s(gemm, costs.rates(torch.bfloat16), costs.eff), strict=True))
    assert costs.operation_s(op, (first, second, ends), {}, None) == pytest.approx(expected[way])


def test_a_convolution_of_single_channels_takes_the_time_of_its_traffic() -> None:
    """Mamba's convolutions over time: the FLOPs of a gradient are those of the channel's own taps."""
    costs = ChipCosts(H100, Fabric(H100, 1, 1, 1, 900, 400))
    x = torch.empty(1, 4096, 8195, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 1, 4, dtype=torch.bfloat16, device="meta")
    geometry = ([1], [0], [1], False, [0], 4096)
    y = torch.ops.aten.convolution(x, weight, None, *geometry)
    backward = torch.ops.aten.convolution_backward.default
    args = (y, x, weight, [4096], *geometry, [True, True, True])
    seconds = costs.operation_s(backward, args, {}, backward(*args))
    assert seconds == pytest.approx(costs.memory_s(2 * 3 * x.numel()), rel=0.01)


SMALL = DecoderModel(2, 512, 8, 4, 64, 1024, 1000)
GPT_OSS = {"attention_bias": "all", "attention_sinks": True}
BLOCKS = {
    "dense": SMALL,
    "norms of queries and keys": replace(SMALL, qk_norm=True),
    "sinks and biases": replace(SMALL, **GPT_OSS),
    "sinks in windows": replace(SMALL, sliding_window=128, global_attention_every=0, **GPT_OSS),
    "latent": replace(SMALL, num_kv_heads=8, mla=LatentAttentionSpec(128, 256, 64, 32, 64)),
    "experts": replace(SMALL, experts=ExpertSpec(4, 2, 1024)),
    "shared experts": replace(SMALL, experts=ExpertSpec(4, 2, 1024, shared_experts=1)),
    "biased experts": replace(SMALL, gate_limit=7.0, experts=ExpertSpec(4, 2, 1024, bias=True)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_plan_counts_the_operations_of_a_block(name: str) -> None:
    model = BLOCKS[name]
    tokens = 512
    layer = model.layer_list[0]
    block = Block(model, 0).bfloat16()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotation = (torch.ones(tokens, model.rotated_size, dtype=torch.bfloat16),) * 2
    with kernels_of("gpu"):
        with Traffic() as forward:
            y = block(x, *rotation)
        dy = torch.ones_like(y)
        with Traffic() as backward:
            torch.autograd.grad(y, (x, *block.parameters()), dy)
    shape = Shape(model, layer, Layout(), 2, tokens, 2.0)
    for way, found in enumerate((forward, backward)):
        counted = sum((mixer_kernels(shape, mixer)[way] for mixer in layer.mixers), Counter[float]())
        moved = sum(each * number for each, number in counted.items())
        assert moved == pytest.approx(found.nbytes, rel=0.03)
        assert counted.total() == pytest.approx(found.kernels, rel=0.1)


def test_a_copy_that_changes_the_format_moves_both_ends() -> None:
    time = VirtualTime()
    time.costs = costs_of(Settings(time="h100_sxm"), {})
    assert time.costs is not None
    assert time.copy_s(6_000_000, inside=True) == time.costs.memory_s(6_000_000)
    assert time.copy_s(50_000, inside=False) == pytest.approx(1e-6)
