"""Values that are not finite are found and counted."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.engine.digest import count_not_finite, is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_is_enough(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert is_finite(tensor)
    tensor[1, 2] = value
    assert not is_finite(tensor)
    assert count_not_finite(tensor) == 1


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert is_finite(torch.tensor([2**62]))
    assert is_finite(torch.empty(0, 3))
    assert is_finite(torch.tensor([True]))
    assert count_not_finite(torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf])) == 3
