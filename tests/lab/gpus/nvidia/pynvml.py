"""A stand-in for nvidia-ml-py: `pynvml` of a machine that is not here.

Put this folder on PYTHONPATH and name the machine in LAB_GPUS: `8xh100_sxm` (a count and a card of ../cards.json), a
machine of ../machines.json, or a JSON file in the form of those. Error classes, their codes and the records' fields
are those of nvidia-ml-py 13. The environment is read by `nvmlInit`, so one process can play several machines in turn.
"""

# ruff: noqa: N802, N815, N816, RUF012 - the names are those of nvidia-ml-py

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).resolve().parents[1]
MIB = 2**20

NVML_CLOCK_GRAPHICS = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_FEATURE_DISABLED = 0
NVML_FEATURE_ENABLED = 1
NVML_DEVICE_MIG_DISABLE = 0
NVML_DEVICE_MIG_ENABLE = 1
NVML_NVLINK_MAX_LINKS = 18

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_ALREADY_INITIALIZED = 5
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_INSUFFICIENT_POWER = 8
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_IRQ_ISSUE = 11
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_CORRUPTED_INFOROM = 14
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_OPERATING_SYSTEM = 17
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_UNKNOWN = 999

TEXTS = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires restart",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}


class NVMLError(Exception):
    """`NVMLError(15)` makes an `NVMLError_GpuIsLost`, as in nvidia-ml-py."""

    _valClassMapping: dict[int, type[NVMLError]] = {}
    value: int

    def __new__(cls, value: int | None = None, *_args: object) -> NVMLError:
        if cls is NVMLError:
            cls = NVMLError._valClassMapping.get(value or 0, cls)
        made = Exception.__new__(cls)
        made.value = getattr(cls, "code", value)
        return made

    def __str__(self) -> str:
        return TEXTS.get(self.value, f"NVML Error with code {self.value}")


for _key in [key for key in globals() if key.startswith("NVML_ERROR_")]:
    _name = "NVMLError_" + string.capwords(_key.removeprefix("NVML_ERROR_"), "_").replace("_", "")
    globals()[_name] = type(_name, (NVMLError,), {"code": globals()[_key], "__module__": __name__})
    NVMLError._valClassMapping[globals()[_key]] = globals()[_name]


class _Device:
    """A GPU, or a MIG slice of `parent`."""

    def __init__(self, number: int, facts: dict, parent: _Device | None = None) -> None:
        self.number = number
        self.facts = facts
        self.parent = parent
        self.slices: list[_Device] = []

    @property
    def uuid(self) -> str:
        if self.parent is not None:
            return f"MIG-{self.parent.number:02x}{self.number:06x}-5a1c-5bd9-8d5c-2f6f8a1b9c3d"
        return self.facts.get("uuid", f"GPU-{self.number:08x}-6f1e-4b7a-9c0d-3e2f1a0b9c8d")


_machine: dict | None = None
_devices: list[_Device] = []


def read_machine(name: str) -> dict:
    """Return `{"gpus": [facts of each], "driver": ..., "init_error": ...}`."""
    cards = json.loads((FOLDER / "cards.json").read_text())
    if name.endswith(".json"):
        machine = json.loads(Path(name).read_text())
    elif match := re.fullmatch(r"(\d+)x(\w+)", name):
        machine = {"gpus": [match[0]]}
    else:
        machine = json.loads((FOLDER / "machines.json").read_text())[name]
    gpus: list[dict] = []
    for entry in machine["gpus"]:
        own = {"card": entry} if isinstance(entry, str) else entry
        count, card = re.fullmatch(r"(?:(\d+)x)?(\w+)", own["card"]).groups()
        gpus += [{**cards[card], **own}] * int(count or 1)
    return {"driver": "570.133.20", "cuda_driver": 12080, **machine, "gpus": gpus}


def nvmlInit() -> None:
    global _machine
    machine = read_machine(os.environ["LAB_GPUS"])
    if machine.get("vendor", "nvidia") != "nvidia":
        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)
    if "init_error" in machine:
        raise NVMLError(machine["init_error"])
    _machine = machine
    _devices[:] = [_Device(number, facts) for number, facts in enumerate(machine["gpus"])]
    for device in _devices:
        profiles = device.facts.get("mig", [])
        device.slices = [_Device(number, slice_of(device, one), device) for number, one in enumerate(profiles)]


