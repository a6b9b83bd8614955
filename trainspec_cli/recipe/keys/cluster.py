"""The hardware of a run (either this machine or a described cluster): accelerators, links, failures, power, price, and
Slurm options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import (
    AUTO,
    Auto,
    AutoInt,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)

# The network between devices, as tiers: the first tier connects a few devices, the next one connects those groups, and
# so on.


NetworkKind = Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "measured"]
"""measured: any kind of network; the rate is what collectives reached in a measurement."""
NicWiring = Literal["rails", "one_switch"]


@dataclass(frozen=True)
class TierSpec:
    """One tier of the network. The first tier is the scale-up domain, whose devices share the fast links."""

    name: str
    devices: PositiveInt | None = None
    """Number of devices below one element of the tier (one NVLink domain, one leaf switch, one site). null:
    `cluster.scaleup_devices` for the first tier, all devices of the cluster for the last one; the tiers in between must
    specify it."""
    gbit_per_s: PositiveFloat | None = None
    """A device's share of the bandwidth through this tier, in each direction. null: the accelerator's links for the
    first tier, `cluster.nic_gbit_per_s` for the others."""
    oversubscription: Annotated[float, Range(1)] = 1.0
    """Bandwidth of the devices below an element, divided by the element's uplink bandwidth; 3 means 3:1."""
    latency_us: NonNegativeFloat | None = None
    """One-way latency added to each message that crosses the tier; null: the planner's default for a hop."""
    kind: NetworkKind | None = None
    """The kind of network, which determines the fraction of the bandwidth that collectives reach; null:
    `cluster.nic_kind`. The first tier does not have a kind."""


@dataclass(frozen=True)
class PlanesSpec:
    """A network with several planes (multipath reliable connection, arXiv:2605.04333).

    Each plane is a complete fabric at a fraction of the NICs' speed, connected to one port of every NIC. Queue pairs
    spray their packets over paths in all planes."""

    planes: PositiveInt
    """Number of planes. 1 means an ordinary fabric, for comparison."""
    nic_gbit_per_s: PositiveFloat
    """Total bandwidth of a NIC's ports. Each device has one NIC."""
    switch_tbit_per_s: PositiveFloat
    """Bandwidth of a switch in one direction: its number of ports times their speed."""
    switch_tiers: Literal[2, 3] = 2
    """Number of switch tiers in each plane."""
    entropy_values: PositiveInt = 256
    """Number of paths over which a queue pair sprays its packets, distributed evenly over the planes."""
    flap_s: PositiveFloat = 60.0
    """How long a flapping link is down."""
    network_fraction: Fraction = 0.084
    """Fraction of an ordinary fabric's job-ending failures that are caused by links and switches; a fabric with several
    planes survives these."""
    fatal_fraction: Fraction = 0.0
    """Fraction of those failures that occur in a NIC's transceiver. It serves all ports of the NIC, so its failure
    takes down the NIC's queue pairs and ends the job. No rate has been published; 0 is the best case."""


@dataclass(frozen=True)
class FabricSpec:
    """Tiers of a network, innermost first. Without tiers, a single network connects all devices at the NICs' speed."""

    name: str = ""
    """The fabric's name as shown in plans."""
    tiers: tuple[TierSpec, ...] = ()
    """The tiers of links, innermost first. If empty, there are two: the links within nodes and the network between
    nodes."""
    nic_wiring: NicWiring | None = None
    """How a node's NICs are connected. rails: NIC i of every node to switch i; one_switch: all NICs to the same switch;
    null: unknown."""
    planes: PlanesSpec | None = None
    """The planes of the network; null: an ordinary fabric with one plane."""
    nccl_tuner: bool = False
    """Point the workers' `NCCL_TUNER_CONFIG_FILE` to the run's table for NCCL's example tuner plugin. This is useful
    only if that plugin has been built and is loaded."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key; `default` applies to all other keys."""


