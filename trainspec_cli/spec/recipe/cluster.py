"""The hardware: this machine, or a described cluster of nodes, accelerators and links."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.spec.auto import AUTO, Auto, AutoInt
from trainspec_cli.spec.numbers import NonNegativeFloat, PositiveFloat, PositiveInt
from trainspec_cli.spec.recipe.cost import CostSpec, PowerSpec, SiteSpec
from trainspec_cli.spec.recipe.reliability import ReliabilitySpec
from trainspec_cli.spec.recipe.slurm import SlurmSpec


@dataclass(frozen=True)
class AcceleratorSpec:
    """One chip: peak rates from the vendor's data sheet, and measured rates. Rates are dense, without sparsity.

    A rate of 0 means that the chip lacks the format. GB and TB are decimal; the memory is as the vendor names it.
    """

    name: str
    vendor: str
    bf16_tflops: PositiveFloat
    memory_gb: PositiveFloat
    memory_tb_per_s: PositiveFloat
    fp8_tflops: NonNegativeFloat = 0.0
    fp4_tflops: NonNegativeFloat = 0.0
    fp16_tflops: NonNegativeFloat = 0.0
    """0: the same as bf16."""
    tf32_tflops: NonNegativeFloat = 0.0
    fp32_tflops: NonNegativeFloat = 0.0
    """The rate without tensor cores."""
    matmul_bf16_tflops: NonNegativeFloat = 0.0
    """The best measured rate of a large matrix product; 0: not known, the planner assumes a usual part of the peak."""
    matmul_fp8_tflops: NonNegativeFloat = 0.0
    tera_exponentials_per_s: NonNegativeFloat = 0.0
    """Exponentials of the special-function units, 1e12 a second, which softmax takes; 0: not known."""
    load_store_tb_per_s: NonNegativeFloat = 0.0
    """Peak load and store rate of the multiprocessors' first-level caches; 0: not known."""
    cache_mb: NonNegativeFloat = 40.0
    """Last-level cache, which small activations never leave."""
    link_gb_per_s: NonNegativeFloat = 0.0
    """Bandwidth to the other devices of its scale-up domain, all links together, one direction."""
    link_kind: Literal["nvswitch", "mesh", "bridge", "pcie", "torus"] = "pcie"
    """mesh and torus reach the full rate only with all peers at once; a bridge joins pairs."""
    tdp_w: NonNegativeFloat = 0.0
    """Board power limit; 0: not known."""
    price_usd_per_hour: NonNegativeFloat = 0.0
    """An observed price of one device; 0: not known."""
    sources: dict[str, str] | None = None
    """The source of each value by key; `default` for the rest."""


@dataclass(frozen=True)
class ClusterSpec:
    num_nodes: PositiveInt = 1
    devices_per_node: AutoInt = AUTO
    """Processes per node, one per device; auto: every GPU, or two processes on a machine without GPUs."""
    device: Literal["cpu", "cuda"] | Auto = AUTO
    """auto: cuda if there is a GPU, else cpu."""
    name: str = ""
    accelerator: AcceleratorSpec | None = None
    """null: the accelerator of this machine."""
    scaleup_devices: PositiveInt | None = None
    """Devices joined by the fast links; null: those of a node. 72 in a GB200 NVL72 rack of 4-device nodes."""
    link_gb_per_s: NonNegativeFloat | None = None
    """One direction, per device; null: the accelerator's."""
    nic_gbit_per_s: NonNegativeFloat = 0.0
    """Between nodes, one direction, per device (a node's NICs over its devices)."""
    nic_kind: Literal["infiniband", "roce", "efa", "omnipath", "ethernet"] = "infiniband"
    host_link_gb_per_s: PositiveFloat = 50.0
    """Device to host memory, one direction, for offload."""
    host_memory_gb: NonNegativeFloat = 2048.0
    """Memory of a node."""
    storage_gb_per_s: PositiveFloat = 1.2
    """Bandwidth to checkpoint storage, per node: 2.3 TB in 40 s from 48 nodes (BLOOM, stas00/ml-engineering, fault-
    tolerance)."""
    efficiency: dict[str, float] | None = None
    """Corrections of the planner's efficiencies for this cluster, as `trainspec backtest --fit` writes them."""
    reliability: ReliabilitySpec = field(default_factory=ReliabilitySpec)
    site: SiteSpec = field(default_factory=SiteSpec)
    power: PowerSpec = field(default_factory=PowerSpec)
    cost: CostSpec = field(default_factory=CostSpec)
    slurm: SlurmSpec = field(default_factory=SlurmSpec)


@dataclass(frozen=True)
class Machine:
    """The hardware found on this node, without torch (see `launch/job/machine.py`)."""

    hostname: str
    cpu_cores: int
    """Cores this process may use."""
    memory_bytes: int
    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: int = 0
    """Memory of the smallest GPU."""
    bf16: bool = False
    """The device multiplies bf16 natively (amx_bf16 or avx512_bf16 on a CPU, compute capability 8.0 on a GPU)."""
    fp8: bool = False
    """The GPUs multiply fp8 (compute capability 8.9)."""
