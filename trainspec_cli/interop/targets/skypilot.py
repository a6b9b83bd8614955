"""SkyPilot: trainspec itself as a task on rented nodes."""

from __future__ import annotations

import yaml

from trainspec_cli.interop.container import LINES, PORT, WORKSPACE, container_needs, dns_label, launch_command
from trainspec_cli.interop.line import Choice, Line, given
from trainspec_cli.interop.run_values import RunValues
from trainspec_cli.interop.target import Spoken, Target
from trainspec_cli.json_value import JsonObject

NAMES = {
    "A100-SXM-40GB": "A100",
    "A100-PCIe-80GB": "A100-80GB",
    "A100-SXM-80GB": "A100-80GB",
    "B200-SXM": "B200",
    "B300-SXM": "B300",
    "GB200": "GB200",
    "GH200": "GH200",
    "H100-PCIe-80GB": "H100",
    "H100-SXM-80GB": "H100",
    "H200-SXM-141GB": "H200",
    "L4": "L4",
    "L40": "L40",
    "L40S": "L40S",
    "MI300X": "MI300X",
    "RTX 4090": "RTX4090",
    "RTX Pro 6000": "RTXPRO6000",
    "V100-SXM2-16GB": "V100",
    "V100-SXM2-32GB": "V100-32GB",
}
"""The accelerator's name in a recipe -> in SkyPilot's catalogue."""
FIRST_NODE = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
SAID = ("cluster.num_nodes", "cluster.devices_per_node")


def render(spoken: Spoken, run: RunValues) -> dict[str, str]:
    resources: JsonObject = {"image_id": f"docker:{run.container.image}"}
    if run["cluster.device"] == "cuda":
        name = NAMES[str(run["cluster.accelerator.name"])]
        resources["accelerators"] = f"{name}:{run['cluster.devices_per_node']}"
    command = launch_command(run, '"$SKYPILOT_NODE_RANK"', FIRST_NODE)
    task: JsonObject = {
        "name": dns_label(run.recipe),
        "num_nodes": run["cluster.num_nodes"],
        "resources": resources,
        "volumes": {WORKSPACE: run.container.volume},
        "run": f"cd {WORKSPACE}\n{command}\n",
    }
    return {"task.yaml": yaml.safe_dump(task, sort_keys=False, width=110)}


TARGET = Target(
    "skypilot",
    "SkyPilot",
    "0.14.1",
    (
        Line("cluster.num_nodes", "num_nodes"),
        Line("cluster.devices_per_node", "resources.accelerators"),
        Line(
            "cluster.accelerator.name", "resources.accelerators", Choice(NAMES), when=(given("cluster.device", "cuda"),)
        ),
        *(line for line in LINES if line.ours not in SAID),
    ),
    render,
    carries_recipe=True,
    rules=(container_needs,),
)
