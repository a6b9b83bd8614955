"""Rules for replica groups and injected faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.fault import FaultSyntaxError, parse_faults

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

ELASTIC_WITHOUT_NUMBER = 2
"""Groups where neither `resilience.replica_groups` nor `layout.dp_replicate` says how many."""


def wanted_groups(spec: RunSpec) -> int:
    """Replica groups of a launch."""
    if spec.resilience.mode != "elastic":
        return 1
    if spec.resilience.replica_groups != AUTO:
        return int(spec.resilience.replica_groups)
    replicas = spec.layout.dp_replicate
    return ELASTIC_WITHOUT_NUMBER if replicas in (AUTO, 1) else int(replicas)


def fixed_groups(spec: RunSpec) -> int:
    """Count the groups beside the layout's own axes: `layout.dp_replicate` may count the groups itself."""
    counted_by_layout = spec.resilience.replica_groups == AUTO and spec.layout.dp_replicate not in (AUTO, 1)
    return 1 if counted_by_layout else wanted_groups(spec)


def groups(spec: RunSpec) -> Iterator[Problem]:
    """Two groups at least, of equally many processes."""
    path, number = "resilience.replica_groups", spec.resilience.replica_groups
    if spec.resilience.mode != "elastic":
        if number not in (AUTO, 1):
            message = f"`{path}` is {number}, and `resilience.mode` is {spec.resilience.mode}, which has no groups"
            yield Problem("unsupported", message, path, "type resilience=elastic")
        return
    number = wanted_groups(spec)
    if number == 1:
        message = f"`{path}` is 1; one group has no other to heal from"
        yield Problem("out_of_range", message, path, f"type {path}=2 or more, or resilience=restart")
    if spec.resilience.min_groups > number:
        path = "resilience.min_groups"
        message = f"`{path}` is {spec.resilience.min_groups}, and there are {number} replica groups"
        yield Problem("out_of_range", message, path, f"type {path}={number} or less")


def group_processes(spec: RunSpec) -> Iterator[Problem]:
    devices, number = spec.cluster.devices_per_node, wanted_groups(spec)
    if devices == AUTO or spec.cluster.num_nodes * devices % number == 0:
        return
    processes = spec.cluster.num_nodes * devices
    message = f"{processes} processes do not divide over {number} replica groups"
    hint = f"type cluster.devices_per_node={max(1, devices // number) * number}, or another resilience.replica_groups"
    yield Problem("not_divisible", message, "resilience.replica_groups", hint)


def whole_hosts(num_nodes: int, number: int) -> Iterator[Problem]:
    """The loss of a node must not take parts of several replica groups along."""
    if number == 1 or num_nodes % number == 0 or number % num_nodes == 0:
        return
    path = "resilience.replica_groups"
    message = f"{num_nodes} nodes do not divide over {number} replica groups, nor the groups over the nodes"
    fitting = [n for n in range(2, 2 * num_nodes + 1) if num_nodes % n == 0 or n % num_nodes == 0]
    near = sorted(fitting, key=lambda n: abs(n - number))[:3]
    yield Problem("not_divisible", message, path, f"type {path}={' or '.join(map(str, sorted(near)))}")


def faults(spec: RunSpec) -> Iterator[Problem]:
    try:
        parsed = parse_faults(spec.fault)
    except FaultSyntaxError as error:
        yield Problem("bad_fault", f"`fault`: {error}", "fault", "type fault='kill(group=1,step=40)'")
        return
    number = wanted_groups(spec)
    for fault in parsed:
        if fault.group >= number:
            message = f"`fault` is for replica group {fault.group}, and the groups are numbered 0 to {number - 1}"
            yield Problem("out_of_range", message, "fault", "type fault='kill(group=0,step=40)'")
        if fault.kind in ("lighthouse", "bitflip") and number == 1:
            message = f"`fault` {fault.kind} is felt by replica groups alone"
            yield Problem("unsupported", message, "fault", "type resilience=elastic")


ELASTIC_RULES = (groups, group_processes, faults)
