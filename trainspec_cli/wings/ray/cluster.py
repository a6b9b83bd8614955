"""The Ray cluster: connect to it, reserve nodes for a run, and learn what they are."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainspec_cli import __version__
from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.printable import format_duration
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.backend.nodes.backend import JOIN_KEY
from trainspec_cli.run.job.machine import detect

NAMESPACE = "trainspec"
"""The Ray namespace of the supervisors, which are named after their run folders."""
ADDRESS = "RAY_ADDRESS"
AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_MODE = "token"
START_HEAD = f"{AUTH_MODE}=token ray start --head --port=6379"
START_OTHER = f"{AUTH_MODE}=token ray start --address=HEAD:6379"
HOW_TO_START = (
    "create a token once with `ray get-auth-token --generate`, and copy ~/.ray/auth_token to every machine; on the "
    f"first machine: {START_HEAD}; on each other machine: {START_OTHER}"
)
REFUSED = "Failed to connect to Ray cluster"
LOOK_S = 1.0
CONNECT_TIMEOUT_S = 5.0
DESCRIBE_TIMEOUT_S = 120.0
"""Time in seconds for the first Python process on a node to start and import trainspec."""


def connect() -> None:
    """Connect this process to the cluster of RAY_ADDRESS, or to the one on this machine. Raises MachineError."""
    if ray.is_initialized():
        return
    address = os.environ.get(ADDRESS, "auto")
    where = f"at {address} ({ADDRESS})" if ADDRESS in os.environ else "on this machine"
    if "://" in address:
        message = f"{ADDRESS} is {address}; trainspec connects from a machine of the cluster"
        hint = f"run the command on a machine of the cluster, with {ADDRESS}=HEAD:6379 or without it"
        raise MachineError(Problem("ray_address", message, hint=hint, environment=True))
    try:
        if address != "auto":  # Ray itself would wait for more than a minute
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        # Ray reports a wrong token only in its log; that something listens has been found above.
        if isinstance(error, ray.exceptions.AuthenticationError) or REFUSED in str(error):
            message = f"the Ray cluster {where} did not accept the connection: this user has no token, or another one"
            hint = f"copy ~/.ray/auth_token from the first machine (or set RAY_AUTH_TOKEN), and set {AUTH_MODE}=token"
            raise MachineError(Problem("ray_token", message, hint=hint, environment=True)) from error
        message = f"no Ray cluster was found {where}: {str(error).splitlines()[0]}"
        raise MachineError(Problem("no_ray", message, hint=HOW_TO_START, environment=True)) from error


@dataclass(frozen=True)
class Bundle:
    """A node of a run: one bundle of a placement group. If its machine dies, Ray places it on another one."""

    group: PlacementGroup
    bundle: int

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, self.bundle)

    @property
    def resources(self) -> dict[str, float]:
        return dict(self.group.bundle_specs[self.bundle])

    @property
    def options(self) -> dict[str, object]:
        """Return the options of an actor or task that takes the whole bundle."""
        bundle = self.resources
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": self.strategy,
        }


def locate(places: Sequence[Bundle]) -> list[str]:
    """Return the id of each place's machine; empty while it has none."""
    tables = {place.group.id: placement_group_table(place.group) for place in places}
    return [tables[place.group.id].get("bundles_to_node_id", {}).get(place.bundle) or "" for place in places]


def own_ip() -> str:
    """Return the address of this process's node, as Ray knows it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def alive() -> dict[str, dict[str, float]]:
    """Return the resources of the cluster's live machines, by the machines' ids."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


