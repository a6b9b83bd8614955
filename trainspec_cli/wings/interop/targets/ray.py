"""Ray clusters that run trainspec with `cluster.manager=ray`: KubeRay's on Kubernetes, and one on nodes that SkyPilot
rents. Spare nodes are part of the cluster from the start. Every process that connects needs a token."""

from __future__ import annotations

import yaml

from trainspec_cli import __version__
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.wings.interop.table import Fixed, Line, RunValues
from trainspec_cli.wings.interop.target import Target, Translation
from trainspec_cli.wings.interop.targets.managers import (
    ACCELERATOR,
    DEVICES,
    MOUNTS,
    NODES,
    ON_EVERY_NODE,
    SKYPILOT_VERSION,
    WORKSPACE,
    container_needs,
    dns_label,
    planned_command,
    rented,
    resources,
    volume_needed,
    volumes,
)

RAY_VERSION = "2.59.0"
RESERVED = "derived.reserved_nodes"
"""Number of nodes, including the spare ones."""


class _Yaml(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes scripts as blocks, and values that occur twice in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Yaml.add_representer(str, _text)


def yaml_text(keys: JsonObject) -> str:
    text: str = yaml.dump(keys, Dumper=_Yaml, sort_keys=False, width=110)
    return text


def ray_command(run: RunValues) -> str:
    return f"{planned_command(run)} cluster.manager=ray"


def gpus(run: RunValues) -> JsonValue:
    """Return the number of GPUs of a node. Ray does not count every vendor's, so it is always stated."""
    return 0 if run["cluster.device"] == "cpu" else run[DEVICES]


# KubeRay

# The head runs Ray's own services and trainspec's supervisor, and trains nothing.
HEAD: JsonObject = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}


def _template(run: RunValues, name: str, needs: JsonObject) -> JsonObject:
    # Ray starts the job's command in the working folder of the head's container.
    container: JsonObject = {
        "name": name,
        "image": run.container.image,
        "workingDir": WORKSPACE,
        "resources": needs,
        "volumeMounts": MOUNTS,
    }
    return {"spec": {"containers": [container], "volumes": volumes(run)}}


def ray_job(run: RunValues) -> JsonObject:
    """Return a RayJob, which creates a RayCluster and deletes it after the run."""
    workers: JsonObject = {
        "groupName": "nodes",
        "replicas": run[RESERVED],
        "minReplicas": run[NODES],
        "maxReplicas": run[RESERVED],
        "rayStartParams": {"num-gpus": str(gpus(run))},
        "template": _template(run, "ray-worker", resources(run)),
    }
    head: JsonObject = {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
        "template": _template(run, "ray-head", HEAD),
    }
    cluster: JsonObject = {
        "rayVersion": RAY_VERSION,
        # KubeRay makes a secret with a random token, and gives it to each pod.
        "authOptions": {"mode": "token"},
        "headGroupSpec": head,
        "workerGroupSpecs": [workers],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": dns_label(run.recipe)},
        "spec": {"entrypoint": ray_command(run), "shutdownAfterJobFinishes": True, "rayClusterSpec": cluster},
    }


def _render_ray_job(translation: Translation, run: RunValues) -> dict[str, str]:
    return {"rayjob.yaml": yaml_text(ray_job(run))}


CLUSTER = "spec.rayClusterSpec"
WORKERS = f"{CLUSTER}.workerGroupSpecs[0]"
KUBERAY = Target(
    "kuberay",
    "a KubeRay RayJob",
    "1.7",
    (
        Line(NODES, f"{WORKERS}.minReplicas"),
        Line(RESERVED, f"{WORKERS}.replicas"),
        Line(RESERVED, f"{WORKERS}.maxReplicas"),
        Line(DEVICES, f"{WORKERS}.template.spec.containers[0].resources.limits"),
        *ON_EVERY_NODE,
    ),
    _render_ray_job,
    fixed=(
        Fixed(f"{CLUSTER}.rayVersion", RAY_VERSION, "the oldest version that trainspec supports"),
        Fixed(f"{CLUSTER}.authOptions.mode", "token", "without it, whoever reaches the head can run commands"),
    ),
    carries_recipe=True,
    rules=(container_needs,),
)


# SkyPilot, whose machines already run a Ray of SkyPilot's own, on ports 6380, 8266 and 52365. `ray stop` would end it.

PORT = 6379
AGENT_PORT = 52366
PYTHON = "$HOME/trainspec"
SETUP = f"""uv venv --allow-existing --python 3.12 "{PYTHON}"
uv pip install --python "{PYTHON}/bin/python" 'trainspec[ray]=={__version__}'
"""
RUN = """set -e
cd {workspace}
{path}export RAY_AUTH_MODE=token
: "${{RAY_AUTH_TOKEN:?is missing: sky launch --secret RAY_AUTH_TOKEN}}"
first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
export RAY_ADDRESS="$first:{port}"
options="--num-gpus={gpus} --dashboard-agent-listen-port={agent_port} --disable-usage-stats"
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  # This node's part of the task ends here, so that SkyPilot does not end the task if the node is lost later. Ray stays:
  # SkyPilot only kills processes that it still finds below this shell.
  until ray start --address="$RAY_ADDRESS" $options; do sleep 2; done
  sleep 5
else
  ray start --head --block --node-ip-address="$first" --port={port} $options &
  ray=$!
  trap 'kill $ray; wait $ray || true' EXIT
  until python -c 'import ray; ray.init()' 2>/dev/null; do kill -0 $ray; sleep 2; done
  {command}
fi
"""


def workspace(volume: str) -> JsonObject:
    """Return the keys that mount a bucket, which is a URL, or one of SkyPilot's volumes, which is a name."""
    if "://" in volume:
        # Other modes do not support appending to a file.
        return {"file_mounts": {WORKSPACE: {"source": volume, "mode": "MOUNT_CACHED"}}}
    return {"volumes": {WORKSPACE: volume}}


def ray_task(run: RunValues) -> JsonObject:
    """Return a SkyPilot task that starts a Ray cluster of its own, and the run on the first node."""
    installs = not run.container.image
    script = RUN.format(
        workspace=WORKSPACE,
        path=f'export PATH="{PYTHON}/bin:$PATH"\n' if installs else "",
        port=PORT,
        agent_port=AGENT_PORT,
        gpus=gpus(run),
        command=ray_command(run),
    )
    return {
        "name": dns_label(run.recipe),
        "num_nodes": run[RESERVED],
        "resources": rented(run),
        **workspace(run.container.volume),
        "secrets": {"RAY_AUTH_TOKEN": None},
        **({"setup": SETUP} if installs else {}),
        "run": script,
    }


def _render_ray_task(translation: Translation, run: RunValues) -> dict[str, str]:
    return {"task.yaml": yaml_text(ray_task(run))}


SKYPILOT_RAY = Target(
    "skypilot-ray",
    "Ray on SkyPilot",
    SKYPILOT_VERSION,
    (
        Line(RESERVED, "num_nodes"),
        Line(NODES, "", destination="command"),
        Line(DEVICES, "resources.accelerators"),
        ACCELERATOR,
        *ON_EVERY_NODE,
    ),
    _render_ray_task,
    fixed=(
        Fixed("RAY_AUTH_MODE", "token", "without it, whoever reaches the head can run commands", (), "environment"),
    ),
    carries_recipe=True,
    rules=(volume_needed,),
)
