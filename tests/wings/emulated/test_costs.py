"""Virtual durations follow from what a GPU's kernels read, write and multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainspec_cli.engine.tools.trace import kernels_of
from trainspec_cli.planner.hardware.cluster import Fabric
from trainspec_cli.planner.hardware.rates import build_accelerator, load_group
from trainspec_cli.wings.emulated import Settings
from trainspec_cli.wings.emulated.engine.costs import ChipCosts, VirtualTime, costs_of, traffic_bytes

H100 = load_group("accelerator", build_accelerator)["h100_sxm"]


class Traffic(TorchDispatchMode):
    """Sums the traffic of operations."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.overloadpacket.__name__.startswith(("empty", "new_empty", "detach")):
            self.nbytes += traffic_bytes(func, args, kwargs or {}, result)
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


def test_a_copy_that_changes_the_format_moves_both_ends() -> None:
    time = VirtualTime()
    time.costs = costs_of(Settings(time="h100_sxm"), {})
    assert time.costs is not None
    assert time.copy_s(6_000_000, inside=True) == time.costs.memory_s(6_000_000)
    assert time.copy_s(50_000, inside=False) == pytest.approx(1e-6)
