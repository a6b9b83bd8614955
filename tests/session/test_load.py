from __future__ import annotations

import pytest

from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.session.load import load, plan_on, require
from trainspec_cli.spec.recipe.cluster import Machine

HOST = Machine(hostname="box", cpu_cores=2, memory_bytes=2**30)


def test_a_spec_and_its_plan() -> None:
    loaded = load(["recipe=tiny", "train.max_steps=3"])
    assert (loaded.spec.train.max_steps, loaded.composed.recipe) == (3, "tiny")
    plan = plan_on(loaded, HOST)
    assert (plan.spec, plan.world_size, plan.device) == (loaded.spec, 2, "cpu")


def test_every_problem_is_raised_with_its_place() -> None:
    with pytest.raises(RecipeError) as raised:
        load(["recipe=tiny", "optim.lr=x", "train.seed=-1"])
    assert [(problem.path, problem.where()) for problem in raised.value.problems] == [
        ("optim.lr", "command line:2"),
        ("train.seed", "command line:3"),
    ]


def test_what_the_machine_lacks_has_its_place() -> None:
    with pytest.raises(MachineError) as raised:
        plan_on(load(["recipe=tiny", "cluster.device=cuda"]), HOST)
    assert raised.value.problems[0].where() == "command line:2"


def test_one_fault_of_the_recipe_outweighs_those_of_the_machine() -> None:
    lacking, wrong = Problem("no_gpu", "m", environment=True), Problem("c", "m")
    require([])
    with pytest.raises(MachineError):
        require([lacking, lacking])
    with pytest.raises(RecipeError):
        require([lacking, wrong])