def slice_of(device: _Device, profile: dict) -> dict:
    """Return the facts of a MIG slice: those of its GPU, with its own name, memory and multiprocessors."""
    own = {"name": f"{device.facts['name']} MIG {profile['profile']}", "mig": [], **profile}
    return {**device.facts, **own}


def nvmlInitWithFlags(flags: int) -> None:
    nvmlInit()


def nvmlShutdown() -> None:
    global _machine
    _need()
    _machine = None


def _need() -> dict:
    if _machine is None:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    return _machine


def _ask(query: str, handle: _Device, key: str) -> object:
    """Return a fact. Raises the error that the machine has for this query, or NotSupported where it has no fact."""
    _fail(query, handle)
    if (value := handle.facts.get(key)) is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return value


def _fail(query: str, handle: _Device) -> None:
    _need()
    errors = handle.facts.get("errors", {})
    if (code := errors.get(query, errors.get("*"))) is not None:
        raise NVMLError(code)


def _no_slice(handle: _Device) -> None:
    """A MIG slice answers few queries."""
    if handle.parent is not None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlErrorString(code: int) -> str:
    return TEXTS.get(code, "Unknown Error")


def nvmlSystemGetDriverVersion() -> str:
    return _need()["driver"]


def nvmlSystemGetCudaDriverVersion() -> int:
    return _need()["cuda_driver"]


nvmlSystemGetCudaDriverVersion_v2 = nvmlSystemGetCudaDriverVersion


def nvmlDeviceGetCount() -> int:
    _need()
    return len(_devices)


def nvmlDeviceGetHandleByIndex(index: int) -> _Device:
    _need()
    if not 0 <= index < len(_devices):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    device = _devices[index]
    if (code := device.facts.get("handle_error")) is not None:
        raise NVMLError(code)
    return device


def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> _Device:
    _need()
    wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
    slices = [one for device in _devices for one in device.slices]
    for device in (*_devices, *slices):
        if device.uuid == wanted and "handle_error" not in device.facts:
            return device
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetIndex(handle: _Device) -> int:
    return handle.number


def nvmlDeviceGetUUID(handle: _Device) -> str:
    _fail("nvmlDeviceGetUUID", handle)
    return handle.uuid


def nvmlDeviceGetName(handle: _Device) -> str:
    return str(_ask("nvmlDeviceGetName", handle, "name"))


def nvmlDeviceGetMemoryInfo(handle: _Device, version: int | None = None) -> SimpleNamespace:
    total = int(_ask("nvmlDeviceGetMemoryInfo", handle, "memory_mib")) * MIB
    used = int(handle.facts.get("used_mib", 4)) * MIB
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetCudaComputeCapability(handle: _Device) -> tuple[int, int]:
    major, minor = _ask("nvmlDeviceGetCudaComputeCapability", handle, "compute_capability")
    return major, minor


def nvmlDeviceGetNumGpuCores(handle: _Device) -> int:
    _no_slice(handle)
    return int(_ask("nvmlDeviceGetNumGpuCores", handle, "cores"))


def nvmlDeviceGetMaxClockInfo(handle: _Device, kind: int) -> int:
    _no_slice(handle)
    key = "memory_mhz" if kind == NVML_CLOCK_MEM else "sm_mhz"
    return int(_ask("nvmlDeviceGetMaxClockInfo", handle, key))


def nvmlDeviceGetMemoryBusWidth(handle: _Device) -> int:
    _no_slice(handle)
    return int(_ask("nvmlDeviceGetMemoryBusWidth", handle, "bus_bits"))


def nvmlDeviceGetPowerManagementLimit(handle: _Device) -> int:
    _no_slice(handle)
    return int(_ask("nvmlDeviceGetPowerManagementLimit", handle, "power_w")) * 1000