@contextmanager
def reserve(spec: RunSpec, console: PrintableConsole) -> Iterator[tuple[tuple[Bundle, ...], Machine]]:
    """Reserve the nodes of a run, and its spares as far as they exist or once they do. Yield them, and a description of
    one node. If the block fails, the nodes are released. Raises MachineError if there are too few nodes within
    `run.join_timeout_s`, or if a node cannot be used."""
    num_nodes = spec.cluster.num_nodes
    # Replica groups wait for their own node: a spare would only keep a machine from taking its place.
    spares = (spec.cluster.reliability.spare_nodes or 0) if spec.resilience.mode == "restart" else 0
    deadline_s = time.monotonic() + spec.run.join_timeout_s
    bundle = _await_nodes(spec, num_nodes, deadline_s, console)
    groups = [placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD", lifetime="detached")]
    try:
        _await_group(groups[0], num_nodes, spec, deadline_s, console)
        # A group of its own for each spare, because a group is only placed as a whole.
        groups += [placement_group([bundle], lifetime="detached") for _ in range(spares)]
        places = tuple(Bundle(group, place) for group in groups for place in range(group.bundle_count))
        yield places, _examine(places[:num_nodes], spec)
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise


def release(places: Sequence[Bundle]) -> None:
    for group in {place.group.id: place.group for place in places}.values():
        remove_placement_group(group)


def _await_nodes(spec: RunSpec, num_nodes: int, deadline_s: float, console: PrintableConsole) -> dict[str, float]:
    """Wait until the cluster has enough nodes; return what each of them has at least."""
    told = -1
    while True:
        nodes = alive().values()
        found = sorted((usable(resources, spec.cluster) for resources in nodes), key=_size, reverse=True)
        found = [bundle for bundle in found if bundle]
        if len(found) >= num_nodes:
            return min(found[:num_nodes], key=_size)
        what = f"{len(found)} of {num_nodes} nodes are in the Ray cluster"
        if len(found) < len(nodes):
            what += f" ({len(nodes) - len(found)} more have too few CPUs or GPUs for this run)"
        if time.monotonic() > deadline_s:
            message = f"{what}, after {spec.run.join_timeout_s:g} s ({JOIN_KEY})"
            raise MachineError(
                Problem("too_few_nodes", message, "cluster.num_nodes", f"add nodes: {START_OTHER}", environment=True)
            )
        if told != len(found):
            told = len(found)
            limit = f"up to {format_duration(spec.run.join_timeout_s)}; {JOIN_KEY}"
            console.report(f"{what}: waiting for the others ({limit}); add one with {START_OTHER}")
        time.sleep(LOOK_S)


def usable(resources: dict[str, float], cluster: ClusterSpec) -> dict[str, float]:
    """Return the CPUs and GPUs of a node that a run may use; empty if it cannot use the node."""
    bundle = {"CPU": resources.get("CPU", 0)}
    if cluster.device != "cpu" and (resources.get("GPU") or cluster.device == "cuda"):
        wanted = resources.get("GPU", 0) if cluster.devices_per_node == AUTO else cluster.devices_per_node
        bundle["GPU"] = wanted if resources.get("GPU", 0) >= wanted else 0
    return bundle if all(bundle.values()) else {}


def _size(bundle: dict[str, float]) -> tuple[float, float]:
    return bundle.get("GPU", 0), bundle.get("CPU", 0)


def _await_group(
    group: PlacementGroup, num_nodes: int, spec: RunSpec, deadline_s: float, console: PrintableConsole
) -> None:
    if not group.wait(LOOK_S):
        console.report("waiting for nodes, because other Ray jobs use them")
        if not group.wait(max(1.0, deadline_s - time.monotonic())):
            limit = f"within {spec.run.join_timeout_s:g} s ({JOIN_KEY})"
            message = f"other Ray jobs use the nodes; {num_nodes} were not free {limit}"
            hint = "`ray status` shows what is in use"
            raise MachineError(Problem("too_few_nodes", message, "cluster.num_nodes", hint, environment=True))


@ray.remote
def describe_node(look_for_gpus: bool) -> JsonObject:
    machine = detect(look_for_gpus=look_for_gpus)
    return {
        "machine": to_plain(machine),
        "trainspec": __version__,
        "auth_mode": os.environ.get(AUTH_MODE, ""),
        "address": own_ip(),
    }


def _examine(places: Sequence[Bundle], spec: RunSpec) -> Machine:
    """Return a description of the first node. Raises MachineError if another version of trainspec is installed on a
    node, or if anyone on the network may run code on it."""
    gpus = spec.cluster.device != "cpu"
    asked = [describe_node.options(**place.options).remote(gpus) for place in places]
    try:
        nodes = ray.get(asked, timeout=DESCRIBE_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        message = f"a node of the Ray cluster cannot run trainspec: {str(error).strip().splitlines()[-1]}"
        hint = (
            f"install trainspec {__version__} with the extra `ray` on every node, in the Python that runs `ray start`"
        )
        raise MachineError(Problem("ray_node", message, hint=hint, environment=True)) from error
    for node in nodes:
        if node["trainspec"] != __version__:
            message = f"{node['address']} has trainspec {node['trainspec']}, and this is trainspec {__version__}"
            hint = f"install trainspec {__version__} in the Python that runs `ray start` there"
            raise MachineError(Problem("ray_node", message, hint=hint, environment=True))
        if node["auth_mode"] != TOKEN_MODE and not ipaddress.ip_address(str(node["address"])).is_loopback:
            message = (
                f"the Ray cluster runs without a token at {node['address']}, so anyone who reaches it runs code as you"
            )
            raise MachineError(Problem("ray_token", message, hint=HOW_TO_START, environment=True))
    return from_plain(Machine, nodes[0]["machine"])
