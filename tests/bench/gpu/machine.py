"""What the machine is: chip, driver, versions, and the packages that are there or missing."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
EXTRAS = ("float8", "kernels", "test", "bench")
OTHERS = ("torchtitan", "triton", "mamba_ssm", "causal_conv1d", "flash_attn")
QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit,compute_cap"


def requirements() -> dict[str, str]:
    """Return the packages that this project names -> what it asks of each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    return {re.split(r"[<>=!~;\[ ]", one, maxsplit=1)[0]: one for one in [*named, *OTHERS]}


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> dict[str, Any]:
    import torch

    found = {name: installed_version(name) for name in requirements()}
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": query_driver(),
        "compilers": {name: shutil.which(name) for name in ("nvcc", "g++", "gcc", "ptxas")},
        "packages": {name: version for name, version in found.items() if version},
        "missing": sorted(requirements()[name] for name, version in found.items() if not version),
    }


def query_driver() -> dict[str, str] | None:
    """Return what the driver says of the first GPU; None where there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return dict(zip(QUERY.split(","), (value.strip() for value in line.split(",")), strict=True))


def measure_chip(device_type: str) -> dict[str, Any]:
    """Return the chip's name, its peak by the catalogue, and its measured products and copies."""
    import torch

    from trainspec_cli.engine.accelerators import devices_here
    from trainspec_cli.engine.observe.counters import device_name, free_bytes, measure_peak
    from trainspec_cli.engine.tools.speed import measure_copy
    from trainspec_cli.planner.hardware.rates import find_accelerator

    device = devices_here(device_type)[0]
    name = device_name(device)
    chip = find_accelerator(name) if device_type != "cpu" else None
    return {
        "name": name,
        "catalogue": chip.name if chip else None,
        "catalogue_bf16_flops": chip.bf16_tflops * 1e12 if chip else None,
        "measured_bf16_flops": measure_peak(device, torch.bfloat16).flops,
        "copied_bytes_per_s": measure_copy(device),
        "free_bytes": free_bytes(device),
    }
