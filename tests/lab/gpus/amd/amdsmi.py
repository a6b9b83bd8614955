"""A stand-in for AMD's `amdsmi` of a machine that is not here; see ../nvidia/pynvml.py for LAB_GPUS."""

from __future__ import annotations

import importlib.util
import os
from enum import IntEnum
from pathlib import Path

_spec = importlib.util.spec_from_file_location("_lab_machines", Path(__file__).parents[1] / "nvidia/pynvml.py")
_machines = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_machines)

MIB = 2**20
_gpus: list[dict] = []


class AmdSmiMemoryType(IntEnum):
    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


class AmdSmiException(Exception):  # noqa: N818 - its name in amdsmi
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def get_error_code(self) -> int:
        return self.err_code

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | AMDSMI_STATUS_DRIVER_NOT_LOADED"


def amdsmi_init(flag: int = 2) -> None:
    machine = _machines.read_machine(os.environ["LAB_GPUS"])
    if machine.get("vendor") != "amd":
        raise AmdSmiLibraryException(34)
    if "init_error" in machine:
        raise AmdSmiLibraryException(machine["init_error"])
    _gpus[:] = machine["gpus"]


def amdsmi_shut_down() -> None:
    _gpus.clear()


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(len(_gpus)))


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, object]:
    gpu = _gpus[handle]
    return {
        "market_name": gpu["name"],
        "vendor_id": "0x1002",
        "device_id": f"0x{gpu['device_id']:x}",
        "asic_serial": f"0x{unique_id(handle):016x}",
        "num_compute_units": gpu["compute_units"],
        "target_graphics_version": "gfx" + gfx(gpu["gfx_target_version"]),
    }


def unique_id(number: int) -> int:
    return 0xA51C_0000_0000_0000 + number


def gfx(version: int) -> str:
    """90402 -> 942, 90010 -> 90a."""
    return f"{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def amdsmi_get_gpu_memory_total(handle: int, kind: AmdSmiMemoryType) -> int:
    return int(_gpus[handle]["memory_mib"]) * MIB


def amdsmi_get_gpu_memory_usage(handle: int, kind: AmdSmiMemoryType) -> int:
    return int(_gpus[handle].get("used_mib", 284)) * MIB