nvmlDeviceGetPowerManagementDefaultLimit = nvmlDeviceGetPowerManagementLimit
nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetPowerManagementLimit


def nvmlDeviceGetMaxPcieLinkGeneration(handle: _Device) -> int:
    _no_slice(handle)
    return int(_ask("nvmlDeviceGetMaxPcieLinkGeneration", handle, "pcie_generation"))


def nvmlDeviceGetMaxPcieLinkWidth(handle: _Device) -> int:
    _no_slice(handle)
    return int(_ask("nvmlDeviceGetMaxPcieLinkWidth", handle, "pcie_lanes"))


def nvmlDeviceGetNvLinkState(handle: _Device, link: int) -> int:
    links = int(_ask("nvmlDeviceGetNvLinkState", handle, "nvlinks") or 0)
    if link >= NVML_NVLINK_MAX_LINKS or not links:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED if not links else NVML_ERROR_INVALID_ARGUMENT)
    if link >= links:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return int(handle.facts.get("nvlinks_up", links) > link)


def nvmlDeviceGetNvLinkVersion(handle: _Device, link: int) -> int:
    nvmlDeviceGetNvLinkState(handle, link)
    return int(_ask("nvmlDeviceGetNvLinkVersion", handle, "nvlink_version"))


def nvmlDeviceGetNvLinkErrorCounter(handle: _Device, link: int, counter: int) -> int:
    nvmlDeviceGetNvLinkState(handle, link)
    errors = int(_ask("nvmlDeviceGetNvLinkErrorCounter", handle, "nvlink_errors"))
    return errors if (link, counter) == (0, 0) else 0


def nvmlDeviceGetTemperature(handle: _Device, sensor: int) -> int:
    return int(_ask("nvmlDeviceGetTemperature", handle, "celsius"))


def nvmlDeviceGetTotalEccErrors(handle: _Device, kind: int, counter: int) -> int:
    return int(_ask("nvmlDeviceGetTotalEccErrors", handle, "ecc"))


def nvmlDeviceGetRemappedRows(handle: _Device) -> list[int]:
    """Return the rows remapped after correctable and uncorrectable errors, and whether one is pending or failed."""
    return list(_ask("nvmlDeviceGetRemappedRows", handle, "rows"))


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: _Device) -> int:
    return int(_ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, "throttle"))


def nvmlDeviceGetMigMode(handle: _Device) -> list[int]:
    _fail("nvmlDeviceGetMigMode", handle)
    if not handle.facts.get("mig_capable", False):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    enabled = int(handle.facts.get("mig_enabled", bool(handle.slices)))
    return [enabled, enabled]


def nvmlDeviceGetMaxMigDeviceCount(handle: _Device) -> int:
    return 7 if handle.facts.get("mig_capable", False) else 0


def nvmlDeviceGetMigDeviceHandleByIndex(device: _Device, index: int) -> _Device:
    _fail("nvmlDeviceGetMigDeviceHandleByIndex", device)
    if not 0 <= index < len(device.slices):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return device.slices[index]


def nvmlDeviceIsMigDeviceHandle(handle: _Device) -> int:
    return int(handle.parent is not None)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: _Device) -> _Device:
    if handle.parent is None:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return handle.parent


def nvmlDeviceGetAttributes_v2(handle: _Device) -> SimpleNamespace:
    if handle.parent is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    facts = handle.facts
    return SimpleNamespace(multiprocessorCount=facts["multiprocessors"], memorySizeMB=facts["memory_mib"])


nvmlDeviceGetAttributes = nvmlDeviceGetAttributes_v2


def nvmlDeviceGetUtilizationRates(handle: _Device) -> SimpleNamespace:
    _fail("nvmlDeviceGetUtilizationRates", handle)
    _no_slice(handle)
    return SimpleNamespace(gpu=handle.facts.get("busy", 0), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle: _Device) -> list[SimpleNamespace]:
    _fail("nvmlDeviceGetComputeRunningProcesses", handle)
    return [SimpleNamespace(**process) for process in handle.facts.get("processes", [])]


nvmlDeviceGetComputeRunningProcesses_v3 = nvmlDeviceGetComputeRunningProcesses