@dataclass(frozen=True)
class AcceleratorSpec:
    """One chip: peak rates from the vendor's data sheet, and measured rates. Rates are dense, without sparsity.

    A rate of 0 means that the chip does not support the format. GB and TB are decimal; the memory size is the one
    stated by the vendor."""

    name: str
    """The chip's name in plans and reports."""
    vendor: str
    """The vendor, such as nvidia, amd or intel."""
    bf16_tflops: NonNegativeFloat
    """Peak rate of matrix multiplications in bf16; 0: the chip has no bf16 units, and `fp16_tflops` is used instead."""
    memory_gb: PositiveFloat
    """Memory of the device."""
    memory_tb_per_s: PositiveFloat
    """Peak memory bandwidth of the device."""
    fp8_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix multiplications in fp8; 0: not supported."""
    fp4_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix multiplications in fp4; 0: not supported."""
    fp16_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix multiplications in fp16; 0: the same as bf16."""
    tf32_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix multiplications in tf32; 0: not supported."""
    fp32_tflops: NonNegativeFloat = 0.0
    """Peak rate of fp32 without tensor cores."""
    matmul_bf16_tflops: NonNegativeFloat = 0.0
    """The best measured rate of a large matrix multiplication; 0: unknown (the planner then assumes a typical fraction
    of the peak)."""
    matmul_fp8_tflops: NonNegativeFloat = 0.0
    """The best measured rate of a large matrix multiplication in fp8; 0: unknown (the planner then assumes a typical
    fraction of the peak)."""
    tera_exponentials_per_s: NonNegativeFloat = 0.0
    """Rate at which the special-function units compute exponentials (for softmax), in 1e12 per second; 0: unknown."""
    load_store_tb_per_s: NonNegativeFloat = 0.0
    """Peak load and store rate of the multiprocessors' first-level caches; 0: unknown."""
    cache_mb: NonNegativeFloat = 40.0
    """Size of the last-level cache, which holds small activations between kernels."""
    link_gb_per_s: NonNegativeFloat = 0.0
    """Total bandwidth of all links to the other devices in the scale-up domain, in one direction."""
    link_kind: Literal["nvswitch", "mesh", "bridge", "pcie", "torus"] = "pcie"
    """How the links connect devices. mesh and torus reach the full rate only when all peers communicate at the same
    time; a bridge connects pairs."""
    tdp_w: NonNegativeFloat = 0.0
    """Board power limit; 0: unknown."""
    price_usd_per_hour: NonNegativeFloat = 0.0
    """An observed price for one device; 0: unknown."""
    sources: dict[str, str] | None = None
    """The source of each value by key; `default` applies to all other keys."""


@dataclass(frozen=True)
class ReliabilitySpec:
    """Failure rates and recovery times. Failures affect all devices equally and independently (a Poisson process);
    times are means."""

    mtbf_device_hours: PositiveFloat = 50_677.0
    """Device-hours between failures that end a synchronous job. A cluster of n devices fails n times as often as one
    device."""
    job_wide_fraction: Fraction = 0.129
    """Fraction of failures that no replica group survives, such as those caused by a software bug."""
    detect_s: NonNegativeFloat = 60.0
    """Time until a failure has been detected and diagnosed."""
    swap_s: NonNegativeFloat = 120.0
    """Time until a spare node has replaced the failed one. Without a spare, nothing is swapped."""
    start_s: NonNegativeFloat = 300.0
    """Time until the first step: starting processes, connecting communicators and compiling, but not reading the
    checkpoint."""
    repair_s: NonNegativeFloat = 86_400.0
    """Time until a failed node is available again as a spare."""
    spare_nodes: NonNegativeInt | None = None
    """Number of extra nodes on standby, which are paid for; null: none. Each replaces one lost node, which becomes a
    spare once it is repaired. A run started node by node, without Slurm, takes this many extra nodes. For what happens
    without a spare, see `resilience.after_node_loss`."""
    shrink_stall_s: NonNegativeFloat = 30.0
    """Elastic: how long the survivors stall, from the failure until they continue without the failed replica
    group."""
    rejoin_stall_s: NonNegativeFloat = 15.0
    """Elastic: how long the survivors stall when the healed replica group joins."""
    heal_gb_per_s: PositiveFloat = 10.0
    """Elastic: rate at which a device of the new replica group copies its state from a healthy peer."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty factor of each value; 2 means that the true value is 90% likely to be within a factor of 2."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value has not been checked against a source."""


