"""What numbers lose on the wire is within half a step of their block, and how many bytes they take there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS, PARAMETER_CODECS, Bf16, Integers, _hadamard, _rotate

INTEGERS = [codec for codec in (*GRADIENT_CODECS.values(), *PARAMETER_CODECS.values()) if isinstance(codec, Integers)]
ROUNDED = 1 + 2**-8
"""A scale in bf16 over the exact one, at most."""


def drawn(seed: int, rows: int, values: int, scale: float) -> Tensor:
    """Heavy tails, as gradients have: a normal over a uniform number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, values, generator=generator) / torch.rand(rows, values, generator=generator).clamp_min(1e-3)
    return x * scale


def half_steps(codec: Integers, x_RN: Tensor) -> Tensor:
    """(R, K): the most that a value of each block may be wrong by, as the codec's docstring states it."""
    whole = torch.nn.functional.pad(x_RN, (0, -x_RN.shape[1] % codec.block))
    blocks = (_rotate(whole) if codec.rotates else whole).view(len(x_RN), -1, codec.block)
    return blocks.abs().amax(-1) / codec.largest / 2 * ROUNDED


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 3), values=st.integers(1, 2500), power=st.integers(-30, 12))
def test_no_value_is_wrong_by_more_than_half_a_step(
    codec: Integers, seed: int, rows: int, values: int, power: int
) -> None:
    """A rotation keeps Euclidean norms, so there the block as a whole is within what its values are."""
    x_RN = drawn(seed, rows, values, 10.0**power)
    lost = codec.decode(codec.encode(x_RN), values) - x_RN
    bound_RK = half_steps(codec, x_RN)
    blocks = torch.nn.functional.pad(lost, (0, -values % codec.block)).view(rows, -1, codec.block)
    if codec.rotates:
        assert (blocks.norm(dim=-1) <= bound_RK * codec.block**0.5 * 1.0001).all()
    else:
        assert (blocks.abs().amax(-1) <= bound_RK * 1.0001).all()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_the_sum_of_rows_is_that_of_each_decoded(name: str) -> None:
    codec, x_RN = GRADIENT_CODECS[name], drawn(1, 4, 700, 1e-4)
    wire_RB = codec.encode(x_RN)
    each = codec.decode(wire_RB, 700)
    torch.testing.assert_close(codec.sum(wire_RB, 700), each.sum(0), rtol=0, atol=1e-6 * float(each.abs().max()))


@pytest.mark.parametrize(("codec", "bits"), [(Bf16(), 16.0), (GRADIENT_CODECS["int8"], 8.125)])
def test_bytes_of_a_value(codec: Integers, bits: float) -> None:
    assert codec.encode(torch.ones(1, 2**14)).numel() * 8 / 2**14 == bits


def test_four_bits_take_less_than_a_twentieth_more() -> None:
    assert GRADIENT_CODECS["int4"].encode(torch.ones(1, 2**14)).numel() * 8 / 2**14 == 4.125
    assert PARAMETER_CODECS["int8"].encode(torch.ones(1, 2**14)).numel() * 8 / 2**14 == 8 + 16 / 2048


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
def test_zeros_stay_and_are_alone_with_what_is_too_small_to_divide_by(codec: Integers) -> None:
    x = torch.zeros(2, 3000)
    x[1] = 1e-44
    assert not codec.decode(codec.encode(x), 3000).any()


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(codec: Integers, bad: float) -> None:
    """A step is skipped by the norm of its gradients."""
    x = drawn(3, 1, 3000, 1.0)
    x[0, 2500] = bad
    decoded = codec.decode(codec.encode(x), 3000)
    assert not decoded.isfinite().all()
    assert decoded[:, :2048].isfinite().all()


def test_largest_values_are_exact_where_the_scale_is() -> None:
    x = torch.tensor([[127.0, -127.0, 64.0, 1.0, 0.4]])
    assert Integers(8, 8).decode(Integers(8, 8).encode(x), 5).tolist() == [[127.0, -127.0, 64.0, 1.0, 0.0]]
    x = torch.tensor([[7.0, -7.0, 3.0, -1.0, 0.4, 0.0, -4.0, 5.0]])
    four = Integers(4, 8)
    assert four.decode(four.encode(x), 8).tolist() == [[7.0, -7.0, 3.0, -1.0, 0.0, 0.0, -4.0, 5.0]]
    assert four.encode(x).shape == (1, 2 + 4)


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
    plain, rotated = Integers(4, 128), GRADIENT_CODECS["int4"]
    errors = [(codec.decode(codec.encode(x), 1280) - x)[others].norm() for codec in (plain, rotated)]
    assert not plain.decode(plain.encode(x), 1280)[others].any()
    assert errors[1] < errors[0]
