"""Data-parallel exchanges: gradients summed and parameters gathered, in each format, over shards, replicas and replica
groups."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.planner.hardware.cluster import (
    Group,
    all_gather_s,
    all_reduce_s,
    axis_groups,
    group_of,
    latency_s,
    reduce_scatter_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency, memory_bytes_per_s
from trainspec_cli.planner.setup import Setup
from trainspec_cli.recipe.keys.training import WireFormat

HOST_BYTES_PER_S = 100e9
"""Memory bandwidth of the host for one device's offloaded update."""
OFFLOADED_BYTES = 4.0
"""Bytes per offloaded parameter, and per gradient of an offloaded parameter: FSDP2 converts parameters to the compute
format on the device, and gradients to fp32 before they leave it."""
PACKET_BYTES = 2**20
"""Minimum size of a packet of gradients that crosses replica groups (`LARGE_BYTES` of
`engine/elastic/cross_group.py`)."""
BLOCK_MATRICES = 7
"""Weight matrices per block: four in attention, three in a gated MLP."""

# Cost of the data-parallel exchanges in each format: bytes sent, and encoding.
#
# Bytes per value match `engine/comm/codec.py`. Encoding is memory-bound: `ENCODING_BYTES` is the memory traffic per
# value of one reduce-scatter, including feedback and decoding. On one EPYC core with 6 GB/s, the measured times are 21
# ns per value in int8 and 25 ns in int4; the traffic predicts 14 and 21 ns.


GRADIENT_BYTES: dict[WireFormat, float] = {"bf16": 2.0, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}
"""Bytes per value, including the block's scale."""
PARAMETER_BYTES: dict[WireFormat, float] = {"bf16": 2.0, "int8": 1 + 2 / 2048}
ENCODING_BYTES: dict[WireFormat, float] = {"bf16": 16.0, "int8": 85.0, "int4": 125.0}
SECOND_ENCODING = 0.5
"""Relative cost of the second encoding in an all-reduce, where each rank encodes only its part of the sums but decodes
all parts."""


def scatter_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Return the duration in seconds of a reduce-scatter of gradients with `full_bytes` uncompressed bytes."""
    return _gradients_s(group, full_bytes, setup, eff, passes=1, encodings=1.0)


def sum_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Return the duration in seconds of an all-reduce of gradients."""
    return _gradients_s(group, full_bytes, setup, eff, passes=2, encodings=1 + SECOND_ENCODING)


def gather_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Return the duration in seconds of an all-gather of parameters with `full_bytes` uncompressed bytes (two per
    parameter)."""
    chosen = setup.software.wire.parameters
    if chosen == "full":
        return all_gather_s(group, full_bytes, eff)
    values = full_bytes / 2.0
    return all_gather_s(group, values * PARAMETER_BYTES[chosen], eff) + _encoding_s(group, chosen, values, setup, eff)


def _gradients_s(
    group: Group, full_bytes: float, setup: Setup, eff: Efficiency, *, passes: int, encodings: float
) -> float:
    wire = setup.software.wire
    chosen = wire.across_nodes if group.crosses else wire.gradients
    if chosen == "full":
        full_s = reduce_scatter_s if passes == 1 else all_reduce_s
        return full_s(group, full_bytes, eff)
    values = full_bytes / setup.software.reduce_bytes
    exchange_s = all_gather_s(group, values * GRADIENT_BYTES[chosen], eff)
    return passes * exchange_s + encodings * _encoding_s(group, chosen, values, setup, eff)


def statistics_s(group: Group, channels: int, eff: Efficiency) -> float:
    """Return the mean duration in seconds of a batch norm's exchanges in the forward pass (moments and their number, in
    fp64) and in the backward pass (two sums, in fp32)."""
    return (all_reduce_s(group, 8.0 * (2 * channels + 1), eff) + all_reduce_s(group, 8.0 * channels, eff)) / 2


def _encoding_s(group: Group, chosen: WireFormat, values: float, setup: Setup, eff: Efficiency) -> float:
    if group.size <= 1:
        return 0.0
    return ENCODING_BYTES[chosen] * values / memory_bytes_per_s(setup.fabric.chip, eff)


# Exchanges of a step


@dataclass(frozen=True)
class DataParallelExchange:
    """The data-parallel exchanges of a step, in seconds, without any overlap."""

    forward_s: float
    """Time to gather parameters during a micro-batch's forward pass."""
    backward_s: float
    """Time to gather them again and to reduce gradients during the backward pass."""
    times: int = 1
    """Number of micro-batches with an exchange: all of them with ZeRO-3, otherwise one."""
    across_s: float = 0.0
    """Time to reduce over replicas, once per step, which overlaps with half of a backward pass."""
    waited_s: float = 0.0
    """Time per step during which the device has no work queued, because the host adds gradients (`offload`)."""


