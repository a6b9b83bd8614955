"""What the kernels for GPUs alone ask of their libraries, whose stand-ins here compute it plainly."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine.kernels.shapes import CALLS
from torch import Tensor

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.kernels import attention, libraries
from trainspec_cli.engine.tools.kernels import make_inputs, reference

CPU = torch.device("cpu")


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    made = ModuleType(module)
    for name, value in names.items():
        setattr(made, name, value)
    for parent in [module[:index] for index, letter in enumerate(module) if letter == "."]:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, module, made)


def inputs_of(op: str, call: int) -> tuple[Any, ...]:
    return make_inputs(op, CALLS[op][call], torch.float64, CPU).arguments  # type: ignore[index]


def assert_reference(op: str, kernel: Any) -> None:
    for call in range(len(CALLS[op])):
        arguments = inputs_of(op, call)
        kept = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
        torch.testing.assert_close(kernel(*arguments), reference(op, *kept))
        for argument, before in zip(arguments, kept, strict=True):
            assert not isinstance(argument, Tensor) or torch.equal(argument, before), "inputs are not written over"


class Norm:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
        """The interface of Liger: `in_place` writes the gradient over dy."""
        assert (offset, casting, in_place) == (0.0, "llama", False)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class Turn:
    @staticmethod
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The interface of Liger: (B, H, S, E) in place, with tables (1, S, E)."""
        assert k.shape == (q.shape[0], 1, *q.shape[2:])
        assert cos.shape == sin.shape == (1, *q.shape[2:])
        first, second = q.chunk(2, dim=-1)
        turned = q * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
        return q.copy_(turned), k, cos, sin


class Gate:
    @staticmethod
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


def test_ligers_operations_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=Norm)
    assert_reference("rms_norm", libraries.rms_norm)
    stand_in(monkeypatch, "liger_kernel.ops.swiglu", LigerSiLUMulFunction=Gate)
    assert_reference("swiglu", libraries.swiglu)
    stand_in(monkeypatch, "liger_kernel.ops.rope", LigerRopeFunction=Turn)
    assert_reference("rope", libraries.rope)


def test_ligers_loss_is_summed_without_ignored_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Tensor, weight: Tensor, targets: Tensor, *, accum_dtype: torch.dtype, **options: Any) -> Tensor:
        assert accum_dtype == torch.float32, "the head's gradient is summed over chunks"
        return F.cross_entropy(x @ weight.T, targets, **options)

    stand_in(monkeypatch, "liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=loss)
    x, weight, targets, _ = inputs_of("linear_cross_entropy", 0)
    assert (targets == IGNORED_TARGET).sum() == 6
    found = libraries.linear_cross_entropy(x, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), reference("linear_cross_entropy", x, weight, targets, None), rtol=1e-6, atol=0
    )


def gated_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> tuple[Tensor, None]:
    """The interface of fla: S_t = exp(g_t) S_(t-1) + k_t v_t^T, read by scale q_t; (B, S, H, N) and (B, S, H, P)."""
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state + k[:, t, ..., None] * v[:, t, :, None]
        outputs.append((scale * q[:, t, ..., None] * state).sum(-2))
    return torch.stack(outputs, dim=1), None


def test_flas_scan_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "fla.ops.simple_gla", chunk_simple_gla=gated_attention)
    assert_reference("ssd_scan", libraries.ssd_scan)


@pytest.mark.slow
def test_flex_attentions_masks_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled: causal, grouped heads, documents, a window's blocks; without gradients it is torch's own choice."""
    from torch.nn.attention.flex_attention import flex_attention

    used: list[Any] = []
    monkeypatch.setattr(attention, "_flex_attention", lambda: lambda *a, **k: used.append(1) or flex_attention(*a, **k))
    assert_reference("attention", attention.flex)
    assert len(used) == len(CALLS["attention"])
    with torch.no_grad():
        assert_reference("attention", attention.flex)
    assert len(used) == len(CALLS["attention"])
