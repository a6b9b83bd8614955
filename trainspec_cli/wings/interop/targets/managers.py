"""Cluster managers that start trainspec itself in containers, with the planned values fixed: a Kubernetes indexed Job,
a JobSet, a Kubeflow TrainJob, and a SkyPilot task on rented nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping

import yaml

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.wings.interop.table import Choice, Line, RunValues, given, show
from trainspec_cli.wings.interop.target import Target, Translation

WORKSPACE = "/workspace"
"""Mount point of the volume that all nodes share. It is also trainspec's working folder."""
PORT = 29500
PINNED = (
    *(f"layout.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")),
    *("layout.zero_stage", "layout.pipeline_schedule", "layout.virtual_stages"),
    *("batching.micro_batch_size", "recompute", "offload", "precision.compute"),
    *("cluster.num_nodes", "cluster.devices_per_node", "cluster.device"),
)
"""Keys whose planned values are passed on the command line."""
OF_MANIFEST = ("run.dir", "cluster.manager")
"""Keys that the manifest sets, whatever the arguments say."""
GPUS: Mapping[str, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}
"""Accelerator vendor -> the resource name of the vendor's device plugin."""


def dns_label(name: str) -> str:
    """Return a valid Kubernetes name: lower-case letters, digits and dashes, and a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"run-{label}".strip("-")


def planned_command(run: RunValues) -> str:
    """Return the shell command that starts the run with the planned values."""
    pinned = [f"{key}={show(run[key])}" for key in PINNED if key in run.values]
    given = [argument for argument in run.arguments if argument.partition("=")[0] not in (*PINNED, *OF_MANIFEST)]
    folder = f"run.dir={WORKSPACE}/runs/{dns_label(run.recipe)}"
    return " ".join(["trainspec launch", *map(shlex.quote, [*given, *pinned, folder])])


def launch_command(run: RunValues, node_rank: str, first_node: str) -> str:
    """Return the shell command that every node runs. `node_rank` and `first_node` are shell expressions."""
    command = planned_command(run)
    if run["cluster.num_nodes"] == 1:
        return command
    return f"{command} --nnodes {run['cluster.num_nodes']} --node-rank {node_rank} --rdzv-endpoint {first_node}"


def resources(run: RunValues) -> JsonObject:
    """Return a node's devices as the resource limits of a container."""
    if run["cluster.device"] == "cpu":
        return {}
    vendor = str(run["cluster.accelerator.vendor"])
    return {"limits": {GPUS[vendor]: run["cluster.devices_per_node"]}}


def volume_needed(run: RunValues) -> Iterator[Problem]:
    """Yield a problem if the option for the volume is missing."""
    if not run.container.volume:
        what = "a volume that all nodes mount, for recipes, data and the run"
        yield Problem("missing_value", f"--volume is missing: {what}", "--volume", "add --volume NAME")


def container_needs(run: RunValues) -> Iterator[Problem]:
    """Yield a problem for each missing option that a manifest needs."""
    if not run.container.image:
        message = "--image is missing: a container image with trainspec"
        yield Problem("missing_value", message, "--image", "add --image NAME")
    yield from volume_needed(run)
    if "://" in run.container.volume:
        message = f"--volume is {run.container.volume}, but only skypilot-ray mounts buckets"
        yield Problem("not_said", message, "--volume", "pass the name of a volume")
    vendor = run["cluster.accelerator.vendor"]
    if run["cluster.device"] == "cuda" and vendor not in GPUS:
        message = f"`cluster.accelerator.vendor` is {show(vendor)}, whose device plugin is unknown"
        yield Problem("not_said", message, "cluster.accelerator.vendor", f"choose one of {', '.join(GPUS)}")


NODES = "cluster.num_nodes"
DEVICES = "cluster.devices_per_node"
ON_EVERY_NODE = tuple(Line(key, "", destination="command") for key in PINNED if key not in (NODES, DEVICES))
"""Keys that every manager passes on the command line, except the counts, which its manifest needs as well."""

# Kubernetes

INDEX = '"$JOB_COMPLETION_INDEX"'


def volumes(run: RunValues) -> list[JsonValue]:
    return [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": run.container.volume}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


MOUNTS: list[JsonValue] = [
    {"name": "workspace", "mountPath": WORKSPACE},
    {"name": "shm", "mountPath": "/dev/shm"},
]


def _pod(run: RunValues, first_node: str, subdomain: str | None = None) -> JsonObject:
    container: JsonObject = {
        "name": "trainspec",
        "image": run.container.image,
        "workingDir": WORKSPACE,
        "command": ["bash", "-c", launch_command(run, INDEX, f"{first_node}:{PORT}")],
        "ports": [{"containerPort": PORT}],
        "resources": resources(run),
        "volumeMounts": MOUNTS,
    }
    named: JsonObject = {"subdomain": subdomain} if subdomain else {}
    return {**named, "restartPolicy": "Never", "containers": [container], "volumes": volumes(run)}


def _job_spec(run: RunValues, pod: JsonObject, labels: JsonObject | None = None) -> JsonObject:
    nodes = run[NODES]
    template: JsonObject = {"metadata": {"labels": labels}, "spec": pod} if labels else {"spec": pod}
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }


