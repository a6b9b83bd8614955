"""The costs of data parallelism's exchanges in each format: bytes on the wire, and the encoding of what goes there.

The bytes of a value are those of `engine/comm/codec.py`. Encoding is bound by memory: `ENCODING_BYTES` counts what the
operations of one reduce-scatter move through it for each value, feedback and decoding included. On one core of an EPYC,
which moves 6 GB/s, it took 21 ns a value in int8 and 25 ns in int4; counted are 14 and 21.
"""

from __future__ import annotations

from trainspec_cli.plan.hardware.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from trainspec_cli.plan.hardware.rates import Efficiency, memory_bytes_per_s
from trainspec_cli.plan.hardware.topology import Group
from trainspec_cli.plan.setup import Setup
from trainspec_cli.recipe.keys.comm import WireFormat

GRADIENT_BYTES: dict[WireFormat, float] = {"bf16": 2.0, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}
"""Bytes of a value, with its share of a block's scale."""
PARAMETER_BYTES: dict[WireFormat, float] = {"bf16": 2.0, "int8": 1 + 2 / 2048}
ENCODING_BYTES: dict[WireFormat, float] = {"bf16": 16.0, "int8": 85.0, "int4": 125.0}
SECOND_ENCODING = 0.5
"""Share of an all-reduce whose sums are encoded once more: each rank encodes its own part alone, and decodes all."""


def scatter_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of a reduce-scatter of gradients that have `full_bytes` in full."""
    return _gradients_s(group, full_bytes, setup, eff, passes=1, encodings=1.0)


def sum_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of an all-reduce of gradients."""
    return _gradients_s(group, full_bytes, setup, eff, passes=2, encodings=1 + SECOND_ENCODING)


def gather_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of a gathering of parameters that have `full_bytes` in full, two for each."""
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


def _encoding_s(group: Group, chosen: WireFormat, values: float, setup: Setup, eff: Efficiency) -> float:
    if group.size <= 1:
        return 0.0
    return ENCODING_BYTES[chosen] * values / memory_bytes_per_s(setup.fabric.chip, eff)
