"""The probe on this machine, with two processes: that its figures make sense, not how large they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab import measured

from trainspec_cli.engine.models.decoder import Block
from trainspec_cli.engine.models.rope import rope_angles
from trainspec_cli.planner.this_machine import activation_bytes_per_token
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.run.folder.event_types.events import PARTS


@pytest.fixture(scope="module")
def probe(measured_cache: Path) -> MachineProbe:
    return measured.read_probe(measured_cache)


def test_every_figure_is_there(probe: MachineProbe) -> None:
    plan, _ = measured.probed()
    assert (probe.processes, probe.compute) == (2, plan.compute)
    assert set(probe.empty_step_s) == set(probe.empty_block_s) == set(PARTS)
    # A busy machine may leave nothing for the step itself once its two blocks are taken off.
    assert probe.empty_step_s["forward"] + 2 * probe.empty_block_s["forward"] > 0
    assert probe.bare_bytes > 50 * 2**20
    assert 0 <= probe.displaced < 1
    assert probe.peak_flops > 1e8


def test_the_references_were_trained(probe: MachineProbe) -> None:
    small, large = probe.references
    assert small.plan.params < large.plan.params
    assert large.plan.world_size == 2
    for part in ("forward", "backward", "exposed_comm", "optimizer"):
        assert small.parts_s[part] > 0
    assert small.parts_s["backward"] < large.parts_s["backward"]
    assert large.grown_bytes > 16 * large.plan.params  # fp32 parameters, gradients, two moments


def test_more_work_takes_longer(probe: MachineProbe) -> None:
    """Sizes differ by factors of a thousand, so that the load of other programs cannot reverse the order."""
    curves = (probe.matmul.forward, probe.matmul.weight_gradient, probe.norm.backward, probe.loss, probe.optimizer)
    for curve in (*curves, probe.cast, probe.add, probe.swiglu.forward):
        assert 0 < curve.seconds[0] < curve.seconds[-1]


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_block_saves_what_the_planner_says(compute: str, kv_heads: int) -> None:
    model = DecoderModel(1, 64, 4, kv_heads, 16, 96, 100)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    block, tokens = Block(model, 0).to(dtype), 32
    angles = torch.cat([rope_angles(16, 16, 1e4)] * 2, dim=-1).to(dtype)
    cos_SE, sin_SE = angles.cos(), angles.sin()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), cos_SE, sin_SE)}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x_BSD = torch.randn(2, 16, 64, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x_BSD, cos_SE, sin_SE)
    total = sum(size for pointer, size in saved.items() if pointer not in own)
    assert total == tokens * activation_bytes_per_token(model, compute)
