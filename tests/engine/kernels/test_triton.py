"""The libraries' Triton kernels, without a GPU: they agree with their references, and compile for each GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("triton", "liger_kernel", "fla"):
    pytest.importorskip(package)

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]
OPERATIONS = {"rms_norm", "swiglu", "rope", "linear_cross_entropy", "ssd_scan"}


def run(cache: Path, *arguments: str, **environment: str) -> Any:
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "engine.kernels.on_triton", *arguments],
        env=os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)} | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_and_their_gradients_agree_with_the_references(tmp_path: Path) -> None:
    found = run(tmp_path, "interpret", TRITON_INTERPRET="1")
    assert set(found) == OPERATIONS
    for op, calls in found.items():
        worst = max(difference for differences in calls for difference in differences)
        assert worst < (5e-5 if op == "ssd_scan" else 2e-6), (op, calls)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_of_both_passes_compiles(tmp_path: Path, target: str) -> None:
    found = run(tmp_path, "compile", target)
    numbers = {op: len(kernels) for op, kernels in found.items()}
    assert numbers == {"rms_norm": 2, "swiglu": 2, "rope": 1, "linear_cross_entropy": 1, "ssd_scan": 6}
    assert all(size > 1000 for kernels in found.values() for size in kernels.values())
