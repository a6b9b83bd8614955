"""What runs inside a container of a cluster manager: trainspec itself, with the plan's values pinned."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from trainspec_cli.errors import Problem
from trainspec_cli.interop.line import Line, show
from trainspec_cli.interop.run_values import RunValues
from trainspec_cli.json_value import JsonObject

WORKSPACE = "/workspace"
"""The volume that all nodes share, and the folder in which trainspec is started."""
PORT = 29500
PINNED = (
    *(f"layout.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")),
    *("layout.zero_stage", "layout.pipeline_schedule", "layout.virtual_stages"),
    *("batching.micro_batch_size", "recompute", "offload", "precision.compute"),
    *("cluster.num_nodes", "cluster.devices_per_node", "cluster.device"),
)
"""Keys whose planned value stands on the command line."""
GPUS: Mapping[str, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}
"""Vendor of the accelerator -> the resource that its device plugin offers."""


def dns_label(name: str) -> str:
    """Return a name that Kubernetes takes: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"


def launch_command(run: RunValues, node_rank: str, first_node: str) -> str:
    """Return the shell command of each node; `node_rank` and `first_node` are shell text."""
    pinned = [f"{key}={show(run[key])}" for key in PINNED if key in run.values]
    given = [argument for argument in run.arguments if argument.partition("=")[0] not in (*PINNED, "run.dir")]
    words = ["trainspec launch", *map(shlex.quote, given), *map(shlex.quote, pinned)]
    words.append(shlex.quote(f"run.dir={WORKSPACE}/runs/{dns_label(run.recipe)}"))
    if run["cluster.num_nodes"] != 1:
        words.append(f"--nnodes {run['cluster.num_nodes']} --node-rank {node_rank} --rdzv-endpoint {first_node}")
    return " ".join(words)


def resources(run: RunValues) -> JsonObject:
    """Return the devices of a node, as a container's limits."""
    if run["cluster.device"] == "cpu":
        return {}
    vendor = str(run["cluster.accelerator.vendor"])
    return {"limits": {GPUS[vendor]: run["cluster.devices_per_node"]}}


def container_needs(run: RunValues) -> Iterator[Problem]:
    """Yield what a manifest needs and nobody has said."""
    for option, value, what in (
        ("--image", run.container.image, "a container image that has trainspec"),
        ("--volume", run.container.volume, "a volume that all nodes mount, for recipes, data and the run"),
    ):
        if not value:
            hint = f"add {option} NAME"
            yield Problem("missing_value", f"{option} is not given: {what}", option, hint)
    vendor = run["cluster.accelerator.vendor"]
    if run["cluster.device"] == "cuda" and vendor not in GPUS:
        message = f"`cluster.accelerator.vendor` is {show(vendor)}, whose device plugin is not known here"
        yield Problem("not_said", message, "cluster.accelerator.vendor", f"choose one of {', '.join(GPUS)}")


LINES = tuple(Line(key, "", place="command") for key in PINNED)
