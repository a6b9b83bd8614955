"""Machines with GPUs that are not here: their names, and how a test plays one.

`nvidia/pynvml.py` and `amd/amdsmi.py` stand in for the makers' modules; `cards.json` has what NVML reports of each
card, `machines.json` the odd machines. A count and a card, `8xh100_sxm`, is a machine too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lab.gpus.amd import amdsmi
from lab.gpus.nvidia import pynvml as stub
from lab.sysfs import write

FOLDER = Path(__file__).parent
CARDS = json.loads((FOLDER / "cards.json").read_text())
MACHINES = json.loads((FOLDER / "machines.json").read_text())
CHOICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def environment_of(name: str) -> dict[str, str]:
    """Return LAB_GPUS, PYTHONPATH and what the machine itself sets: with them a command sees this machine."""
    vendor = MACHINES.get(name, {}).get("vendor", "nvidia")
    folders = [str(FOLDER / "nvidia"), *([str(FOLDER / "amd")] if vendor == "amd" else [])]
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))
    return {"LAB_GPUS": name, "PYTHONPATH": path, **MACHINES.get(name, {}).get("env", {})}


def play(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process, and those that it starts, see the machine until the test ends."""
    environment = environment_of(name)
    for key in CHOICES:
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    vendor = MACHINES.get(name, {}).get("vendor", "nvidia")
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi if vendor == "amd" else None)


def write_kfd(root: Path, name: str) -> Path:
    """Write the /sys of an AMD machine, as the amdgpu driver does: node 0 is the CPU, the GPUs follow."""
    nodes = root / "class/kfd/kfd/topology/nodes"
    write(nodes / "0", gpu_id="0", name="", properties="cpu_cores_count 96\nsimd_count 0\nvendor_id 0")
    for number, gpu in enumerate(stub.read_machine(name)["gpus"]):
        minor = 128 + number
        facts = {
            "cpu_cores_count": 0,
            "simd_count": gpu["compute_units"] * 4,
            "simd_per_cu": 4,
            "gfx_target_version": gpu["gfx_target_version"],
            "vendor_id": 0x1002,
            "device_id": gpu["device_id"],
            "drm_render_minor": minor,
            "unique_id": 0xA51C_0000_0000_0000 + number,
            "num_xcc": gpu["xccs"],
            "max_engine_clk_fcompute": gpu["sm_mhz"],
        }
        properties = "\n".join(f"{key} {value}" for key, value in facts.items())
        node = write(nodes / str(number + 1), gpu_id=str(4711 + number), name="ip discovery", properties=properties)
        total = gpu["memory_mib"] * 2**20
        bank = f"heap_type 1\nsize_in_bytes {total}\nflags 0\nwidth {gpu['bus_bits']}\nmem_clk_max {gpu['memory_mhz']}"
        write(node / "mem_banks/0", properties=bank)
        used = int(gpu.get("used_mib", 284)) * 2**20
        device = root / f"class/drm/renderD{minor}/device"
        write(device, vendor="0x1002", mem_info_vram_total=str(total), mem_info_vram_used=str(used))
    return root