@dataclass(frozen=True)
class SiteSpec:
    """The building and its power grid."""

    name: str = "world average"
    """The site's name in plans."""
    pue: Annotated[float, Range(1)] = 1.2
    """Power usage effectiveness: power drawn by the building divided by power drawn by the machines."""
    carbon_g_per_kwh: NonNegativeFloat = 475.0
    """Carbon intensity of the local grid; purchased certificates do not count."""
    electricity_usd_per_kwh: NonNegativeFloat = 0.08
    """Electricity price for owned machines; rental prices include electricity."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty factor of each value; 2 means that the true value is 90% likely to be within a factor of 2."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value has not been checked against a source."""


@dataclass(frozen=True)
class PowerSpec:
    """Power of a node, as fractions of the thermal design power (TDP) of its accelerators."""

    busy: NonNegativeFloat = 0.9
    """Power of an accelerator that is computing."""
    waiting: NonNegativeFloat = 0.5
    """Power of an accelerator that is waiting for a collective, a pipeline stage or data."""
    idle: NonNegativeFloat = 0.15
    """Power of an idle accelerator, while the job is down."""
    host: NonNegativeFloat = 0.45
    """Power of the rest of the node (CPUs, switches, NICs, fans), which does not depend on the accelerators' load."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty factor of each value; 2 means that the true value is 90% likely to be within a factor of 2."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value has not been checked against a source."""


@dataclass(frozen=True)
class CostSpec:
    """The cost of a device: rent, or part of the purchase price."""

    price_usd_per_device_hour: NonNegativeFloat | None = None
    """Rent; null: the accelerator's price."""
    owned: bool = False
    """True if you own the machines. Their cost is then the purchase price spread over their useful hours, plus
    electricity and operation."""
    device_price_usd: NonNegativeFloat | None = None
    """owned: purchase price of a device, including its share of the node, network and storage."""
    useful_years: PositiveFloat = 4.0
    """owned: years over which the purchase price is spread."""
    utilisation: Annotated[float, Range(0, 1, includes_low=False)] = 0.8
    """Fraction of those years during which jobs use the device and are charged for it."""
    operation_ratio: NonNegativeFloat = 0.08
    """Yearly cost of repairs and support as a fraction of the purchase price. It includes staff and space as long as
    the next two keys are 0."""
    staff_usd_per_device_year: NonNegativeFloat = 0.0
    """owned: cost of operating staff, per installed device."""
    space_usd_per_device_year: NonNegativeFloat = 0.0
    """owned: cost of floor, racks and the power connection, without electricity."""
    resale_ratio: Fraction = 0.0
    """owned: resale value of a device after `useful_years`, as a fraction of its purchase price."""
    reserved_ratio: NonNegativeFloat = 0.8
    """Rent of a device reserved for a full year, whether used or not, as a fraction of the on-demand rent."""
    spot_ratio: NonNegativeFloat = 0.67
    """Rent of a device that the cloud may reclaim (spot), as a fraction of the on-demand rent."""
    spot_mtbf_device_hours: PositiveFloat = 29_220.0
    """Device-hours between reclaims of a node by the cloud. Each reclaim ends a synchronous job, just as a failure
    would."""
    spot_wait_s: NonNegativeFloat = 1800.0
    """Time until another node replaces a reclaimed one."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty factor of each value; 2 means that the true value is 90% likely to be within a factor of 2."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value has not been checked against a source."""


