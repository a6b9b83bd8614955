"""A kernel that is wrong, slow or broken is never chosen; one that is right and fast is."""

from __future__ import annotations

import time

import pytest
import torch
from engine.kernels.shapes import DEVICE, PARAMETERS

from trainspec_cli.engine.build.assemble import load_kernel
from trainspec_cli.engine.tools import kernels as kernel_trial
from trainspec_cli.engine.tools.kernels import operation, optimizer_update, try_kernels
from trainspec_cli.recipe.keys.kernels import TORCH
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.run.tools import judge_operation

pytestmark = pytest.mark.usefixtures("compile_anew")


@pytest.fixture(autouse=True)
def _own_time(monkeypatch):
    """Seconds that this process has computed: neighbours may take the machine, and the clock with it."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernel_trial, "clock", time.process_time)


CALLS = {((4, 256, 704), (4, 256, 704)): 6}
default = load_kernel("swiglu", TORCH)


def verdicts(**planted):
    """Return the verdicts on backends planted next to torch's default."""
    workload = operation("swiglu", CALLS, torch.bfloat16, DEVICE)
    figures = judge_operation([try_kernels({TORCH: default, **planted}, workload)])
    return {name: figure for name, figure in figures.items() if name != TORCH}


def scaled(gate, up):
    return default(gate, up) * 1.02


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return default(gate, up)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return dy * up * torch.sigmoid(gate), dy * torch.nn.functional.silu(gate)


def not_a_number(gate, up):
    return default(gate, up) * torch.nan


def slow(gate, up):
    for _ in range(20):
        out = default(gate, up)
    return out


def broken(gate, up):
    raise RuntimeError("no kernel for this chip\nand more words")


@pytest.mark.parametrize("wrong", [scaled, _WrongGradient.apply, not_a_number], ids=["output", "gradient", "nan"])
def test_a_wrong_kernel_is_never_chosen_however_fast(wrong):
    figure = verdicts(planted=wrong)["planted"]
    assert figure.verdict == "wrong"
    assert "against fp64" in figure.reason
    assert figure.ratio is None


def test_a_slow_kernel_is_not_chosen():
    figure = verdicts(planted=slow)["planted"]
    assert figure.verdict == "not faster"
    assert figure.ratio > 1.2


def test_a_kernel_that_raises_is_told_in_its_own_words():
    figure = verdicts(planted=broken)["planted"]
    assert (figure.verdict, figure.reason) == ("failed", "RuntimeError: no kernel for this chip")


def test_a_right_and_faster_kernel_is_chosen():
    workload = operation("swiglu", CALLS, torch.bfloat16, DEVICE)
    figures = judge_operation([try_kernels({TORCH: slow, "planted": default}, workload)])
    assert figures["planted"].verdict == "chosen"
    assert figures["planted"].ratio < 0.8


def test_the_default_is_not_chosen_over_itself():
    assert verdicts(same=default)["same"].verdict != "wrong"
    assert verdicts(same=default)["same"].ratio == pytest.approx(1.0, abs=0.5)


def test_a_wrong_update_is_never_chosen():
    def twice_as_far(groups, lr, betas, eps):
        return load_kernel("adamw", TORCH)(groups, 2 * lr, betas, eps)

    def other_clipping(groups, lr, betas, eps):
        return load_kernel("adamw", TORCH)(groups, lr, betas, 100 * eps + 1e-4)

    workload = optimizer_update(PARAMETERS, OptimSpec(lr=1e-2), DEVICE)
    kernels = {TORCH: load_kernel("adamw", TORCH), "far": twice_as_far, "eps": other_clipping}
    figures = judge_operation([try_kernels(kernels, workload)])
    assert {name: figure.verdict for name, figure in figures.items()} == {
        TORCH: "default",
        "far": "wrong",
        "eps": "wrong",
    }
