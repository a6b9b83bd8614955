"""4-bit NormalFloat against its definition, and what it leaves of a matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainspec_cli.engine.nf4 import NF4, Nf4, Place, dequantise, magnitude_table, pair_table, quantise, shapes_of


def whole(held: Nf4, place: Place = Place(), dtype: torch.dtype = torch.float32) -> Tensor:  # noqa: B008
    return dequantise(held, place, pair_table("cpu"), magnitude_table("cpu"), dtype)


def drawn(rows: int, columns: int) -> Tensor:
    """Normal weights, of another size in each row."""
    generator = torch.Generator().manual_seed(3)
    size = torch.rand((rows, 1), generator=generator) + 0.1
    return torch.randn((rows, columns), generator=generator) * size


def test_the_code_book_is_that_of_normal_quantiles() -> None:
    """Appendix E: quantiles of N(0, 1) between the probabilities 1 - d and d on each side of zero, scaled to [-1, 1];
    d is halfway between 1 - 1/30 and 1 - 1/32."""
    d = 1 - (1 / 30 + 1 / 32) / 2
    positive = torch.special.ndtri(torch.linspace(d, 0.5, 9, dtype=torch.float64))[:-1]
    negative = -torch.special.ndtri(torch.linspace(d, 0.5, 8, dtype=torch.float64))[:-1]
    book = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive.flip(0)]) / positive.max()
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), book, rtol=0, atol=2e-6)


def test_the_dynamic_format_has_both_signs_and_halves_its_steps_by_decade() -> None:
    levels = magnitude_table("cpu")
    assert len(levels) == 256 and levels.unique().equal(levels)
    assert (levels[0], levels[127], levels[-1]) == (-levels[-2], 0.0, 1.0)
    assert float(levels[-2]) == pytest.approx(1 - 0.9 / 64 / 2) and float(levels[128]) == pytest.approx(0.55e-6)


def test_what_the_code_book_holds_comes_back_to_the_bit() -> None:
    """Codes are packed in order, the first of two in the high bits; and a block of zeros stays zero."""
    weight = torch.tensor(NF4).repeat(3, 8) * 0.5
    held = quantise(weight)
    assert held.codes[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert whole(held).equal(weight)
    weight[1, 64:] = 0.0
    assert whole(quantise(weight))[1, 64:].eq(0.0).all()


@pytest.mark.parametrize("columns", [256, 160, 34])
def test_the_error_is_that_of_four_bits(columns: int) -> None:
    """A weight is off by half a step of the code book at most, and by what its block's magnitude is; the mean error of
    normal weights in blocks of 64 is 9% of their size."""
    weight = drawn(384, columns)
    held, found = quantise(weight), whole(quantise(weight))
    padded = torch.nn.functional.pad(weight, (0, -columns % 64)).view(384, -1, 64)
    largest = padded.abs().amax(dim=2)
    steps = torch.tensor(NF4).diff().max() / 2
    furthest = held.scales[1:].max()
    bound = largest * steps + furthest * (0.9 / 64 / 2 + 1e-6)
    off = torch.nn.functional.pad((found - weight).abs(), (0, -columns % 64)).view_as(padded).amax(dim=2)
    assert (off <= bound).all()
    assert 0.08 < float((found - weight).norm() / weight.norm()) < 0.10
    assert [tensor.shape for tensor in held] == [tensor.shape for tensor in shapes_of(384, columns)]
    assert whole(held, dtype=torch.bfloat16).equal(found.bfloat16()), "rounded once"


def test_it_takes_little_more_than_four_bits() -> None:
    held = shapes_of(4096, 4096)
    assert 8 * sum(tensor.nbytes for tensor in held) / 4096**2 == pytest.approx(4.127, abs=5e-4)


def test_a_part_is_that_of_the_whole_and_chunks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of magnitudes, 256 each, end inside of rows and of parts."""
    weight = drawn(90, 320)
    held = quantise(weight)
    expected = whole(held)
    assert len(held.scales) == 1 + 2
    rows = Nf4(held.codes[60:], held.magnitudes[60:], held.scales)
    assert whole(rows, Place(60, 0, 5)).equal(expected[60:])
    columns = Nf4(held.codes[:, 96:], held.magnitudes[:, 3:], held.scales)
    assert whole(columns, Place(0, 3, 5)).equal(expected[:, 192:])
    monkeypatch.setattr("trainspec_cli.engine.nf4.NF4_CHUNK", 1000)
    assert whole(held).equal(expected)
