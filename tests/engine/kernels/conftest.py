from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _compile_anew():
    """What earlier tests have compiled counts against the compiler's limits."""
    torch._dynamo.reset()
