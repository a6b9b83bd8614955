"""The planner's view of a recipe's cluster: its links, the collectives over them, and its accelerator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.printable import GIB, format_bytes
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator, link_bytes_per_s, words
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, Gpu, Machine, PoolSpec, TierSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec

NIC_KIND_RATIO = {"infiniband": 1.0, "roce": 0.92, "efa": 0.8, "omnipath": 0.8, "ethernet": 0.6, "measured": 1.0}
"""Bandwidth that a collective reaches over each kind of network, relative to InfiniBand. Measured rates are used as
they are."""


def network_bytes_per_s(gbit_per_s: float, kind: str, eff: Efficiency) -> float:
    """Return the rate that collectives reach over a device's share of a network. It is always above 0."""
    return max(eff.nic * NIC_KIND_RATIO.get(kind, 0.8) * gbit_per_s / 8 * 1e9, 1.0)


@dataclass(frozen=True)
class NetworkTier:
    """A tier of the network beyond the scale-up domain."""

    name: str
    devices: int
    """Number of devices below one element of the tier."""
    gbit_per_s: float
    """A device's share of the tier's bandwidth, per direction, after oversubscription."""
    kind: str = "infiniband"
    latency_s: float | None = None
    """Latency of a message that crosses the tier; None: the planner's default hop latency."""

    def bytes_per_s(self, eff: Efficiency) -> float:
        return network_bytes_per_s(self.gbit_per_s, self.kind, eff)


@dataclass(frozen=True)
class Fabric:
    """Devices and the links between them."""

    chip: AcceleratorSpec
    num_devices: int
    devices_per_node: int
    scaleup_devices: int
    """Number of devices that share the fast links."""
    link_gb_per_s: float
    nic_gbit_per_s: float
    """A device's share of its node's NIC bandwidth, per direction."""
    nic_kind: str = "infiniband"
    host_link_gb_per_s: float = 50.0
    described: tuple[NetworkTier, ...] = ()
    """The network's tiers, innermost first; the last one reaches every device. If empty, the NICs reach every
    device."""
    link_latency_s: float | None = None
    """Latency of a message inside a scale-up domain; None: the planner's default hop latency."""
    name: str = ""

    @cached_property
    def groups(self) -> dict[tuple[int, int], tuple[Efficiency, Group]]:
        """Cache of groups by size and stride, together with the efficiencies used to compute them."""
        return {}

    @property
    def speaks_gloo(self) -> bool:
        """Return whether collectives use gloo, for example between CPUs."""
        return self.chip.vendor == "cpu"

    @property
    def network(self) -> tuple[NetworkTier, ...]:
        """Tiers beyond the scale-up domain, innermost first."""
        return self.described or (NetworkTier("network", self.num_devices, self.nic_gbit_per_s, self.nic_kind),)


@dataclass(frozen=True)
class Crossing:
    """A tier above the first network tier, as seen by a group of ranks that crosses it."""

    ranks: int
    """Number of the group's ranks inside one element of the tier below."""
    bytes_per_s: float
    """Bandwidth of one device through the tier."""
    latency_s: float | None = None


