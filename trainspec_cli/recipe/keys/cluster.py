"""The hardware: this machine, or a described cluster: accelerators, links, failures, power and price, and Slurm."""

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

# The network between devices, as tiers: what joins a few devices, what joins those groups, and so on to the whole.


NetworkKind = Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "measured"]
"""measured: of any kind; its rate is what collectives reach, by measurement."""
NicWiring = Literal["rails", "one_switch"]


@dataclass(frozen=True)
class TierSpec:
    """One tier of the network. The first is the scale-up domain, whose devices share the fast links."""

    name: str
    devices: PositiveInt | None = None
    """Devices below one element of the tier (one NVLink domain, one leaf switch, one site). null: for the first tier
    `cluster.scaleup_devices`, for the last one all devices of the cluster; those between say it."""
    gbit_per_s: PositiveFloat | None = None
    """A device's share of the bandwidth through this tier, each way. null: for the first tier the accelerator's links,
    for the others `cluster.nic_gbit_per_s`."""
    oversubscription: Annotated[float, Range(1)] = 1.0
    """How much more the devices below an element can send than the element passes on; 3 is written 3:1."""
    latency_us: NonNegativeFloat | None = None
    """Added by each message that crosses the tier, one way; null: the planner's own figure for a hop."""
    kind: NetworkKind | None = None
    """The kind of network, which decides what part of the bandwidth collectives reach; null: `cluster.nic_kind`. The
    first tier has none."""


@dataclass(frozen=True)
class PlanesSpec:
    """A network of several planes (multipath reliable connection, arXiv:2605.04333).

    Each plane is a whole fabric at a part of the NICs' speed, with one port of every NIC; queue pairs spray their
    packets over paths of all planes.
    """

    planes: PositiveInt
    """1: an ordinary fabric, to compare with."""
    nic_gbit_per_s: PositiveFloat
    """Bandwidth of a NIC, all its ports together. Each device has one NIC."""
    switch_tbit_per_s: PositiveFloat
    """Bandwidth of a switch, one direction: its ports times their speed."""
    switch_tiers: Literal[2, 3] = 2
    """Tiers of switches in each plane."""
    entropy_values: PositiveInt = 256
    """Paths that a queue pair sprays over, spread evenly over the planes."""
    flap_s: PositiveFloat = 60.0
    """How long a link that flaps is down."""
    network_fraction: Fraction = 0.084
    """Fraction of failures ending a job on an ordinary fabric that are of links and switches; planes survive them."""
    fatal_fraction: Fraction = 0.0
    """Fraction of those that are failures of a NIC's own transceiver, which carries all of its ports: its queue pairs
    end, and the job with them. No rate is published; 0 is the best case."""


@dataclass(frozen=True)
class FabricSpec:
    """Tiers of a network, innermost first. Without tiers one network reaches every device at the NICs' speed."""

    name: str = ""
    """The fabric's name, as plans show it."""
    tiers: tuple[TierSpec, ...] = ()
    """The tiers of links, the innermost first; empty: the links within nodes, and the network between them."""
    nic_wiring: NicWiring | None = None
    """How the NICs of a node with several are joined: rails, each number of NIC to a switch of its own; one_switch, all
    to the same one; null: not known."""
    planes: PlanesSpec | None = None
    """null: an ordinary fabric, of one plane."""
    nccl_tuner: bool = False
    """Workers learn where the run's table for NCCL's example tuner plugin is (`NCCL_TUNER_CONFIG_FILE`); only those
    who have built and loaded that plugin have a use for it."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key; `default` for the rest."""


