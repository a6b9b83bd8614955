"""Numbers on the wire: errors within half a step of their block, and their bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainspec_cli.engine.comm.codec import (
    GRADIENT_CODECS,
    PARAMETER_CODECS,
    Bf16,
    Codec,
    EightBits,
    FourBits,
    _hadamard,
    _rotate,
)

INTEGERS = [
    codec
    for codec in (*GRADIENT_CODECS.values(), *PARAMETER_CODECS.values())
    if isinstance(codec, EightBits | FourBits)
]


def drawn(seed: int, rows: int, values: int, scale: float) -> Tensor:
    """Draw from heavy tails, as gradients have them: a normal over a uniform number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, values, generator=generator) / torch.rand(rows, values, generator=generator).clamp_min(1e-3)
    return x * scale


def in_blocks(x_RN: Tensor, codec: EightBits | FourBits) -> Tensor:
    """Return (R, K, V), as the codec rounds them."""
    whole = torch.nn.functional.pad(x_RN, (0, -x_RN.shape[1] % codec.block))
    return (_rotate(whole) if isinstance(codec, FourBits) else whole).view(len(x_RN), -1, codec.block)


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 3), values=st.integers(1, 2500), power=st.integers(-30, 12))
def test_no_value_is_wrong_by_more_than_half_a_step(
    codec: EightBits | FourBits, seed: int, rows: int, values: int, power: int
) -> None:
    """The codec's docstring states the step. The padding is no part of what is decoded: whole blocks are compared."""
    values += -values % codec.block
    x_RN = drawn(seed, rows, values, 10.0**power)
    lost_RKV = in_blocks(codec.decode(codec.encode(x_RN), values) - x_RN, codec)
    largest_RK = in_blocks(x_RN, codec).abs().amax(-1)
    step_RK = largest_RK / 8 * 2**0.125 if isinstance(codec, FourBits) else largest_RK / 127 * (1 + 2**-8)
    assert (lost_RKV.abs().amax(-1) <= step_RK / 2 * 1.0001 + largest_RK * 1e-5).all()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_the_sum_of_rows_is_that_of_each_decoded(name: str) -> None:
    codec, x_RN = GRADIENT_CODECS[name], drawn(1, 4, 700, 1e-4)
    wire_RB = codec.encode(x_RN)
    each = codec.decode(wire_RB, 700)
    alone = torch.cat([codec.decode(row[None], 700) for row in wire_RB])
    assert torch.equal(alone, each), "a row is decoded without the others"
    torch.testing.assert_close(codec.sum(wire_RB, 700), each.sum(0), rtol=0, atol=1e-6 * float(each.abs().max()))


@pytest.mark.parametrize(("codec", "bits"), [(Bf16(), 16.0), (GRADIENT_CODECS["int8"], 8.125)])
def test_bytes_of_a_value(codec: Codec, bits: float) -> None:
    assert codec.encode(torch.ones(1, 2**14)).numel() * 8 / 2**14 == bits


def test_bytes_of_blocks_and_of_a_row() -> None:
    assert GRADIENT_CODECS["int4"].encode(torch.ones(1, 2**14)).numel() * 8 == 4.125 * 2**14 + 32
    assert PARAMETER_CODECS["int8"].encode(torch.ones(1, 2**14)).numel() * 8 / 2**14 == 8 + 16 / 2048


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
def test_zeros_stay_and_are_alone_with_what_is_too_small_to_divide_by(codec: Codec) -> None:
    x = torch.zeros(2, 3000)
    x[1] = 1e-44
    assert not codec.decode(codec.encode(x), 3000).any()


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(codec: Codec, bad: float) -> None:
    """A step is skipped by the norm of its gradients."""
    x = drawn(3, 1, 3000, 1.0)
    x[0, 2500] = bad
    decoded = codec.decode(codec.encode(x), 3000)
    assert not decoded.isfinite().all()
    assert decoded[:, :2048].isfinite().all()


def test_largest_values_are_exact_where_the_scale_is() -> None:
    x = torch.tensor([[127.0, -127.0, 64.0, 1.0, 0.4]])
    assert EightBits(8).decode(EightBits(8).encode(x), 5).tolist() == [[127.0, -127.0, 64.0, 1.0, 0.0]]


def test_sixteen_levels_are_all_in_use_and_lie_in_the_middles_of_steps() -> None:
    levels = torch.arange(-7.5, 8)
    rotated = torch.cat([levels, levels * (8 / 7.5)]).repeat(2)[None]
    decoded = _rotate(FourBits().decode(FourBits().encode(_rotate(rotated)), 64))
    torch.testing.assert_close(decoded[0, :16], levels, rtol=1e-5, atol=1e-5)
    assert len(decoded[0, :32].mul(2).round().unique()) == 16


def test_a_block_keeps_its_own_step_beside_a_far_larger_one() -> None:
    """Embeddings of rare tokens are next to those of frequent ones."""
    small = drawn(2, 1, 64, 1e-6)
    x = torch.cat([drawn(1, 1, 64, 1.0), small, drawn(4, 1, 64, 1e-12)], dim=1)
    decoded = FourBits().decode(FourBits().encode(x), 192)
    assert float((decoded[:, 64:128] - small).norm() / small.norm()) < 0.2
    assert not decoded[:, 128:].any(), "the steps span 31 octaves, and these are farther below"


def test_the_rotation_is_its_own_inverse() -> None:
    matrix = _hadamard(torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(32), rtol=0, atol=1e-6)
    assert set((matrix * 32**0.5).round().flatten().tolist()) == {1.0, -1.0}


def test_a_rotation_spreads_an_outlier() -> None:
    """Four bits without it lose the neighbours of a large value."""
    x = drawn(5, 1, 1280, 1.0).clamp(-3, 3)
    x[0, ::128] = 100.0
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, ::32] = False
    codec = FourBits()
    rotated, plain = (turn(codec.decode(codec.encode(turn(x)), 1280)) for turn in (lambda x: x, _rotate))
    assert float((rotated - x)[others].norm()) < 0.5 * float((plain - x)[others].norm())
