"""Ray clusters on KubeRay and SkyPilot: their sizes, what their schemas say, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.other_frameworks import NOT_IN_CI
from wings.interop.emitting import Case, files_in, judge, mistyped, run_of

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.wings.interop import NO_CONTAINER, TARGETS, Container, RunValues, translate

SPARE = "cluster.reliability.spare_nodes=1"
ON_CPU = ("recipe=tiny", "layout=fsdp", "cluster.num_nodes=2", "cluster.devices_per_node=1")
OLDEST_RAY = (2, 52)
"""The first version with tokens."""


def emitted(target: str, *arguments: str, container: Container | None = None) -> dict[str, Any]:
    run = run_of(*arguments)
    if container:
        run = replace(run, container=container)
    (text,) = TARGETS[target].render(translate(TARGETS[target], run), run).values()
    manifest: dict[str, Any] = yaml.safe_load(text)
    return manifest


def refused(target: str, run: RunValues) -> list[str]:
    with pytest.raises(RecipeError) as found:
        translate(TARGETS[target], run)
    return [problem.path for problem in found.value.problems]


def workers(*arguments: str) -> dict[str, Any]:
    (group,) = emitted("kuberay", *arguments)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return dict(group)


@pytest.mark.parametrize(("arguments", "nodes", "all_nodes"), [((), 2, 2), ((SPARE,), 2, 3)])
def test_spare_nodes_are_reserved(arguments: tuple[str, ...], nodes: int, all_nodes: int) -> None:
    group = workers(*arguments)
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (nodes, all_nodes, all_nodes)
    assert emitted("skypilot-ray", *arguments)["num_nodes"] == all_nodes


def test_one_node_is_a_cluster_too() -> None:
    one = ("cluster.num_nodes=1", "cluster.devices_per_node=4")
    assert workers(*one)["replicas"] == emitted("skypilot-ray", *one)["num_nodes"] == 1
    assert emitted("skypilot-ray", *one)["resources"]["accelerators"] == "H100:4"


def test_ray_gets_the_devices_of_a_node() -> None:
    group = workers()
    assert group["rayStartParams"] == {"num-gpus": "8"}
    assert group["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "--num-gpus=8 " in emitted("skypilot-ray")["run"]


def test_nodes_without_gpus_ask_for_none() -> None:
    group = workers(*ON_CPU)
    assert group["rayStartParams"] == {"num-gpus": "0"}
    assert group["template"]["spec"]["containers"][0]["resources"] == {}
    task = emitted("skypilot-ray", *ON_CPU)
    assert "accelerators" not in task["resources"]
    assert "--num-gpus=0 " in task["run"]


def test_the_head_trains_nothing() -> None:
    head = emitted("kuberay")["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}


def test_a_token_is_required() -> None:
    cluster = emitted("kuberay")["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split(".")[:2])) >= OLDEST_RAY
    task = emitted("skypilot-ray")
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert "export RAY_AUTH_MODE=token" in task["run"]


@pytest.mark.parametrize("name", ["llama3_8b", "3b", "a" * 80, "_"])
def test_kuberay_accepts_the_name(name: str) -> None:
    run = replace(run_of(), recipe=name)
    (text,) = TARGETS["kuberay"].render(translate(TARGETS["kuberay"], run), run).values()
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", yaml.safe_load(text)["metadata"]["name"])


def test_a_bucket_and_a_volume_are_mounted_at_the_same_place() -> None:
    bucket = emitted("skypilot-ray", container=Container(volume="s3://bucket"))
    assert bucket["file_mounts"] == {"/workspace": {"source": "s3://bucket", "mode": "MOUNT_CACHED"}}
    assert emitted("skypilot-ray", container=Container(volume="shared"))["volumes"] == {"/workspace": "shared"}


def test_trainspec_is_installed_unless_there_is_an_image() -> None:
    without = emitted("skypilot-ray", container=Container(volume="shared"))
    assert re.search(r"'trainspec\[ray\]==[\d.]+'", without["setup"])
    assert "image_id" not in without["resources"] and "/trainspec/bin:" in without["run"]
    with_image = emitted("skypilot-ray")
    assert "setup" not in with_image and "/trainspec/bin:" not in with_image["run"]
    assert with_image["resources"]["image_id"] == "docker:registry/trainspec:1"


@pytest.mark.parametrize(
    ("target", "container", "paths"),
    [
        ("kuberay", NO_CONTAINER, ["--image", "--volume"]),
        ("skypilot-ray", NO_CONTAINER, ["--volume"]),
        ("kuberay", Container("image", "s3://bucket"), ["--volume"]),
        ("skypilot", Container("image", "s3://bucket"), ["--volume"]),
    ],
)
def test_missing_and_unusable_options_are_refused(target: str, container: Container, paths: list[str]) -> None:
    assert refused(target, replace(run_of(), container=container)) == paths


@pytest.mark.parametrize("target", ["skypilot", "skypilot-ray"])
def test_an_accelerator_that_skypilot_does_not_know_is_refused(target: str) -> None:
    unknown = replace(run_of(), values={**run_of().values, "cluster.accelerator.name": "H800-SXM-80GB"})
    assert refused(target, unknown) == ["cluster.accelerator.name"]


@pytest.mark.parametrize("target", ["skypilot", "skypilot-ray"])
def test_cpus_need_no_known_accelerator(target: str) -> None:
    assert "accelerators" not in emitted(target, *ON_CPU)["resources"]


# What their schemas say


def kuberay(text: str) -> str | None:
    if "KUBERAY_CRD" not in os.environ:
        pytest.skip(f"KubeRay's schema {NOT_IN_CI}: .ci/interop ray fetches it, and KUBERAY_CRD names it")
    (judgement,) = judge("kuberay", [Case({"rayjob.yaml": text}, [])], package="jsonschema")
    return judgement.error


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), (SPARE,), ON_CPU])
def test_kuberay_knows_every_key(arguments: tuple[str, ...]) -> None:
    assert kuberay(files_in("kuberay", *arguments)["rayjob.yaml"]) is None


@pytest.mark.slow
def test_kuberay_notices_a_mistyped_key() -> None:
    text = files_in("kuberay")["rayjob.yaml"]
    keys = ("entrypoint", "shutdownAfterJobFinishes", "rayVersion", "authOptions", "mode", "groupName", "maxReplicas")
    for key in (*keys, "replicas", "workingDir", "claimName"):
        assert kuberay(text.replace(f"{key}:", f"{mistyped(key)}:")), key
    assert kuberay(text.replace("mode: token", "mode: tokens"))


@pytest.mark.slow
def test_kubernetes_knows_every_key_of_the_pods() -> None:
    cluster = emitted("kuberay")["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": one} for one in templates
    ]
    wrong = [json.loads(json.dumps(pod).replace("workingDir", "workingDirr")) for pod in pods]
    cases = [Case({"it": yaml.safe_dump(one)}, []) for one in (*pods, *wrong)]
    judged = judge("kubernetes", cases, package="kubernetes_validate")
    assert [bool(one.error) for one in judged] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("container", [Container("registry/trainspec:1", "shared"), Container("", "s3://bucket/run")])
def test_skypilot_keeps_every_key(container: Container) -> None:
    wanted = emitted("skypilot-ray", SPARE, container=container)
    (judgement,) = judge("skypilot", [Case({"task.yaml": yaml.safe_dump(wanted)}, [])], package="sky")
    assert judgement.error is None
    task = judgement.keys["task"]
    same = ("name", "num_nodes", "run", *(key for key in ("setup", "volumes") if key in wanted))
    assert {key: task[key] for key in same} == {key: wanted[key] for key in same}
    assert "RAY_AUTH_TOKEN" in str(task["secrets"]) and task["resources"]["accelerators"] == {"H100": 8}
    for place, bucket in wanted.get("file_mounts", {}).items():
        assert bucket.items() <= task["file_mounts"][place].items()


@pytest.mark.slow
def test_skypilot_refuses_a_mistyped_key() -> None:
    text = yaml.safe_dump(emitted("skypilot-ray", container=Container("", "s3://bucket/run")))
    keys = ("num_nodes", "resources", "accelerators", "file_mounts", "source", "mode", "secrets", "setup", "run")
    cases = [Case({"task.yaml": text.replace(f"{key}:", f"{mistyped(key)}:")}, []) for key in keys]
    assert [key for key, one in zip(keys, judge("skypilot", cases, package="sky"), strict=True) if not one.error] == []


def test_the_task_fails_without_a_token(tmp_path: Path) -> None:
    script = emitted("skypilot-ray")["run"].replace("/workspace", str(tmp_path))
    given = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0", "PATH": os.environ["PATH"]}
    ran = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True)
    assert ran.returncode != 0 and "RAY_AUTH_TOKEN" in ran.stderr