@dataclass(frozen=True)
class AcceleratorSpec:
    """One chip: peak rates from the vendor's data sheet, and measured rates. Rates are dense, without sparsity.

    A rate of 0 means that the chip lacks the format. GB and TB are decimal; the memory is as the vendor names it.
    """

    name: str
    """The chip's name, as plans and reports show it."""
    vendor: str
    """Its vendor, such as nvidia, amd or intel."""
    bf16_tflops: NonNegativeFloat
    """Peak rate of matrix products in bf16; 0: it has none, and `fp16_tflops` counts in its place."""
    memory_gb: PositiveFloat
    """Memory of the device."""
    memory_tb_per_s: PositiveFloat
    """Peak bandwidth of its memory."""
    fp8_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix products in fp8; 0: it has none."""
    fp4_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix products in fp4; 0: it has none."""
    fp16_tflops: NonNegativeFloat = 0.0
    """0: the same as bf16."""
    tf32_tflops: NonNegativeFloat = 0.0
    """Peak rate of matrix products in tf32; 0: it has none."""
    fp32_tflops: NonNegativeFloat = 0.0
    """The rate without tensor cores."""
    matmul_bf16_tflops: NonNegativeFloat = 0.0
    """The best measured rate of a large matrix product; 0: not known, the planner assumes a usual part of the peak."""
    matmul_fp8_tflops: NonNegativeFloat = 0.0
    """The best measured rate of a large matrix product in fp8; 0: not known, the planner assumes a usual part of the
    peak."""
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
class ReliabilitySpec:
    """Failures hit all devices equally and without memory (a Poisson process); the rest are mean durations."""

    mtbf_device_hours: PositiveFloat = 50_677.0
    """Device-hours between failures that end a synchronous job (a cluster of n devices fails n times as often)."""
    job_wide_fraction: Fraction = 0.129
    """Fraction of the failures that no replica group survives, such as a bug in the software."""
    detect_s: NonNegativeFloat = 60.0
    """The time until a failure is detected and diagnosed."""
    swap_s: NonNegativeFloat = 120.0
    """The time until a spare node has replaced the failed one."""
    start_s: NonNegativeFloat = 300.0
    """Processes, communicators and compilation, up to the first step; reading the checkpoint comes on top."""
    repair_s: NonNegativeFloat = 86_400.0
    """The time until a failed node is a spare again."""
    spare_nodes: NonNegativeInt | None = None
    """Nodes on standby; null: one whenever it is needed. A run that is started node by node, without Slurm, takes so
    many nodes more, which stand by until one is left out; null: none."""
    shrink_stall_s: NonNegativeFloat = 30.0
    """Elastic: how long the survivors stall, from the failure until they continue without the failed replica group."""
    rejoin_stall_s: NonNegativeFloat = 15.0
    """Elastic: how long they stall when the healed replica group joins."""
    heal_gb_per_s: PositiveFloat = 10.0
    """Elastic: the rate at which a device of the new replica group copies its state from a healthy peer."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty of each value: 2 means between half and twice the value with a probability of 90%."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value was not checked against its source."""


@dataclass(frozen=True)
class SiteSpec:
    """The building and the grid behind it."""

    name: str = "world average"
    """The site's name, as plans show it."""
    pue: Annotated[float, Range(1)] = 1.2
    """Power usage effectiveness: power into the building over power into the machines."""
    carbon_g_per_kwh: NonNegativeFloat = 475.0
    """Intensity of the local grid (purchased certificates are not counted)."""
    electricity_usd_per_kwh: NonNegativeFloat = 0.08
    """Paid for owned machines; a rent includes it."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty of each value: 2 means between half and twice the value with a probability of 90%."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value was not checked against its source."""


@dataclass(frozen=True)
class PowerSpec:
    """Power of a node, as fractions of the thermal design power (TDP) of its accelerators."""

    busy: NonNegativeFloat = 0.9
    """An accelerator that computes."""
    waiting: NonNegativeFloat = 0.5
    """One that waits for a collective, a pipeline stage or data."""
    idle: NonNegativeFloat = 0.15
    """One without work: the job is down."""
    host: NonNegativeFloat = 0.45
    """The rest of the node (CPUs, switches, NICs, fans), whatever the accelerators do."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty of each value: 2 means between half and twice the value with a probability of 90%."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value was not checked against its source."""


