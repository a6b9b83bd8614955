"""A recipe's cluster as the planner knows it: its accelerator, its fabric, and how near they come to their rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.printable import GIB, format_bytes
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator, words
from trainspec_cli.planner.hardware.topology import Fabric, NetworkTier
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, Gpu, Machine, TierSpec

# The chip that a machine computes with: the catalogue's, or one that is derived from what the driver reports.
#
# A derived chip is conservative: where a generation has parts of several rates, it has the lowest. Its memory is
# exact, so what fits is known; its predicted times are upper bounds rather than estimates.


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
"""Compute capability -> floating-point operations of dense half-precision products, summed in fp32, per multiprocessor
and clock (architecture papers). GeForce parts of Turing, Ampere, Ada and Blackwell have half the rate of their
workstation siblings; the table has the lower one."""
AMD_FLOPS = {(9, 0x08): 512, (9, 0x0A): 1024, (9, 0x42): 2048, (9, 0x50): 4096, (11, 0): 512, (12, 0): 1024}
"""gfx target -> the same per compute unit (data sheets of MI100, MI250X, MI300X, MI355X, RX 7900 XTX, RX 9070 XT)."""
FP32_FLOPS = 128
"""The same of fp32 without matrix units: 64 lanes, two operations each, the fewest of any supported generation."""
SUSTAINED = 0.75
"""Part of the highest clock that is counted: a GeForce's is 1.2 to 1.3 of the boost clock of its data sheet."""
LEAST_PROCESSORS, LEAST_CLOCK_MHZ, LEAST_MEMORY_GB_PER_S, PCIE_GB_PER_S = 16, 1000.0, 200.0, 12.0
"""Stand for what an old driver, or a GPU without its own memory, does not report: the least of the cards with 8 GB or
more that torch supports; and PCIe 3 x16."""
ALIKE = 0.85
"""An NVIDIA GPU with less than this part of the load and store rate that the catalogue has for its name is another
chip: the laptop's part of that name, or a slice (MIG). An AMD GPU with less than this part of the memory is one die of
a board (MI250X), or a partition."""
RATES = ("_tflops", "_tb_per_s", "cache_mb", "tdp_w")
"""Ends of the names of an accelerator's values that a part of it has a part of."""


@lru_cache(maxsize=32)
def chip_of(machine: Machine) -> tuple[AcceleratorSpec | None, tuple[str, ...]]:
    """Return the chip of a machine's GPUs, and notes on how it is known; None where nothing is known but a name.

    Of GPUs that differ, the slowest speaks for all, with the smallest memory: a synchronous step waits for both.
    """
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
    """Return whether a GPU of the machine is not in the catalogue, so that its rates are derived."""
    return any(_chip_of_gpu(gpu)[1] for gpu in dict.fromkeys(machine.gpus))


@lru_cache(maxsize=32)
def _chip_of_gpu(gpu: Gpu) -> tuple[AcceleratorSpec, str]:
    """Return the catalogue's chip of a GPU, or a derived one with a note that says so."""
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
    note = f"no accelerator of the catalogue is like {gpu.name}: its rates are low ones, derived from what its driver"
    return derived, f"{note} {source}; {how}"


def _part_of(chip: AcceleratorSpec, part: float, gpu: Gpu) -> tuple[AcceleratorSpec, str]:
    """Return one die of a board, or a partition of a chip, which ROCm shows as a GPU of its own."""
    rates = {field.name: part * getattr(chip, field.name) for field in fields(chip) if field.name.endswith(RATES)}
    note = f"{gpu.name} has {part:.0%} of the memory of a whole {chip.name}, and is planned with that part of its rates"
    return replace(chip, **rates), note


def derive(gpu: Gpu) -> AcceleratorSpec:
    """Return a chip of at most the GPU's rates, with its memory."""
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
    """The cluster as described; what it leaves open is taken from this machine."""
    chip = cluster.accelerator or accelerator_of(machine)
    per_node = cluster.devices_per_node
    if per_node == AUTO:
        per_node = 8 if machine is None else len(machine.gpu_names) or min(2, machine.cpu_cores)
    # Times are divided by these rates, and capacities are shares of this memory: without them there is no plan.
    wanted = {"memory_gb": chip.memory_gb, "memory_tb_per_s": chip.memory_tb_per_s}
    wanted["bf16_tflops"] = chip.bf16_tflops or chip.fp16_tflops
    problems = []
    for key, value in wanted.items():
        if value <= 0:
            message = f"{chip.name}: `{key}` is {value:g}; more than 0 is needed"
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
    fabric = with_tiers(fabric, oversubscribed(cluster.fabric.tiers, cluster.oversubscription))
    if cluster.oversubscription is not None and not fabric.described:
        fabric = replace(fabric, nic_gbit_per_s=fabric.nic_gbit_per_s / cluster.oversubscription)
    _check_links(fabric)
    return fabric


def usual_gbit(chip: AcceleratorSpec) -> float:
    """Gbit/s per device of the network that servers of a chip's class are sold with."""
    peak = chip.bf16_tflops or chip.fp16_tflops
    if chip.link_kind == "pcie":
        return 50.0
    return 400.0 if peak > 500 else 200.0 if peak > 200 else 100.0


def _check_links(fabric: Fabric) -> None:
    """Raise RecipeError where nothing says how fast the devices of a scale-up domain exchange data."""
    joined = min(fabric.scaleup_devices, fabric.num_devices)
    if joined > 1 and fabric.link_gb_per_s <= 0:
        path = "cluster.accelerator.link_gb_per_s"
        message = f"`{path}` of {fabric.chip.name} has no value, and {joined} devices exchange data over these links"
        hint = f"type {path}=<GB/s of a device, one direction>: 63 on PCIe 5 x16, 450 on an H100's NVLink"
        raise RecipeError(Problem("missing_value", message, path, hint))


def oversubscribed(tiers: tuple[TierSpec, ...], oversubscription: float | None) -> tuple[TierSpec, ...]:
    """Return the tiers with the oversubscription of the last one as the cluster says it, where it says one."""
    if oversubscription is None or not tiers:
        return tiers
    return *tiers[:-1], replace(tiers[-1], oversubscription=oversubscription)


def with_tiers(fabric: Fabric, tiers: Sequence[TierSpec]) -> Fabric:
    """Return the fabric with the tiers that a recipe describes; what they leave open is the cluster's own."""
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
    """Half of the cores for each of two processes: 0.47 Tflop/s a core with AMX, 0.11 without; 6 GB/s of memory."""
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
    """The planner's own, with the cluster's corrections. Raises RecipeError for those it does not know."""
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