@dataclass(frozen=True)
class SlurmSpec:
    """The Slurm options of a job; null leaves an option at the site's default."""

    job_name: str | None = None
    """The job's name; null: the last part of `run.dir` (`--dir` for a command), or the name of the recipe or script."""
    partition: str | None = None
    """The partition to submit the job to (`--partition`)."""
    account: str | None = None
    """The account to charge (`--account`)."""
    qos: str | None = None
    """The quality of service (`--qos`)."""
    time: str | None = None
    """The time limit (`--time`) in one of Slurm's formats: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; 0
    means no limit. The value is text: quote it in YAML, which would read 2:00:00 as a number."""
    gpus_per_node: str | None = None
    """GPUs per node: type and number (`h100:8`), number (`8`), or type (`h100`, with the number that the run uses);
    null: `cluster.devices_per_node`, if the device is cuda."""
    gpu_request: Literal["gpus_per_node", "gres", "gpus_per_task", "none"] = "gpus_per_node"
    """The option that requests GPUs at this site: `--gpus-per-node=h100:8`, `--gres=gpu:h100:8`,
    `--gpus-per-task=h100:8` (each node has one task), or none, for partitions that allocate entire nodes."""
    cpus_per_task: PositiveInt | None = None
    """CPUs per node; null: all CPUs of the node (see `exclusive`)."""
    mem: str | None = None
    """Memory per node (`--mem`): an integer with K, M, G or T, such as `512G`; a number without a unit is in megabytes;
    `0` requests all memory. The value is text, so quote a plain number."""
    exclusive: bool = True
    """Request entire nodes (`--exclusive`)."""
    constraint: str | None = None
    """Features that nodes must have (`--constraint`), such as `h100&ib`."""
    exclude: str | None = None
    """Nodes to avoid, such as `node[3,7]`."""
    dependency: str | None = None
    """A job dependency (`--dependency`), such as `afterok:1234` or `singleton`."""
    array_parallel: PositiveInt | None = None
    """Number of jobs in a sweep's array that may run at the same time; null: all of them."""
    container_runtime: Literal["pyxis", "apptainer", "singularity"] = "pyxis"
    """The program that runs `container_image` on each node: Slurm's pyxis plugin (`srun --container-image`), or the
    named program (`apptainer exec`)."""
    container_image: str | None = None
    """The container image that the run trains in, such as `/images/torch.sqsh` (pyxis) or `/images/torch.sif`
    (apptainer); null: no container. The job's supervisor runs outside, where srun is available; the nodes' agents and
    workers run inside."""
    container_mounts: str | None = None
    """Additional folders to mount in the container, such as `/scratch:/scratch,/data:/data:ro`. Everything that the run
    itself needs is mounted automatically: trainspec, the run folder, the folder in which `sbatch` was run, the data,
    the initial weights and the cache."""
    container_python: str = "python3"
    """The Python in the image that has torch, by name or path. If the path is in a virtual or conda environment of the
    submitting machine, that environment is mounted as well."""
    container_gpus: Literal["auto", "nvidia", "amd", "none"] = "auto"
    """The option that gives Apptainer containers access to GPUs: `--nv`, `--rocm`, or none; auto: chosen by the
    accelerator's vendor, nvidia if unknown. With pyxis, the site's hooks decide."""
    container_env: tuple[str, ...] = ()
    """Environment variables that keep their outer value even if the image sets another one, such as `[NCCL_IB_HCA]`.
    Variables that the image does not set are always passed on."""
    sbatch_lines: tuple[str, ...] = ()
    """Additional options, each copied verbatim after `#SBATCH` into job.sbatch, such as `--mail-type=END`. An option
    that contradicts the script is rejected."""
    setup: tuple[str, ...] = ()
    """Shell commands to run before the job starts, such as `module load cuda` or `export NCCL_IB_HCA=mlx5`; the
    environment that was active at submission is activated after them. A command that fails ends the job (append `||
    true` to prevent that). They run with your permissions, so `trainspec sbatch` shows them, and requires --allow-setup
    for commands from a file that another user owns or that everyone can write. The same applies to `sbatch_lines` and
    `container_image`."""
    warn_s: NonNegativeInt = 120
    """Time before the time limit (or before a preemption that sends the job's signal) at which the run saves a
    checkpoint and exits."""
    max_requeues: NonNegativeInt = 10
    """Maximum number of times that a job is requeued and resumed after a time limit, a preemption or a lost node."""