@dataclass(frozen=True)
class CostSpec:
    """Money: a rent, or a share of the purchase."""

    price_usd_per_device_hour: NonNegativeFloat | None = None
    """Rent; null: the accelerator's own."""
    owned: bool = False
    """Bought machines: their price over their useful hours, plus electricity and operation."""
    device_price_usd: NonNegativeFloat | None = None
    """owned: one device with its share of node, network and storage."""
    useful_years: PositiveFloat = 4.0
    """owned: the years over which the price is spread."""
    utilisation: Annotated[float, Range(0, 1, includes_low=False)] = 0.8
    """Fraction of those years in which some job pays for the device."""
    operation_ratio: NonNegativeFloat = 0.08
    """Repairs and support per year, over the price; staff and space too, as far as the next two keys are 0."""
    staff_usd_per_device_year: NonNegativeFloat = 0.0
    """owned: the people who run the machines, for each device that there is."""
    space_usd_per_device_year: NonNegativeFloat = 0.0
    """owned: floor, racks and the connected power, without electricity."""
    resale_ratio: Fraction = 0.0
    """owned: the part of its price that a device sells for after `useful_years`."""
    reserved_ratio: NonNegativeFloat = 0.8
    """Rent of a device that is taken for a whole year, used or not, over the rent by the hour."""
    spot_ratio: NonNegativeFloat = 0.67
    """Rent of a device that the cloud may take back, over the rent by the hour."""
    spot_mtbf_device_hours: PositiveFloat = 29_220.0
    """Device-hours between times that the cloud takes a node back; each ends a synchronous job, as a failure does."""
    spot_wait_s: NonNegativeFloat = 1800.0
    """The time until another node stands in its place."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty of each value: 2 means between half and twice the value with a probability of 90%."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key."""
    unverified: tuple[str, ...] = ()
    """Keys whose value was not checked against its source."""


@dataclass(frozen=True)
class SlurmSpec:
    """The Slurm options of a job; null leaves an option to the site's default."""

    job_name: str | None = None
    """null: the last name of `run.dir` (of a command: `--dir`), else the recipe's or the script's name."""
    partition: str | None = None
    """The partition that the job is submitted to (`--partition`)."""
    account: str | None = None
    """The account that is charged (`--account`)."""
    qos: str | None = None
    """The quality of service (`--qos`)."""
    time: str | None = None
    """The time limit (`--time`), in one of Slurm's forms: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; 0 asks
    for none. It is text, so quote it in YAML, which reads 2:00:00 as a number."""
    gpus_per_node: str | None = None
    """GPUs of a node as type and number (`h100:8`), number (`8`), or type (`h100`) with the run's own number; null:
    `cluster.devices_per_node`, if the device is cuda."""
    gpu_request: Literal["gpus_per_node", "gres", "gpus_per_task", "none"] = "gpus_per_node"
    """The option by which the site gives GPUs: `--gpus-per-node=h100:8`, `--gres=gpu:h100:8`, `--gpus-per-task=h100:8`
    (a node has one task), or none, where a partition gives whole nodes."""
    cpus_per_task: PositiveInt | None = None
    """CPUs per node; null: all of a whole node (see `exclusive`)."""
    mem: str | None = None
    """Memory per node (`--mem`): a whole number with K, M, G or T, such as `512G`; without one, megabytes; `0` is all
    of it. It is text, so quote a plain number."""
    exclusive: bool = True
    """Take whole nodes."""
    constraint: str | None = None
    """Features that nodes must have (`--constraint`), such as `h100&ib`."""
    exclude: str | None = None
    """Nodes to avoid, such as `node[3,7]`."""
    dependency: str | None = None
    """`afterok:1234`, `singleton`."""
    array_parallel: PositiveInt | None = None
    """Jobs of a sweep's array that may run at once; null: all."""
    container_runtime: Literal["pyxis", "apptainer", "singularity"] = "pyxis"
    """What runs `container_image` on each node: Slurm's pyxis plugin (`srun --container-image`), or the program of this
    name (`apptainer exec`)."""
    container_image: str | None = None
    """The image that the run trains in, such as `/images/torch.sqsh` (pyxis) or `/images/torch.sif` (apptainer); null:
    no container. The job's supervisor stays outside, where srun is; its nodes' agents and workers run inside."""
    container_mounts: str | None = None
    """Further folders that the container sees, such as `/scratch:/scratch,/data:/data:ro`. What the run itself needs is
    mounted without being named: trainspec, the run's folder, the folder of `sbatch`, the data, the weights that it
    begins with, and the cache."""
    container_python: str = "python3"
    """The image's Python that has torch, by name or path. A path into a virtual or conda environment of the submitting
    machine has that environment mounted too."""
    container_gpus: Literal["auto", "nvidia", "amd", "none"] = "auto"
    """The option that lets Apptainer's containers see GPUs: `--nv`, `--rocm`, or none; auto: by the accelerator's
    vendor, nvidia where it is not known. pyxis leaves that to the site's hooks."""
    container_env: tuple[str, ...] = ()
    """Variables whose value outside holds inside too where the image sets another, such as `[NCCL_IB_HCA]`; those that
    the image does not set are passed on without that."""
    sbatch_lines: tuple[str, ...] = ()
    """Further options, each line copied verbatim after `#SBATCH` into job.sbatch, such as `--mail-type=END`. One that
    contradicts what the script asks for is refused."""
    setup: tuple[str, ...] = ()
    """Shell commands before the job begins, such as `module load cuda` or `export NCCL_IB_HCA=mlx5`; the environment
    that was active at submission is activated after them. One that fails ends the job (`|| true` behind it prevents
    that). They run as you: `trainspec sbatch` shows them, and submits
    those of a file that another user owns, or that everyone may write, only with --allow-setup. The same goes for
    `sbatch_lines` and `container_image`."""
    warn_s: NonNegativeInt = 120
    """How long before the time limit (or a preemption that sends the job's signal) the run saves and ends."""
    max_requeues: NonNegativeInt = 10
    """How often a job that met its time limit, was preempted or lost a node is requeued and resumes."""