def job(run: RunValues) -> list[JsonObject]:
    """Return the job, and a headless service through which pods find the first pod."""
    name = dns_label(run.recipe)
    labels: JsonObject = {"app": name}
    service: JsonObject = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True, "ports": [{"port": PORT}]},
    }
    pod = _pod(run, f"{name}-0.{name}", subdomain=name)
    spec = _job_spec(run, pod, labels)
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}]


def job_set(run: RunValues) -> list[JsonObject]:
    name = dns_label(run.recipe)
    spec = _job_spec(run, _pod(run, f"{name}-node-0-0.{name}"))
    replicated: JsonObject = {"name": "node", "replicas": 1, "template": {"spec": spec}}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
                "replicatedJobs": [replicated],
            },
        }
    ]


def train_job(run: RunValues) -> list[JsonObject]:
    """Return a TrainJob for the `torch-distributed` runtime, whose variables tell a pod which node it is."""
    name = dns_label(run.recipe)
    command = launch_command(run, '"$PET_NODE_RANK"', '"$PET_MASTER_ADDR:$PET_MASTER_PORT"')
    trainer: JsonObject = {
        "image": run.container.image,
        "command": ["bash", "-c", f"cd {WORKSPACE} && exec {command}"],
        "numNodes": run[NODES],
        "numProcPerNode": run[DEVICES],
        "resourcesPerNode": resources(run),
    }
    pod: JsonObject = {"volumes": volumes(run), "containers": [{"name": "node", "volumeMounts": MOUNTS}]}
    replicated: JsonObject = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch: JsonObject = {
        "manager": "trainspec/emit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": name},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]},
        }
    ]


def _target(
    name: str, title: str, version: str, file: str, manifests: Callable[[RunValues], list[JsonObject]]
) -> Target:
    def render(translation: Translation, run: RunValues) -> dict[str, str]:
        return {file: yaml.safe_dump_all(manifests(run), sort_keys=False, width=110)}

    counts = (Line(NODES, NODE_KEYS[name]), Line(DEVICES, DEVICE_KEYS[name]))
    return Target(
        name, title, version, (*counts, *ON_EVERY_NODE), render, carries_recipe=True, rules=(container_needs,)
    )


NODE_KEYS = {
    "kubernetes": "spec.completions",
    "jobset": "spec.replicatedJobs[0].template.spec.completions",
    "trainjob": "spec.trainer.numNodes",
}
DEVICE_KEYS = {
    "kubernetes": "spec.template.spec.containers[0].resources.limits",
    "jobset": "spec.replicatedJobs[0].template.spec.template.spec.containers[0].resources.limits",
    "trainjob": "spec.trainer.numProcPerNode",
}

JOB = _target("kubernetes", "a Kubernetes Job", "1.36", "job.yaml", job)
JOB_SET = _target("jobset", "a JobSet", "v1alpha2", "jobset.yaml", job_set)
TRAIN_JOB = _target("trainjob", "a Kubeflow TrainJob", "v1alpha1", "trainjob.yaml", train_job)


# SkyPilot

NAMES = {
    "A100-SXM-40GB": "A100",
    "A100-PCIe-80GB": "A100-80GB",
    "A100-SXM-80GB": "A100-80GB",
    "A30": "A30",
    "A40": "A40",
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
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA RTX A5000": "RTXA5000",
    "NVIDIA RTX A6000": "RTXA6000",
    "RTX 3090": "RTX3090",
    "RTX 4090": "RTX4090",
    "RTX 5090": "RTX5090",
    "RTX Pro 6000": "RTXPRO6000",
    "T4": "T4",
    "V100-SXM2-16GB": "V100",
    "V100-SXM2-32GB": "V100-32GB",
}
"""Accelerator name in recipes -> name in SkyPilot's catalogue."""
SKYPILOT_VERSION = "0.14.1"
FIRST_NODE = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'


def rented(run: RunValues) -> JsonObject:
    """Return the machines to rent: their accelerators, and the container that runs on them, if there is one."""
    machine: JsonObject = {"image_id": f"docker:{run.container.image}"} if run.container.image else {}
    if run["cluster.device"] == "cuda":
        name = NAMES[str(run["cluster.accelerator.name"])]
        machine["accelerators"] = f"{name}:{run['cluster.devices_per_node']}"
    return machine


def _render_task(translation: Translation, run: RunValues) -> dict[str, str]:
    command = launch_command(run, '"$SKYPILOT_NODE_RANK"', FIRST_NODE)
    task: JsonObject = {
        "name": dns_label(run.recipe),
        "num_nodes": run["cluster.num_nodes"],
        "resources": rented(run),
        "volumes": {WORKSPACE: run.container.volume},
        "run": f"cd {WORKSPACE}\n{command}\n",
    }
    return {"task.yaml": yaml.safe_dump(task, sort_keys=False, width=110)}


ACCELERATOR = Line(
    "cluster.accelerator.name",
    "resources.accelerators",
    Choice(NAMES, "cluster=h100"),
    when=(given("cluster.device", "cuda"),),
)
SKYPILOT = Target(
    "skypilot",
    "SkyPilot",
    SKYPILOT_VERSION,
    (Line(NODES, "num_nodes"), Line(DEVICES, "resources.accelerators"), ACCELERATOR, *ON_EVERY_NODE),
    _render_task,
    carries_recipe=True,
    rules=(container_needs,),
)
