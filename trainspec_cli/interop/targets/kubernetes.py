"""Kubernetes: trainspec itself as an indexed Job, a JobSet, or a TrainJob of Kubeflow."""

from __future__ import annotations

from collections.abc import Callable

import yaml

from trainspec_cli.interop.container import (
    LINES,
    PORT,
    WORKSPACE,
    container_needs,
    dns_label,
    launch_command,
    resources,
)
from trainspec_cli.interop.line import Line
from trainspec_cli.interop.run_values import RunValues
from trainspec_cli.interop.target import Spoken, Target
from trainspec_cli.json_value import JsonObject, JsonValue

INDEX = '"$JOB_COMPLETION_INDEX"'
NODES, DEVICES = "cluster.num_nodes", "cluster.devices_per_node"


def _volumes(run: RunValues) -> list[JsonValue]:
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
    return {**named, "restartPolicy": "Never", "containers": [container], "volumes": _volumes(run)}


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
    """Return a headless service, by which the first pod is found, and the job."""
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
    """Return a TrainJob of the runtime `torch-distributed`, whose variables say which node a pod is."""
    name = dns_label(run.recipe)
    command = launch_command(run, '"$PET_NODE_RANK"', '"$PET_MASTER_ADDR:$PET_MASTER_PORT"')
    trainer: JsonObject = {
        "image": run.container.image,
        "command": ["bash", "-c", f"cd {WORKSPACE} && exec {command}"],
        "numNodes": run[NODES],
        "numProcPerNode": run[DEVICES],
        "resourcesPerNode": resources(run),
    }
    pod: JsonObject = {"volumes": _volumes(run), "containers": [{"name": "node", "volumeMounts": MOUNTS}]}
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
    def render(spoken: Spoken, run: RunValues) -> dict[str, str]:
        return {file: yaml.safe_dump_all(manifests(run), sort_keys=False, width=110)}

    lines = tuple(line for line in LINES if line.ours not in (NODES, DEVICES))
    said = (Line(NODES, NODE_KEYS[name]), Line(DEVICES, DEVICE_KEYS[name]))
    return Target(name, title, version, (*said, *lines), render, carries_recipe=True, rules=(container_needs,))


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