@dataclass(frozen=True)
class PoolSpec:
    """Nodes of one kind, of a cluster that has several kinds."""

    accelerator: AcceleratorSpec
    """The accelerator of its nodes: the name of one in `trainspec list`, or its values."""
    num_nodes: PositiveInt
    """Nodes of the pool."""
    devices_per_node: PositiveInt = 8
    """Devices of each of its nodes."""
    name: str = ""
    """The pool's name, as plans show it; empty: the accelerator's."""
    scaleup_devices: PositiveInt | None = None
    """Devices joined by the fast links; null: those of a node."""
    link_gb_per_s: NonNegativeFloat | None = None
    """Of the fast links, one direction, per device; null: the accelerator's."""
    nic_gbit_per_s: PositiveFloat | None = None
    """Bandwidth between nodes, one direction, per device; null: `cluster.nic_gbit_per_s`, or as is usual for the
    accelerator."""
    nic_kind: NetworkKind | None = None
    """The kind of network between its nodes; null: `cluster.nic_kind`."""
    price_usd_per_device_hour: NonNegativeFloat | None = None
    """Rent; null: `cluster.cost.price_usd_per_device_hour`, or the accelerator's own."""


@dataclass(frozen=True)
class ClusterSpec:
    num_nodes: PositiveInt = 1
    """Nodes of the run."""
    devices_per_node: AutoInt = AUTO
    """Processes per node, one per device; auto: every GPU, or on a machine without GPUs as few as `layout` and
    `resilience` allow, usually one with every core."""
    device: Literal["cpu", "cuda"] | Auto = AUTO
    """auto: cuda if there is a GPU, else cpu; a machine without GPUs is refused if `accelerator` names one, and cpu
    trains on its CPUs."""
    name: str = ""
    """The cluster's name, as plans and reports show it."""
    accelerator: AcceleratorSpec | None = None
    """null: the accelerator of this machine."""
    pools: tuple[PoolSpec, ...] = ()
    """Nodes of several kinds, for `trainspec plan`: `[h100_sxm*8x8, a100_sxm_80gb*4x8]` (accelerator*nodes x devices of
    a node), or a list of their values. They stand in the place of `num_nodes`, `devices_per_node` and `accelerator`."""
    pool_link_gbit_per_s: PositiveFloat | None = None
    """Bandwidth between pools, one direction, per device; null: that of the slower pool's NICs."""
    scaleup_devices: PositiveInt | None = None
    """Devices joined by the fast links; null: those of a node. 72 in a GB200 NVL72 rack of 4-device nodes."""
    link_gb_per_s: NonNegativeFloat | None = None
    """One direction, per device; null: the accelerator's."""
    nic_gbit_per_s: NonNegativeFloat | None = None
    """Bandwidth between nodes, one direction, per device (a node's NICs over its devices); null: as is usual for the
    accelerator."""
    nic_kind: NetworkKind = "infiniband"
    """The network between nodes: its latency and its efficiency follow from it."""
    oversubscription: Annotated[float, Range(1)] | None = None
    """How much more the devices below the outermost tier of the network can send than it passes on; 3 is written 3:1.
    null: what the fabric's last tier says, and 1 for a cluster without tiers, whose one network joins the nodes."""
    fabric: FabricSpec = field(default_factory=FabricSpec)
    """The tiers of the network, from the fastest links to the slowest."""
    host_link_gb_per_s: PositiveFloat = 50.0
    """Device to host memory, one direction, for offload."""
    host_memory_gb: NonNegativeFloat = 2048.0
    """Memory of a node."""
    storage_gb_per_s: PositiveFloat = 1.2
    """Bandwidth to checkpoint storage, per node: 2.3 TB in 40 s from 48 nodes (BLOOM, stas00/ml-engineering, fault-
    tolerance)."""
    efficiency: dict[str, float] | None = None
    """Corrections of the planner's efficiencies for this cluster, as `trainspec backtest --fit` writes them."""
    profile: Literal["auto", "off"] = "auto"
    """auto: plans and launches use what `trainspec calibrate` has learned of the cluster of this name, and say so; off:
    they do not."""
    reliability: ReliabilitySpec = field(default_factory=ReliabilitySpec)
    """How often devices fail, and how long it takes until a run goes on."""
    site: SiteSpec = field(default_factory=SiteSpec)
    """The building and its electricity."""
    power: PowerSpec = field(default_factory=PowerSpec)
    """The power that a node takes."""
    cost: CostSpec = field(default_factory=CostSpec)
    """The cost of a device-hour."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """Options of Slurm jobs, for `trainspec sbatch`."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it. A number of 0 is one that the driver does not report."""

    name: str
    memory_bytes: int
    """Its own memory, or the system's where it computes in that."""
    compute_capability: tuple[int, int]
    """NVIDIA's; of an AMD GPU its gfx target, such as (9, 0x42) for gfx942."""
    free_bytes: int
    """Memory of the GPU that no other program holds."""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    processors: int = 0
    """Multiprocessors, or compute units."""
    clock_mhz: float = 0.0
    """The highest clock of the multiprocessors."""
    memory_gb_per_s: float = 0.0
    power_w: float = 0.0
    nvlink_gb_per_s: float | None = None
    """All links that are up, one direction; 0: the GPU has links, and all are down. None: it reports no links."""
    pcie_gb_per_s: float = 0.0

    @property
    def bf16(self) -> bool:
        """Whether its matrix units multiply bf16: NVIDIA since Ampere, AMD since MI100 (gfx908) and RDNA 3."""
        if self.vendor == "amd":
            return self.compute_capability >= (9, 0x08) and self.compute_capability[0] != 10
        return self.compute_capability >= (8, 0)

    @property
    def fp8(self) -> bool:
        """Whether its matrix units multiply fp8: NVIDIA since Ada, AMD on MI300 (gfx942), MI350 and RDNA 4."""
        if self.vendor == "amd":
            return self.compute_capability >= (12, 0) or (9, 0x42) <= self.compute_capability < (10, 0)
        return self.compute_capability >= (8, 9)


@dataclass(frozen=True)
class Machine:
    """The hardware found on this node, without torch (see `run/job/machine.py`)."""

    hostname: str
    cpu_cores: int
    """Cores this process may use."""
    memory_bytes: int
    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: int = 0
    """Memory of the smallest GPU."""
    bf16: bool = False
    """bf16 is faster than fp32 on the device (amx_bf16 on a CPU, compute capability 8.0 on a GPU)."""
    fp8: bool = False
    """The GPUs multiply fp8 (compute capability 8.9)."""
    gpus: tuple[Gpu, ...] = ()
    """What the driver reports of each GPU; empty for a machine that is only described."""
    gpu_problem: Problem | None = None
    """Why GPUs or other accelerators of this node cannot be used; then no GPU is listed."""
    gpu_notes: tuple[str, ...] = ()
    """Facts about this node's GPUs that stop nothing, such as that all are hidden."""