@dataclass(frozen=True)
class PoolSpec:
    """The nodes of one kind in a cluster that has several kinds."""

    accelerator: AcceleratorSpec
    """The accelerator of the pool's nodes: a name from `trainspec list`, or its values."""
    num_nodes: PositiveInt
    """Number of nodes in the pool."""
    devices_per_node: PositiveInt = 8
    """Number of devices per node."""
    name: str = ""
    """The pool's name in plans; empty: the accelerator's name."""
    scaleup_devices: PositiveInt | None = None
    """Number of devices connected by the fast links; null: the devices of a node."""
    link_gb_per_s: NonNegativeFloat | None = None
    """Bandwidth of the fast links per device, in one direction; null: the accelerator's."""
    nic_gbit_per_s: PositiveFloat | None = None
    """Bandwidth between nodes per device, in one direction; null: `cluster.nic_gbit_per_s`, or the usual value for the
    accelerator."""
    nic_kind: NetworkKind | None = None
    """The kind of network between the pool's nodes; null: `cluster.nic_kind`."""
    price_usd_per_device_hour: NonNegativeFloat | None = None
    """Rent; null: `cluster.cost.price_usd_per_device_hour`, or the accelerator's price."""


@dataclass(frozen=True)
class ClusterSpec:
    num_nodes: PositiveInt = 1
    """Number of nodes that the run uses."""
    devices_per_node: AutoInt = AUTO
    """Number of processes per node, one per device. auto: all GPUs or, on a machine without GPUs, the fewest processes
    that `layout` and `resilience` allow (usually a single process that uses all cores)."""
    manager: Literal["none", "ray"] = "none"
    """The program that finds the nodes of a launch, starts trainspec on them and reports lost nodes. ray: a Ray
    cluster (RAY_ADDRESS, or the one on this node); none: the user types the command on each node. Slurm jobs are
    submitted with `trainspec sbatch`."""
    device: Literal["cpu", "cuda"] | Auto = AUTO
    """The device to train on. auto: cuda if a GPU is present, otherwise cpu. If `accelerator` names a GPU, a machine
    without GPUs is rejected unless this is cpu."""
    name: str = ""
    """The cluster's name in plans and reports."""
    accelerator: AcceleratorSpec | None = None
    """The accelerator of the nodes: a name or its values; null: the accelerator of this machine."""
    pools: tuple[PoolSpec, ...] = ()
    """Nodes of several kinds, for `trainspec plan`: `[h100_sxm*8x8, a100_sxm_80gb*4x8]` (accelerator*nodes x devices
    per node), or a list of their values. They replace `num_nodes`, `devices_per_node` and `accelerator`."""
    pool_link_gbit_per_s: PositiveFloat | None = None
    """Bandwidth between pools per device, in one direction; null: that of the slower pool's NICs."""
    scaleup_devices: PositiveInt | None = None
    """Number of devices connected by the fast links; null: the devices of a node. It is 72 in a GB200 NVL72 rack of
    4-device nodes."""
    link_gb_per_s: NonNegativeFloat | None = None
    """Bandwidth of the fast links per device, in one direction; null: the accelerator's."""
    nic_gbit_per_s: NonNegativeFloat | None = None
    """Bandwidth between nodes per device, in one direction (a node's NICs divided by its devices); null: the usual
    value for the accelerator."""
    nic_kind: NetworkKind = "infiniband"
    """The kind of network between nodes, which determines its latency and its efficiency."""
    oversubscription: Annotated[float, Range(1)] | None = None
    """Bandwidth of the devices below the network's outermost tier, divided by the tier's uplink bandwidth; 3 means 3:1.
    null: the value of the fabric's last tier, or 1 for a cluster without tiers, whose only network connects the
    nodes."""
    fabric: FabricSpec = field(default_factory=FabricSpec)
    """The tiers of the network, from the fastest links to the slowest."""
    host_link_gb_per_s: PositiveFloat = 50.0
    """Bandwidth between device and host memory for offloading, in one direction."""
    host_memory_gb: NonNegativeFloat = 2048.0
    """Host memory of a node."""
    storage_gb_per_s: PositiveFloat = 1.2
    """Bandwidth to checkpoint storage per node. The default is derived from a measurement: 2.3 TB in 40 s from 48 nodes
    (BLOOM, stas00/ml-engineering, fault-tolerance)."""
    efficiency: dict[str, float] | None = None
    """Corrections to the planner's efficiencies for this cluster, as written by `trainspec backtest --fit`."""
    profile: Literal["auto", "off"] = "auto"
    """auto: plans and launches use the results of `trainspec calibrate` for the cluster with this name, and say so;
    off: they ignore them."""
    reliability: ReliabilitySpec = field(default_factory=ReliabilitySpec)
    """Failure rates of devices and recovery times."""
    site: SiteSpec = field(default_factory=SiteSpec)
    """The building and its electricity."""
    power: PowerSpec = field(default_factory=PowerSpec)
    """The power draw of a node."""
    cost: CostSpec = field(default_factory=CostSpec)
    """The cost of a device-hour."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """Options of Slurm jobs, for `trainspec sbatch`."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by its driver. 0 means that the driver does not report the value."""

    name: str
    memory_bytes: int
    """The GPU's own memory, or system memory for a GPU that shares it."""
    compute_capability: tuple[int, int]
    """NVIDIA's compute capability; for an AMD GPU its gfx target, such as (9, 0x42) for gfx942."""
    free_bytes: int
    """GPU memory not used by other programs."""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    processors: int = 0
    """Number of multiprocessors, or of compute units."""
    clock_mhz: float = 0.0
    """The highest clock rate of the multiprocessors."""
    memory_gb_per_s: float = 0.0
    power_w: float = 0.0
    nvlink_gb_per_s: float | None = None
    """Total bandwidth of all active links in one direction. 0: the GPU has links, but all of them are down. None: it
    does not report links."""
    pcie_gb_per_s: float = 0.0

    @property
    def bf16(self) -> bool:
        """Return whether its matrix units support bf16: NVIDIA since Ampere, AMD since MI100 (gfx908) and RDNA 3."""
        if self.vendor == "amd":
            return self.compute_capability >= (9, 0x08) and self.compute_capability[0] != 10
        return self.compute_capability >= (8, 0)

    @property
    def fp8(self) -> bool:
        """Return whether its matrix units support fp8: NVIDIA since Ada, AMD on MI300 (gfx942), MI350 and RDNA 4."""
        if self.vendor == "amd":
            return self.compute_capability >= (12, 0) or (9, 0x42) <= self.compute_capability < (10, 0)
        return self.compute_capability >= (8, 9)


@dataclass(frozen=True)
class Machine:
    """The hardware found on this node without torch (see `run/job/machine.py`)."""

    hostname: str
    cpu_cores: int
    """Number of cores that this process may use."""
    memory_bytes: int
    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: int = 0
    """Memory of the GPU that has the least memory."""
    bf16: bool = False
    """True if the device supports bf16 matrix multiplications natively: a CPU with AMX, or GPUs whose matrix units
    do."""
    fp8: bool = False
    """True if the GPUs' matrix units support fp8."""
    gpus: tuple[Gpu, ...] = ()
    """The driver's report on each GPU; empty for a machine that is only described."""
    gpu_problem: Problem | None = None
    """Why this node's GPUs or other accelerators cannot be used; if so, no GPU is listed."""
    gpu_notes: tuple[str, ...] = ()
    """Harmless notes about this node's GPUs, for example that all of them are hidden."""
