"""docs/adding-a-model.md is true: the family that it adds is checked, counted, planned and trained."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from trainspec_cli.engine.build.assemble import build_model, build_train_state
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.planner import workload
from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.planner.hardware.rates import find_accelerator
from trainspec_cli.planner.memory.engine import step as run_memory
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys import model as models
from trainspec_cli.recipe.keys import run as recipe
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import from_plain, hints_of, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import check, check_engine

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model.md"
FENCE = re.compile(r"^## \d\. [^`\n]*`([^`]+)`$.*?^```(?:python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPE: dict[str, Any] = {
    "data": {"seq_len": 16, "source": "python_stdlib", "tokenizer": {"vocab_size": 512}},
    "optim": {"lr": 0.01, "schedule": {"kind": "constant"}},
    "batching": {"global_batch_size": 4},
    "train": {"max_steps": 20},
    "cluster": {"devices_per_node": 1, "device": "cpu"},
}


@pytest.fixture
def new_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunSpec]:
    """A recipe of the family that docs/adding-a-model.md adds, its three files in place as the page has them."""
    files = dict(FENCE.findall(PAGE.read_text(encoding="utf-8")))
    assert [Path(name).suffix for name in files] == [".py", ".py", ".py", ".yaml"]
    described, *code = files
    namespace = vars(models) | {}
    exec(compile(files[described], described, "exec"), namespace)
    added = namespace["AveragerModel"]
    monkeypatch.setattr(models, "AveragerModel", added, raising=False)
    monkeypatch.setattr(recipe, "ModelSpec", models.ModelSpec | added)
    for name in code[:2]:
        module = ModuleType(name.removesuffix(".py").replace("/", "."))
        exec(compile(files[name], name, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hints_of.cache_clear()
    yield from_plain(RunSpec, RECIPE | {"model": yaml.safe_load(files[code[2]])})
    hints_of.cache_clear()


def test_a_new_family_is_checked_by_the_rules_and_by_its_own_refusals(new_family: RunSpec) -> None:
    assert (check(new_family), check_engine(new_family)) == ([], [])
    wide = replace(new_family, layout=replace(new_family.layout, tp=2))
    assert [problem.message.partition(": ")[2] for problem in check_engine(wide)] == ["a mean is not cut"]
    assert [problem.path for problem in check(replace(new_family, model=replace(new_family.model, ffn_size=0)))] == [
        "model.ffn_size"
    ]


def test_planner_and_engine_count_the_same_parameters_of_a_new_family(new_family: RunSpec) -> None:
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in build_model(new_family.model, 16).parameters())
    assert workload.count_params(new_family.model) == built


def test_a_new_family_is_planned_on_a_cluster(new_family: RunSpec) -> None:
    cluster = replace(new_family.cluster, accelerator=find_accelerator("H100"), devices_per_node=4, device="cuda")
    open_layout = replace(new_family.layout, tp="auto", pp="auto")
    best = plan_capacity(replace(new_family, cluster=cluster, layout=open_layout)).best
    assert best is not None and best.fits
    assert best.layout.tp == 1
    assert best.time.matmul_s > 0
    assert best.peak_memory_bytes > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": True},
        {"compile": True, "pp": 2},
        {"optim": "adamw8bit"},
        {"offload": "optimizer", "compile": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_text", [True, False])
def test_a_new_family_is_planned_however_it_is_trained(
    new_family: RunSpec, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_text: bool
) -> None:
    """Also where the family stands in `TextModel`: it need not have the `layer_list` of the families there."""
    if is_text:
        for place in (run_memory, models):
            added = models.TextModel | type(new_family.model)
            monkeypatch.setattr(place, "TextModel", added, raising=False)
    cluster = replace(new_family.cluster, accelerator=find_accelerator("H100"), devices_per_node=4, device="cuda")
    spec = replace(
        new_family,
        cluster=cluster,
        compile=changes.get("compile", False),
        offload=changes.get("offload", "none"),
        layout=replace(new_family.layout, tp="auto", pp=changes.get("pp", "auto")),
        optim=replace(new_family.optim, name=changes.get("optim", "adamw")),
    )
    assert check(spec) == []
    best = plan_capacity(spec).best
    assert best is not None and best.fits
    assert best.peak_memory_bytes > 0


def test_a_new_family_without_known_matrices_is_not_trained_by_muon(new_family: RunSpec) -> None:
    spec = replace(new_family, optim=replace(new_family.optim, name="muon"))
    assert [(problem.code, problem.path) for problem in check(spec)] == [("unsupported", "optim.name")]


def test_the_recipes_that_the_page_names_exist() -> None:
    named = re.findall(r"\brecipe=(\w+)", PAGE.read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (PAGE.parents[1] / "recipes" / f"{name}.yaml").is_file()] == []


def test_a_new_family_is_trained(new_family: RunSpec, one_process: None) -> None:
    resolved = plan(new_family, Machine("host", cpu_cores=2, memory_bytes=2**34))
    assert from_plain(Plan, to_plain(resolved)) == resolved
    built = build_train_state(resolved, torch.device("cpu"))
    tokens = torch.randint(0, 512, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    losses = [float(train_step(built, batch, global_tokens=64, clip_norm=1.0).loss) for _ in range(20)]
    assert losses[-1] < losses[0] - 1
