"""A recipe's cluster as the planner knows it: its accelerator, its fabric, and how near they come to their rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.units import GIB
from trainspec_cli.plan.hardware.detected import chip_of
from trainspec_cli.plan.hardware.rates import Efficiency
from trainspec_cli.plan.hardware.topology import Fabric, NetworkTier
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, Machine
from trainspec_cli.recipe.keys.fabric import TierSpec


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
    known, given = Efficiency().as_dict(), cluster.efficiency or {}
    problems, hint = [], f"it has {', '.join(known)}"
    for name in (name for name in given if name not in known):
        message = f"the planner has no efficiency `{name}`"
        problems.append(Problem("unknown_key", message, f"cluster.efficiency.{name}", hint))
    if problems:
        raise RecipeError(problems)
    return Efficiency(**given)