def exchanges_of(
    params: float, expert_params: float, setup: Setup, groups: dict[str, Group], eff: Efficiency
) -> DataParallelExchange:
    """Return the exchanges for a rank with this many parameters. `groups`: groups of the setup's layout.

    Each replica group first reduces its gradients separately. Then ranks with the same number in their groups sum the
    results over the groups."""
    layout = setup.group_layout
    number = setup.layout.dp_replicate // layout.dp_replicate
    groups_s = 0.0
    if setup.replica_groups != 1 and number > 1:
        own = params / layout.shards + expert_params / layout.expert_shards
        groups_s = across_groups_s(own, number, setup, eff)
        groups = axis_groups(layout, setup.fabric, eff)
    gradients = setup.trainable * setup.software.reduce_bytes
    # Offloaded shards are copied to the device before they are gathered, and gradients are copied to the host after
    # they are summed.
    own = params / layout.shards + expert_params / layout.expert_shards
    offloads = setup.offload_optimizer and setup.software.counted
    copied_s = offloads * OFFLOADED_BYTES * own / (setup.fabric.host_link_gb_per_s * 1e9)
    back_s = setup.trainable * copied_s
    if layout.shards_parameters:
        shard = groups["dp_shard"]
        expert = groups["expert_dp"]
        gather = gather_s(shard, 2.0 * setup.sharded * params, setup, eff)
        gather += gather_s(expert, 2.0 * expert_params, setup, eff)
        scatter = setup.trainable * scatter_s(shard, setup.software.reduce_bytes * params, setup, eff)
        scatter += setup.trainable * scatter_s(expert, setup.software.reduce_bytes * expert_params, setup, eff)
        across = sum_s(groups["dp_replicate"], gradients * params / shard.size, setup, eff)
        forward_s = gather + copied_s
        reduce_s = scatter + back_s
        waited_s = 0.0
        if offloads:
            # After the first micro-batch, the host waits for each sum and adds it to earlier ones before it queues the
            # next layer.
            added_s = setup.trainable * 3 * OFFLOADED_BYTES * own / HOST_BYTES_PER_S
            waited_s = (setup.grad_accum - 1) * (reduce_s + added_s)
            reduce_s /= setup.grad_accum
        across_s = across + groups_s
        return DataParallelExchange(forward_s, forward_s + reduce_s, setup.grad_accum, across_s, waited_s)
    dense = groups["dp"]
    expert = groups["expert_dp"]
    if layout.dp_shard == 1:  # DDP
        reduce = sum_s(dense, params * gradients, setup, eff) + sum_s(expert, expert_params * gradients, setup, eff)
        return DataParallelExchange(copied_s, reduce + back_s, across_s=groups_s)
    reduce = scatter_s(dense, params * gradients, setup, eff)
    reduce += scatter_s(expert, expert_params * gradients, setup, eff)
    gather = gather_s(dense, params * setup.trainable * 2.0, setup, eff)
    gather += gather_s(expert, expert_params * setup.trainable * 2.0, setup, eff)
    return DataParallelExchange(gather + copied_s, reduce + back_s, across_s=groups_s)


def across_groups_s(params: float, number: int, setup: Setup, eff: Efficiency) -> float:
    """Return the time in seconds to sum the gradients of a rank's `params` over the replica groups, on the devices'
    backend.

    Packets (`engine/elastic/cross_group.py`) are sent one after another, so each one incurs the latency of a sum.
    Matrices of `PACKET_BYTES` or more are separate packets. Offloaded gradients are copied to the device and back."""
    group = group_of(setup.fabric, number, max(1, setup.fabric.num_devices // number), eff)
    kept_bytes = 4.0 * setup.trainable * params
    matrices = BLOCK_MATRICES * setup.model.num_layers / setup.layout.pp
    packets = max(1.0, kept_bytes / max(PACKET_BYTES, kept_bytes / matrices))
    summed_bytes = setup.trainable * setup.software.reduce_bytes * params
    copied_s = 2 * summed_bytes / (setup.fabric.host_link_gb_per_s * 1e9) if setup.offload_optimizer else 0.0
    return sum_s(group, summed_bytes, setup, eff) + (packets - 1) * 2 * latency_s(group, eff) + copied_s


def exposed_s(comm: float, beside: float, setup: Setup, eff: Efficiency) -> float:
    """Return the part of `comm` in seconds that is not hidden behind work of duration `beside`, plus the time by which
    the hidden part slows that work."""
    if not setup.software.overlap_dp:
        return comm
    # Collectives and kernels share the chip, so hidden communication still slows the work.
    hidden = min(comm, eff.dp_overlap * beside)
    return comm - hidden + eff.contention * hidden