@dataclass(frozen=True)
class Group:
    """The ranks of one collective, described by their positions in the network."""

    size: int
    per_domain: int
    """Number of the group's ranks inside one scale-up domain."""
    link_bytes_per_s: float
    nic_bytes_per_s: float
    """Bandwidth of one device to other nodes."""
    outer: tuple[Crossing, ...] = ()
    """The tiers that the group crosses above the first network tier, innermost first."""
    link_latency_s: float | None = None
    nic_latency_s: float | None = None
    speaks_gloo: bool = False
    """True if collectives use gloo. Gloo has no tree algorithm, and each step of its rings waits for the slowest hop.
    Its reduce-scatter is an all-reduce after which each rank keeps its part."""

    @property
    def domains(self) -> int:
        return max(1, -(-self.size // self.per_domain))

    @property
    def crosses(self) -> bool:
        return self.size > self.per_domain

    @cached_property
    def ring_bytes_per_s(self) -> float:
        """Return the total rate of rings through all ranks, which are ordered by tier. Each rank of an element has a
        separate ring to the next element."""
        if not self.crosses:
            return self.link_bytes_per_s
        network = self.nic_bytes_per_s * self.per_domain
        first = min(self.link_bytes_per_s, network) if self.per_domain > 1 else network
        return min([first, *(tier.ranks * tier.bytes_per_s for tier in self.outer)])

    @cached_property
    def spans(self) -> tuple[tuple[int, float | None], ...]:
        """Return, for each network tier that the group crosses, the number of elements of the tier below that it
        connects, and the latency of a message through it (None: the planner's default hop latency)."""
        insides = (self.per_domain, *(tier.ranks for tier in self.outer))
        latencies = (self.nic_latency_s, *(tier.latency_s for tier in self.outer))
        joined = (-(-outside // inside) for inside, outside in pairwise((*insides, self.size)))
        return tuple(zip(joined, latencies, strict=True))

    @cached_property
    def hops(self) -> tuple[float, float]:
        """Return, for one ring or tree pass, the number of hops over links with the planner's default latency, and the
        total time in seconds of hops over links with a specified latency."""
        hops = 0.0
        stated_s = 0.0
        inside = ((min(self.per_domain, 8) - 1, self.link_latency_s),)
        across = ((2.0 * (joined - 1).bit_length(), latency) for joined, latency in self.spans)
        for passes, latency in (*inside, *across):
            if latency is None:
                hops += passes
            else:
                stated_s += passes * latency
        return hops, stated_s


def group_of(fabric: Fabric, size: int, stride: int, eff: Efficiency) -> Group:
    """Return the group of `size` ranks, `stride` apart in rank order. The fabric caches groups, because a search
    requests a few hundred distinct ones tens of thousands of times."""
    kept = fabric.groups.get((size, stride))
    if kept is None or kept[0] is not eff:
        group = group_with(fabric, size, lambda devices: min(size, max(1, devices // stride)), eff)
        kept = fabric.groups[size, stride] = eff, group
    return kept[1]


def group_with(fabric: Fabric, size: int, inside: Callable[[int], int], eff: Efficiency) -> Group:
    """Return the group of `size` ranks; `inside` returns how many of them are inside an element with a given number of
    devices."""
    per_domain = inside(fabric.scaleup_devices)
    gloo = fabric.speaks_gloo
    link = link_bytes_per_s(fabric.chip, fabric.link_gb_per_s, per_domain, eff)
    if not fabric.described:
        network = network_bytes_per_s(fabric.nic_gbit_per_s, fabric.nic_kind, eff)
        return Group(size, per_domain, link, network, speaks_gloo=gloo)
    first, *others = fabric.described
    below = first
    outer = []
    for tier in others:
        ranks = inside(below.devices)
        if size > ranks:
            outer.append(Crossing(ranks, tier.bytes_per_s(eff), _hop_s(fabric, tier.latency_s)))
        below = tier
    hops_s = _hop_s(fabric, fabric.link_latency_s), _hop_s(fabric, first.latency_s)
    return Group(size, per_domain, link, first.bytes_per_s(eff), tuple(outer), *hops_s, gloo)


def group_of_ranks(fabric: Fabric, ranks: Sequence[int], eff: Efficiency) -> Group:
    """Return the group of these global ranks, which need not have a regular stride."""
    return group_with(fabric, len(ranks), lambda devices: max(Counter(rank // devices for rank in ranks).values()), eff)


def _hop_s(fabric: Fabric, latency_s: float | None) -> float | None:
    """Return the latency of one step over a link. Gloo sends only after the receiver has signalled that it is ready."""
    return 2 * latency_s if latency_s is not None and fabric.speaks_gloo else latency_s


def axis_groups(layout: Layout, fabric: Fabric, eff: Efficiency) -> dict[str, Group]:
    """Return the groups of each axis; ranks are ordered with tp innermost, then cp, dp_shard, dp_replicate, and pp
    outermost."""
    tp = layout.tp
    cp = layout.cp
    inner = tp * cp
    dense = layout.data_parallel_size * cp
    expert_tp = layout.etp
    expert_dp = max(1, layout.data_parallel_size * cp * tp // (layout.ep * expert_tp))
    return {
        "tp": group_of(fabric, tp, 1, eff),
        "cp": group_of(fabric, cp, tp, eff),
        "etp": group_of(fabric, expert_tp, 1, eff),
        "ep": group_of(fabric, layout.ep, expert_tp, eff),
        "dp": group_of(fabric, dense, tp, eff),
        "dp_shard": group_of(fabric, layout.dp_shard * cp, tp, eff),
        "dp_replicate": group_of(fabric, layout.dp_replicate, inner * layout.dp_shard, eff),
        "expert_dp": group_of(fabric, expert_dp, layout.ep * expert_tp, eff),
        "pp": group_of(fabric, layout.pp, inner * layout.data_parallel_size, eff),
    }


# Duration of a collective: latency, plus bytes divided by the slower of two rates, that of the fast links and that of
# the network (alpha-beta model).
#
# Hockney's model with ring volumes, as in Thakur et al. 2005; each rank's NIC in a node carries one ring.
# Error relative to measured NCCL curves: about 20% from 1 MB up, more below.


def latency_s(group: Group, eff: Efficiency) -> float:
    """Return the latency in seconds of one ring or tree pass: hops inside a domain, and a tree across each outer
    tier."""
    if group.size <= 1:
        return 0.0
    hops, described_s = group.hops
    return eff.collective_latency_s + hops * eff.hop_latency_s + described_s


def all_gather_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Return the duration in seconds of an all-gather, after which every rank has `total_bytes`."""
    if group.size <= 1 or total_bytes <= 0:
        return 0.0
    if group.speaks_gloo:
        # Each step of gloo's ring waits for the slowest hop. A rank's part is sent in two segments, each after the
        # receiver's ready signal, which overlaps with the other segment; with two ranks, the signal queues behind the
        # data on the same connection.
        hop_s = _slowest_hop_s(group, eff)
        steps = group.size - 1
        sent_s = total_bytes / group.size / group.ring_bytes_per_s
        ring_s = steps * max(sent_s, sent_s / 2 + hop_s) + hop_s
        if group.size == 2:
            ring_s = steps * (sent_s + hop_s)
        return eff.collective_latency_s + ring_s
    return latency_s(group, eff) + total_bytes * (group.size - 1) / group.size / group.ring_bytes_per_s


def _slowest_hop_s(group: Group, eff: Efficiency) -> float:
    hops_s = [group.link_latency_s] if group.per_domain > 1 else []
    hops_s += [latency_s for joined, latency_s in group.spans if joined > 1]
    return max((eff.hop_latency_s if latency_s is None else latency_s for latency_s in hops_s), default=0.0)


def reduce_scatter_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Return the duration in seconds of a reduce-scatter, after which every rank has its part of the sum of
    `total_bytes`. With gloo, each rank sends every other rank its part and sums what it receives
    (`engine/comm/exchange.py`).

    A rank's connections within its domain are then faster and occupy its link first, so the time for the data that
    leaves the domain is added (measured: `tests/bench/fabrics.py --all`)."""
    if not group.speaks_gloo or group.size <= 1 or total_bytes <= 0:
        return all_gather_s(group, total_bytes, eff)
    inside_s, *crossing_s = _tier_times_s(group, total_bytes, 1)
    return eff.collective_latency_s + _slowest_hop_s(group, eff) + inside_s + max(crossing_s)


def all_reduce_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Return the duration in seconds of an all-reduce: a reduce-scatter, plus the same time to gather the parts."""
    return 2.0 * reduce_scatter_s(group, total_bytes, eff)


def all_to_all_s(group: Group, sent_bytes: float, copies: int, eff: Efficiency) -> float:
    """Return the duration in seconds of an all-to-all in which each rank sends `sent_bytes`, with `copies` copies of
    each token, spread evenly over the group.

    With several copies, a token is sent to a domain only once, however many of its experts are there, and is copied
    inside the domain (DeepEP, arXiv:2412.19437). Of d domains, it reaches (d-1) (1 - (1 - 1/d)^copies) others on
    average."""
    if group.size <= 1 or sent_bytes <= 0:
        return 0.0
    return latency_s(group, eff) + max(_tier_times_s(group, sent_bytes, copies, eff.all_to_all))


def _tier_times_s(group: Group, sent_bytes: float, copies: int, link_efficiency: float = 1.0) -> tuple[float, ...]:
    """Return the transfer times in seconds, without latency: inside the domain, over the NICs, and over each outer
    tier."""
    inside = sent_bytes * (group.per_domain - 1) / group.size / (group.link_bytes_per_s * link_efficiency)
    outside = _crossing_bytes(group, sent_bytes, copies, group.per_domain) / group.nic_bytes_per_s
    beyond = (_crossing_bytes(group, sent_bytes, copies, tier.ranks) / tier.bytes_per_s for tier in group.outer)
    return (inside, outside, *beyond)


def _crossing_bytes(group: Group, sent_bytes: float, copies: int, ranks: int) -> float:
    """Return the bytes that a rank sends outside its element of a tier, which contains `ranks` ranks of the group."""
    crossings = (group.size - ranks) / group.size * copies
    domains = group.domains
    own = max(1, ranks // group.per_domain)
    if copies > 1 and domains > 1:
        crossings = min(crossings, (domains - own) * (1 - (1 - 1 / domains) ** copies))
    return sent_bytes / copies * crossings


def send_s(group: Group, message_bytes: float, eff: Efficiency) -> float:
    """Return the time in seconds to send `message_bytes` to a neighbour on the axis. The slowest tier between any two
    neighbours determines this time, because all other ranks wait for those two."""
    if group.size <= 1:
        return 0.0
    near = group.link_bytes_per_s
    near_s = group.link_latency_s
    if group.crosses and group.per_domain == 1:
        near = group.nic_bytes_per_s
        near_s = group.nic_latency_s
    bandwidth = min([near, *(tier.bytes_per_s for tier in group.outer)])
    slowest_s = max(near_s or 0.0, *(tier.latency_s or 0.0 for tier in group.outer), 0.0)
    return eff.collective_latency_s + slowest_s + message_bytes / bandwidth


# The chip of a machine, either from the catalogue or derived from what the driver reports.


NVIDIA_FLOPS = {
    (7, 0): 1024,
    (7, 2): 512,
    (7, 5): 512,
    (8, 0): 2048,
    (8, 6): 512,
    (8, 7): 512,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 512,
    (12, 1): 512,
}
"""Compute capability -> FLOPs of dense half-precision matmuls with fp32 accumulation, per multiprocessor and clock
cycle (architecture papers). GeForce cards of the Turing, Ampere, Ada and Blackwell generations have half the rate of
their workstation siblings; the table lists the lower rate."""
AMD_FLOPS = {(9, 0x08): 512, (9, 0x0A): 1024, (9, 0x42): 2048, (9, 0x50): 4096, (11, 0): 512, (12, 0): 1024}
"""gfx target -> the same FLOPs per compute unit and clock cycle (data sheets of MI100, MI250X, MI300X, MI355X, RX 7900
XTX, RX 9070 XT)."""
FP32_FLOPS = 128
"""The same FLOPs for fp32 without matrix units: 64 lanes with two operations each, the lowest of any supported
generation."""
SUSTAINED = 0.75
"""Assumed fraction of the highest clock. On a GeForce, that clock is 1.2 to 1.3 times the boost clock in the data
sheet."""

# Defaults for values that an old driver, or a GPU without dedicated memory, does not report: the lowest among
# torch-supported cards with at least 8 GB, and PCIe 3 x16.
LEAST_PROCESSORS = 16
LEAST_CLOCK_MHZ = 1000.0
LEAST_MEMORY_GB_PER_S = 200.0
PCIE_GB_PER_S = 12.0
ALIKE = 0.85
"""An NVIDIA GPU with less than this fraction of the catalogue's load and store rate is a different chip: a laptop part
of the same name, or a slice (MIG). An AMD GPU with less than this fraction of the memory is one die of a board
(MI250X), or a partition."""
RATES = ("_tflops", "_tb_per_s", "cache_mb", "tdp_w")
"""Suffixes of the accelerator keys whose values scale with the size of a partition of the chip."""


@lru_cache(maxsize=32)
def chip_of(machine: Machine) -> tuple[AcceleratorSpec | None, tuple[str, ...]]:
    """Return the chip of a machine's GPUs, and notes on the sources of its values; None if only a name is known.

    If the GPUs differ, the slowest one represents all of them, with the smallest memory, because a synchronous step
    waits for it."""
    if not machine.gpu_names:
        return None, machine.gpu_notes
    if machine.gpus:
        chips = [_chip_of_gpu(gpu) for gpu in dict.fromkeys(machine.gpus)]
    else:
        found = [find_accelerator(name) for name in dict.fromkeys(machine.gpu_names)]
        if None in found:
            return None, machine.gpu_notes
        chips = [(chip, "") for chip in found if chip is not None]
    chip, note = min(chips, key=lambda known: known[0].bf16_tflops or known[0].fp16_tflops)
    notes = [*machine.gpu_notes, *([note] if note else [])]
    if machine.gpu_memory_bytes:
        chip = replace(chip, memory_gb=machine.gpu_memory_bytes / GIB)
    if len(set(machine.gpu_names)) > 1:
        names = ", ".join(sorted(set(machine.gpu_names)))
        notes.append(
            f"the GPUs differ ({names}): all are planned as {chip.name} with {format_bytes(machine.gpu_memory_bytes)}"
        )
    if chip.link_kind != "pcie" and len(machine.gpus) > 1 and any(gpu.nvlink_gb_per_s == 0 for gpu in machine.gpus):
        rate = min((gpu.pcie_gb_per_s for gpu in machine.gpus if gpu.pcie_gb_per_s), default=PCIE_GB_PER_S)
        chip = replace(chip, link_kind="pcie", link_gb_per_s=rate)
        notes.append(f"NVLink is down (nvidia-smi nvlink --status): the GPUs are planned with PCIe's {rate:.0f} GB/s")
    return chip, tuple(notes)


def is_derived(machine: Machine) -> bool:
    """Return whether any GPU of the machine is missing from the catalogue, so that its rates are derived."""
    return any(_chip_of_gpu(gpu)[1] for gpu in dict.fromkeys(machine.gpus))


@lru_cache(maxsize=32)
def _chip_of_gpu(gpu: Gpu) -> tuple[AcceleratorSpec, str]:
    """Return the catalogue's chip for a GPU, or a derived one, with a note."""
    derived = derive(gpu)
    chip = find_accelerator(gpu.name)
    if chip is not None and "".join(words(chip.name)) == "".join(words(gpu.name)) and gpu.vendor != "amd":
        return chip, ""
    if chip is not None and gpu.vendor == "amd":
        part = gpu.memory_bytes / GIB / chip.memory_gb
        return (chip, "") if part >= ALIKE else _part_of(chip, part, gpu)
    known = gpu.processors > 0 and gpu.clock_mhz > 0 and chip is not None and chip.load_store_tb_per_s > 0
    if chip is not None and (not known or derived.load_store_tb_per_s >= ALIKE * chip.load_store_tb_per_s):
        return chip, ""
    lacks = {"multiprocessors": gpu.processors, "clock": gpu.clock_mhz, "memory bandwidth": gpu.memory_gb_per_s}
    assumed = ", ".join(name for name, value in lacks.items() if not value)
    source = f"reports, and from a low assumption ({assumed})" if assumed else "reports"
    file = "_".join(words(gpu.name)) or "mine"
    how = f"describe it in conf/accelerator/{file}.yaml with `name: {gpu.name}` for better predictions"
    note = (
        f"the catalogue has no accelerator like {gpu.name}: its rates are low estimates, derived from what its driver"
    )
    return derived, f"{note} {source}; {how}"


def _part_of(chip: AcceleratorSpec, part: float, gpu: Gpu) -> tuple[AcceleratorSpec, str]:
    """Return the values of one die of a board, or of a partition of a chip, which ROCm reports as a separate GPU."""
    rates = {field.name: part * getattr(chip, field.name) for field in fields(chip) if field.name.endswith(RATES)}
    note = f"{gpu.name} has {part:.0%} of the memory of a full {chip.name}, and is planned with that part of its rates"
    return replace(chip, **rates), note


def derive(gpu: Gpu) -> AcceleratorSpec:
    """Derive a chip from the driver's values for a GPU. The chip's rates do not exceed the GPU's."""
    clocks_per_s = (gpu.processors or LEAST_PROCESSORS) * (gpu.clock_mhz or LEAST_CLOCK_MHZ) * 1e6
    table = NVIDIA_FLOPS if gpu.vendor == "nvidia" else AMD_FLOPS
    exact = table.get(gpu.compute_capability) or table.get((gpu.compute_capability[0], 0))
    half = exact or (FP32_FLOPS if gpu.compute_capability < min(table) else min(table.values()))
    tflops = SUSTAINED * clocks_per_s / 1e12
    linked = bool(gpu.nvlink_gb_per_s)
    return AcceleratorSpec(
        name=gpu.name,
        vendor=gpu.vendor,
        bf16_tflops=half * tflops if gpu.bf16 else 0.0,
        fp16_tflops=0.0 if gpu.bf16 else half * tflops,
        fp8_tflops=2 * half * tflops if gpu.fp8 else 0.0,
        tf32_tflops=half * tflops / 2 if gpu.bf16 and gpu.vendor == "nvidia" else 0.0,
        fp32_tflops=FP32_FLOPS * tflops,
        load_store_tb_per_s=64 * clocks_per_s / 1e12 if gpu.vendor == "nvidia" else 0.0,
        cache_mb=4.0,
        memory_gb=gpu.memory_bytes / GIB,
        memory_tb_per_s=(gpu.memory_gb_per_s or LEAST_MEMORY_GB_PER_S) / 1e3,
        link_gb_per_s=gpu.nvlink_gb_per_s or gpu.pcie_gb_per_s or PCIE_GB_PER_S,
        link_kind="mesh" if linked else "pcie",
        tdp_w=gpu.power_w,
    )


def describe_fabric(cluster: ClusterSpec, machine: Machine | None) -> Fabric:
    """Return the fabric of the described cluster; values left open are taken from this machine."""
    chip = cluster.accelerator or accelerator_of(machine)
    per_node = cluster.devices_per_node
    if per_node == AUTO:
        per_node = 8 if machine is None else max(1, len(machine.gpu_names))
    # These must not be 0: the planner divides by the rates, and capacities are fractions of the memory.
    wanted = {"memory_gb": chip.memory_gb, "memory_tb_per_s": chip.memory_tb_per_s}
    wanted["bf16_tflops"] = chip.bf16_tflops or chip.fp16_tflops
    problems = []
    for key, value in wanted.items():
        if value <= 0:
            message = f"{chip.name}: `{key}` is {value:g}; expected more than 0"
            problems.append(Problem("out_of_range", message, f"cluster.accelerator.{key}"))
    if problems:
        raise RecipeError(problems)
    devices = cluster.num_nodes * int(per_node)
    fabric = Fabric(
        chip=replace(chip, sources=None),
        num_devices=devices,
        devices_per_node=int(per_node),
        scaleup_devices=cluster.scaleup_devices or int(per_node),
        link_gb_per_s=cluster.link_gb_per_s or chip.link_gb_per_s,
        nic_gbit_per_s=cluster.nic_gbit_per_s or usual_gbit(chip),
        nic_kind=cluster.nic_kind,
        host_link_gb_per_s=cluster.host_link_gb_per_s,
        name=cluster.fabric.name,
    )
    tiers = cluster.fabric.tiers
    if cluster.oversubscription is not None and tiers:  # as with the cluster's value, this applies to the last tier
        tiers = (*tiers[:-1], replace(tiers[-1], oversubscription=cluster.oversubscription))
    fabric = with_tiers(fabric, tiers)
    if cluster.oversubscription is not None and not fabric.described:
        fabric = replace(fabric, nic_gbit_per_s=fabric.nic_gbit_per_s / cluster.oversubscription)
    joined = min(fabric.scaleup_devices, fabric.num_devices)
    if joined > 1 and fabric.link_gb_per_s <= 0:
        path = "cluster.accelerator.link_gb_per_s"
        message = f"`{path}` of {fabric.chip.name} has no value, and {joined} devices exchange data over these links"
        hint = f"set {path}=<GB/s per device, in one direction>: 63 on PCIe 5 x16, 450 on an H100's NVLink"
        raise RecipeError(Problem("missing_value", message, path, hint))
    return fabric


def usual_gbit(chip: AcceleratorSpec) -> float:
    """Return the usual network rate, in Gbit/s per device, of servers with a chip of this class."""
    peak = chip.bf16_tflops or chip.fp16_tflops
    if chip.link_kind == "pcie":
        return 50.0
    return 400.0 if peak > 500 else 200.0 if peak > 200 else 100.0


def with_tiers(fabric: Fabric, tiers: Sequence[TierSpec]) -> Fabric:
    """Return the fabric with the recipe's tiers; values left open are taken from the cluster."""
    if not tiers:
        return fabric
    domain, *network = tiers
    return replace(
        fabric,
        scaleup_devices=domain.devices or fabric.scaleup_devices,
        link_gb_per_s=(domain.gbit_per_s / 8 if domain.gbit_per_s else fabric.link_gb_per_s) / domain.oversubscription,
        link_latency_s=None if domain.latency_us is None else domain.latency_us / 1e6,
        described=tuple(
            NetworkTier(
                name=tier.name,
                devices=tier.devices or fabric.num_devices,
                gbit_per_s=(tier.gbit_per_s or fabric.nic_gbit_per_s) / tier.oversubscription,
                kind=tier.kind or fabric.nic_kind,
                latency_s=None if tier.latency_us is None else tier.latency_us / 1e6,
            )
            for tier in network
        ),
    )


def accelerator_of(machine: Machine | None) -> AcceleratorSpec:
    """Return the chip of this machine's GPUs, or a rough description of its CPU."""
    hint = "choose one: cluster=h100, or describe your own in conf/accelerator and conf/cluster"
    if machine is None:
        raise RecipeError(Problem("no_accelerator", "the cluster names no accelerator", "cluster.accelerator", hint))
    if machine.gpu_problem:
        raise MachineError(machine.gpu_problem)
    if not machine.gpu_names:
        return cpu_of(machine)
    chip, _ = chip_of(machine)
    if chip is None:
        message = f"the catalogue has no accelerator like {machine.gpu_names[0]}"
        raise RecipeError(Problem("unknown_accelerator", message, "cluster.accelerator", hint))
    return chip


def cpu_of(machine: Machine) -> AcceleratorSpec:
    """Return the half of this machine's CPU that each of two processes uses. A core is assumed to have 0.47 TFLOP/s
    with AMX, 0.11 without, and 6 GB/s of memory bandwidth."""
    cores = max(1.0, machine.cpu_cores / 2)
    return AcceleratorSpec(
        name="CPU",
        vendor="cpu",
        bf16_tflops=(0.47 if machine.bf16 else 0.11) * cores,
        fp32_tflops=0.11 * cores,
        memory_gb=machine.memory_bytes / GIB / 2,
        memory_tb_per_s=0.006 * cores,
        link_gb_per_s=2.0,
        link_kind="pcie",
    )


def efficiency_of(cluster: ClusterSpec) -> Efficiency:
    """Return the planner's efficiencies with the cluster's corrections. Raises RecipeError for unknown names."""
    known = Efficiency().as_dict()
    given = cluster.efficiency or {}
    problems = []
    hint = f"it has {', '.join(known)}"
    for name in (name for name in given if name not in known):
        message = f"the planner has no efficiency `{name}`"
        problems.append(Problem("unknown_key", message, f"cluster.efficiency.{name}", hint))
    if problems:
        raise RecipeError(problems)
    return Efficiency(**given)


def pool_names(pools: Sequence[PoolSpec]) -> list[str]:
    """Return the name of each pool; duplicate names are numbered."""
    names = [pool.name or pool.accelerator.name for pool in pools]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def cluster_of(cluster: ClusterSpec, pool: PoolSpec) -> ClusterSpec:
    """Return a pool as a cluster; values left open are taken from the full cluster."""
    price = pool.price_usd_per_device_hour
    cost = cluster.cost if price is None else replace(cluster.cost, price_usd_per_device_hour=price)
    return replace(
        cluster,
        name=pool.name or cluster.name,
        accelerator=pool.accelerator,
        pools=(),
        pool_link_gbit_per_s=None,
        num_nodes=pool.num_nodes,
        devices_per_node=pool.devices_per_node,
        scaleup_devices=pool.scaleup_devices,
        link_gb_per_s=pool.link_gb_per_s,
        nic_gbit_per_s=pool.nic_gbit_per_s or cluster.nic_gbit_per_s,
        nic_kind=pool.nic_kind or cluster.nic_kind,
        cost=cost,
    )


def on_pools(spec: RunSpec, pools: Sequence[PoolSpec]) -> RunSpec:
    """Return the recipe restricted to these pools. A single pool becomes an ordinary cluster. If `pools` is empty,
    nothing changes."""
    if not pools:
        return spec
    if len(pools) == 1:
        return replace(spec, cluster=cluster_of(spec.cluster, pools[0]))
    nodes = sum(pool.num_nodes for pool in pools)
    return replace(spec, cluster=replace(spec.cluster, pools=tuple(pools), num_nodes=nodes))
