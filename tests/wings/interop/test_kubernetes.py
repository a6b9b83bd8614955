"""Manifests that start trainspec itself, and what the schemas of their kinds read in them."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import yaml
from wings.interop.emitting import Case, files_in, judge, mistyped, run_of

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.wings.interop import LAUNCHERS, NO_CONTAINER, TARGETS, translate
from trainspec_cli.wings.interop.targets.managers import dns_label

MANIFESTS = ("kubernetes", "jobset", "trainjob")


def manifest_of(name: str) -> str:
    (text,) = files_in(name).values()
    return text


def paths(value: object, path: str = "") -> dict[str, object]:
    """Return every value that is not a section, by its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {name: one for key, inner in items for name, one in paths(inner, f"{path}.{key}").items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_schema_keeps_every_key(name: str) -> None:
    manifests = list(yaml.safe_load_all(manifest_of(name)))
    (judgement,) = judge("kubernetes", [Case({"it": manifest_of(name)}, [])], package="kubeflow_trainer_api")
    assert judgement.error is None
    read = {**paths(judgement.keys["manifests"])}
    assert {path: read.get(path) for path in paths(manifests)} == paths(manifests)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_schema_notices_a_mistyped_key(name: str) -> None:
    text = manifest_of(name)
    names = {key for path in paths(list(yaml.safe_load_all(text))) for key in path.split(".") if key.isalpha()}
    names -= {"nvidia", "app", "spec"}
    wrong = {key: text.replace(f"{key}:", f"{mistyped(key)}:") for key in sorted(names)}
    cases = [Case({"it": one}, []) for one in wrong.values()]
    judged = judge("kubernetes", cases, package="kubeflow_trainer_api")
    missed = [
        key
        for (key, changed), one in zip(wrong.items(), judged, strict=True)
        if not one.error and set(paths(list(yaml.safe_load_all(changed)))) <= set(paths(one.keys["manifests"]))
    ]
    assert missed == []


@pytest.mark.slow
def test_skypilot_keeps_every_key() -> None:
    (judgement,) = judge("skypilot", [Case(files_in("skypilot"), [])], package="sky")
    assert judgement.error is None
    task = judgement.keys["task"]
    wanted = yaml.safe_load(manifest_of("skypilot"))
    assert (task["num_nodes"], task["run"]) == (wanted["num_nodes"], wanted["run"])
    assert "H100" in str(task["resources"]) and "registry/trainspec:1" in str(task["resources"])


@pytest.mark.slow
def test_skypilot_refuses_a_mistyped_key() -> None:
    text = manifest_of("skypilot")
    keys = ("num_nodes", "resources", "accelerators", "image_id", "volumes", "run")
    cases = [Case({"task.yaml": text.replace(f"{key}:", f"{mistyped(key)}:")}, []) for key in keys]
    assert [key for key, one in zip(keys, judge("skypilot", cases, package="sky"), strict=True) if not one.error] == []


@pytest.mark.parametrize("target", LAUNCHERS, ids=lambda target: target.name)
def test_every_node_gets_the_planned_values(target: object) -> None:
    texts = paths(list(yaml.safe_load_all(manifest_of(target.name)))).values()  # type: ignore[attr-defined]
    (command,) = (line for text in texts for line in str(text).splitlines() if "trainspec launch" in line)
    words = shlex.split(command)
    assert {"layout.dp_shard=16", "batching.micro_batch_size=1", "recompute=none"} <= set(words)
    assert ("--nnodes" in words) != ("cluster.manager=ray" in words)
    assert sum(word.startswith("cluster.num_nodes=") for word in words) == 1


@pytest.mark.parametrize("name", [*MANIFESTS, "skypilot"])
def test_an_image_and_a_volume_are_required(name: str) -> None:
    with pytest.raises(RecipeError) as refused:
        translate(TARGETS[name], replace(run_of(), container=NO_CONTAINER))
    assert [problem.path for problem in refused.value.problems] == ["--image", "--volume"]


def test_only_trainspec_itself_supports_unequal_ranks() -> None:
    run = run_of()
    unequal = replace(run, values={**run.values, "batching.global_batch_size": 513})
    assert translate(TARGETS["jobset"], unequal).translated
    with pytest.raises(RecipeError) as refused:
        translate(TARGETS["torchtitan"], unequal)
    assert [problem.path for problem in refused.value.problems] == ["batching.global_batch_size"]


@pytest.mark.parametrize(
    ("name", "label"),
    [("llama3_8b", "llama3-8b"), ("../My Runs/A.yaml", "my-runs-a-yaml"), ("_", "run"), ("3b", "run-3b")],
)
def test_names_are_labels(name: str, label: str) -> None:
    assert dns_label(name) == label
