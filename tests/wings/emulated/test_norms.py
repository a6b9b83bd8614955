"""Batch norm with the kernels of an accelerator passes the tests of batch norm with elementary operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.models.test_batch_norm import *  # noqa: F403

from trainspec_cli.engine import accelerators
from trainspec_cli.engine.models.layers import BatchNorm
from trainspec_cli.wings.emulated.engine import norms

LIBRARY = torch.library.Library("aten", "IMPL")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    norms.register(LIBRARY)


@pytest.fixture(autouse=True)
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accelerators.KINDS, "cpu", replace(accelerators.KINDS["cpu"], has_norm_kernels=True))


def test_a_mean_far_from_zero_does_not_cancel_the_variance() -> None:
    norm = BatchNorm(1)
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    x = torch.arange(64.0).view(8, 1, 8) / 64 + 3000
    assert norm(x).std(correction=0).item() == pytest.approx(1.0, rel=1e-3)
