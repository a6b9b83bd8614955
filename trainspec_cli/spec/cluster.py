"""Where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, Auto, AutoInt


@dataclass(frozen=True)
class ClusterSpec:
    num_nodes: int = 1
    devices_per_node: AutoInt = AUTO
    """Processes a node, one a device; auto takes every GPU, or two processes on a machine without."""
    device: Literal["cpu", "cuda"] | Auto = AUTO
    """auto: cuda where there is a GPU, else cpu."""
    name: str = ""


@dataclass(frozen=True)
class Machine:
    """What was found on this host, without torch (see `launch/machine.py`)."""

    hostname: str
    cpu_cores: int
    """Cores this process may use."""
    memory_bytes: int
    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: int = 0
    """Of the smallest GPU."""
    bf16: bool = False
    """The device multiplies bf16 natively (amx_bf16 or avx512_bf16 on a CPU, compute capability 8.0 on a GPU)."""
