"""Every backend that this machine can run, forward and gradients, against fp64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine.kernels.shapes import CALLS, DEVICE, PARAMETERS
from lab.drawing import slow_after
from torch.nn.attention import SDPBackend

from trainspec_cli.engine.build.assemble import load_kernel
from trainspec_cli.engine.kernels import adamw, attention
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.tools.kernels import SUM_ERROR, call_error, reference, update_error
from trainspec_cli.recipe.keys.kernels import KERNELS, TORCH
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.recipe.rules.check import explain

pytestmark = pytest.mark.usefixtures("compile_anew")

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FP32_EPS = torch.finfo(torch.float32).eps
ROUNDINGS = {"ssd_scan": 2}
"""To the format, one after the other: the scan's states, and what they become."""
EXPONENTS = {"ssd_scan": 256 * 0.1 * 16}
"""As large they get (tokens of a block, step, decay), and exp() is wrong by so many of their roundings."""
OPERATIONS = [(op, name) for op in CALLS for name in KERNELS[op]]


def marked(op: str, name: str, dtype: torch.dtype):
    """The scan's loops take the compiler a minute, and each other operation ten seconds for each format."""
    marks = [pytest.mark.slow] if name == "compiled" else []
    return pytest.param(op, name, dtype, marks=marks, id=f"{op}-{name}-{FORMATS[dtype]}")


def skip_where_it_cannot_run(op: str, name: str) -> None:
    reason = explain(KERNELS[op][name], on_gpu=DEVICE.type == "cuda")
    if reason:
        pytest.skip(f"{op} {name}: {reason}")


@pytest.mark.parametrize(("op", "name", "dtype"), [marked(*pair, dtype) for pair in OPERATIONS for dtype in FORMATS])
def test_output_and_gradients_err_as_the_format_does(op: str, name: str, dtype: torch.dtype) -> None:
    """Roundings to the format, and the error of sums, which all take in fp32, as the scan does its decays."""
    skip_where_it_cannot_run(op, name)
    kernel = load_kernel(op, name)
    allowed = ROUNDINGS.get(op, 1) * torch.finfo(dtype).eps + SUM_ERROR + EXPONENTS.get(op, 0) * FP32_EPS
    for call in CALLS[op]:
        assert call_error(op, kernel, call, dtype, DEVICE, ChunkCrossEntropy()) <= allowed


@pytest.mark.parametrize("name", slow_after(3, KERNELS["adamw"]))
def test_updates_err_as_fp32_does(name: str) -> None:
    skip_where_it_cannot_run("adamw", name)
    optim = OptimSpec(lr=1e-2, weight_decay=0.1)
    error = update_error(load_kernel("adamw", name), list(PARAMETERS), optim, DEVICE)
    assert error <= torch.finfo(torch.float32).eps + SUM_ERROR


@pytest.mark.parametrize("name", KERNELS["adamw"])
def test_no_update_where_something_is_not_finite(name: str) -> None:
    skip_where_it_cannot_run("adamw", name)
    parameter = torch.nn.Parameter(torch.ones(8, 8, device=DEVICE), requires_grad=False)
    optimizer = load_kernel("adamw", name)([{"params": [parameter], "weight_decay": 0.1}], 0.1, (0.9, 0.95), 1e-8)
    moments = {"step": torch.zeros((), device=DEVICE)}
    moments |= {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = moments
    parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.found_inf = torch.ones((), device=DEVICE)
    optimizer.step()
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert moments["step"] == 0


def test_every_operation_of_the_table_is_tested() -> None:
    assert {*CALLS, "adamw"} == set(KERNELS)
    assert all(TORCH in backends for backends in KERNELS.values())


@pytest.mark.parametrize("op", sorted(CALLS.keys() - {"linear_cross_entropy"}))
def test_the_default_in_fp64_is_the_reference(op: str) -> None:
    """Neither is written after the other. The loss is summed in fp32 whatever the format: see above."""
    for call in CALLS[op]:
        assert call_error(op, load_kernel(op, TORCH), call, torch.float64, torch.device("cpu")) < 1e-12


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("math", SDPBackend.MATH),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ],
)
def test_an_attention_backend_is_the_kernel_of_its_name(
    name: str, kernel: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SDPBackend] = []
    monkeypatch.setattr(attention, "sdpa_kernel", lambda wanted: asked.append(wanted) or nullcontext())
    q = torch.randn(1, 4, 3, 8)
    k, v = (torch.randn(1, 2, 3, 8) for _ in range(2))
    found = getattr(attention, name)(q, k, v, None, 0.3)
    assert asked == [kernel]
    torch.testing.assert_close(found, reference("attention", q, k, v, None, 0.3))


@pytest.mark.parametrize("foreach", [0, 1])
def test_a_guard_holds_for_one_update_alone(foreach: int) -> None:
    """The scale and the infinity of one step do not apply to the next one."""
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer: Any = adamw.looped([{"params": [parameter], "weight_decay": 0.0}], 0.1, (0.0, 0.0), 1e-8, foreach)
    for found_inf, scale, moved in ((1.0, 4.0, 0.0), (0.0, 4.0, -0.1), (None, None, -0.2)):
        parameter.grad = torch.full((2,), 8.0)
        if found_inf is not None:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), torch.tensor(scale)
        optimizer.step()
        assert parameter.tolist() == pytest.approx([moved] * 2)
    assert parameter.grad.tolist() == [8.0, 8.0], "undivided"
