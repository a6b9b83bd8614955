"""Other kernels in whole models: the same loss and gradients."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.drawing import slow_after

import trainspec_cli.engine
from trainspec_cli.engine.build.assemble import apply_kernels, build_model, load_kernel, modules_with
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.recipe.keys.kernels import KERNELS, TORCH, KernelSpec

pytestmark = pytest.mark.usefixtures("compile_anew")

OTHERS = KernelSpec(
    attention="expanded",
    rms_norm="frugal",
    swiglu="frugal",
    rope="halves",
    linear_cross_entropy="full",
    grouped_matmul="loop",
    ssd_scan="block_32",
)
FUSED = KernelSpec(rms_norm="compiled", swiglu="compiled", rope="compiled")
SEQ_LEN = 48


def made(name: str):
    torch.manual_seed(0)
    model = build_model(models()[name], SEQ_LEN)
    model.init_buffers()
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        model.init_parameter(parameter_name, parameter.data, generator)
    return model


def loss_and_gradients(model):
    tokens = torch.randint(0, 512, (2, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    loss = model(tokens, tokens.roll(-1, 1))
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def assert_same(plain, other) -> None:
    (loss, gradients), (found, found_gradients) = loss_and_gradients(plain), loss_and_gradients(other)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    for gradient, found_gradient in zip(gradients, found_gradients, strict=True):
        assert float((found_gradient - gradient).norm()) < 1e-5 * (float(gradient.norm()) or 1.0)


@pytest.mark.parametrize("recompute", slow_after(4, ["none", "selective", "full"]))
@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_tiny", "moe_tiny", "mamba2_tiny", "hybrid_tiny"])
def test_models_compute_the_same(name: str, recompute) -> None:
    plain, other = made(name), made(name)
    apply_kernels(other, OTHERS)
    apply_recompute(other.block_modules(), recompute)
    assert_same(plain, other)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_kernels_in_eager_blocks(recompute) -> None:
    plain, other = made("llama_tiny"), made("llama_tiny")
    apply_kernels(other, FUSED)
    apply_recompute(other.block_modules(), recompute)
    assert_same(plain, other)


@pytest.mark.slow
@pytest.mark.clause("NUM-5")
@pytest.mark.parametrize("kernels", [OTHERS, FUSED], ids=["others", "fused"])
def test_other_kernels_in_compiled_blocks(kernels: KernelSpec) -> None:
    plain, other = made("llama_tiny"), made("llama_tiny")
    apply_kernels(other, kernels)
    for module in other.compile_modules():
        module.compile()
    assert_same(plain, other)


@pytest.mark.slow
def test_nothing_is_compiled_for_shapes_of_evaluation() -> None:
    torch._dynamo.utils.counters.clear()
    swiglu = load_kernel("swiglu", "compiled")
    with torch.no_grad():
        for size in range(1, 20):
            x = torch.randn(size, 8)
            assert torch.equal(swiglu(x, x), load_kernel("swiglu", TORCH)(x, x))
    assert not torch._dynamo.utils.counters["frames"]


def test_the_default_leaves_every_module_alone() -> None:
    model = made("hybrid_tiny")
    before = [dict(vars(module)) for module in model.modules()]
    apply_kernels(model, KernelSpec())
    assert [dict(vars(module)) for module in model.modules()] == before


def test_no_kernel_is_imported_before_it_is_used() -> None:
    """Some import a compiler or a library; the table names them as text."""
    engine = Path(trainspec_cli.engine.__file__).parent
    importing = re.compile(r"^(?:from|import) trainspec_cli\.engine\.kernels\b", re.MULTILINE)
    files = {file.relative_to(engine).parts[0] for file in engine.rglob("*.py") if importing.search(file.read_text())}
    assert files == set()


@pytest.mark.parametrize("op", [op for op in KERNELS if op != "adamw"])
def test_every_operation_of_the_table_is_some_modules(op: str) -> None:
    """The name in the table is the attribute's."""
    found = [module for name in ("moe_tiny", "hybrid_tiny") for module in modules_with(made(name), op)]
    assert found
    assert all(getattr(module, op) is load_kernel(op, TORCH) for module in found)


def test_a_name_replaces_one_operation_alone() -> None:
    model = made("llama_tiny")
    apply_kernels(model, replace(KernelSpec(), rope="halves"))
    assert all(module.rope is load_kernel("rope", "halves") for module in modules_with(model, "rope"))
    assert all(module.attention is load_kernel("attention", TORCH) for module in modules_with(model, "attention"))
