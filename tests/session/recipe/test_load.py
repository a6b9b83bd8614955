from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.session.recipe.load import examine, load, load_for_planning, machine_of_draft, plan_on, require

HOST = Machine(hostname="box", cpu_cores=2, memory_bytes=2**30)


def test_a_spec_and_its_plan() -> None:
    loaded = load(["recipe=tiny", "train.max_steps=3"])
    assert (loaded.spec.train.max_steps, loaded.composed.recipe) == (3, "tiny")
    plan = plan_on(loaded, HOST)
    assert (plan.spec, plan.world_size, plan.device) == (loaded.spec, 2, "cpu")


@pytest.mark.clause("LAUNCH-1")
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


def places(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    return [(problem.code, problem.path) for problem in problems]


def test_a_value_that_nobody_gives_is_told_unless_its_group_was_not_found() -> None:
    asked = ["recipe=tiny", "~train.max_steps"]
    assert places(examine(asked).problems) == [("missing_value", "train.max_steps")]
    assert places(examine([*asked, "optim=nothing"]).problems) == [
        ("missing_value", "train.max_steps"), ("unknown_option", "optim"),
    ]  # fmt: skip
    assert places(examine(["recipe=nothing"]).problems) == [("unknown_recipe", "recipe")]


def test_a_reference_to_what_misses_is_told_once() -> None:
    asked = ["recipe=tiny", "~train.max_steps", "train.log_interval_steps=${train.max_steps}"]
    assert places(examine(asked).problems) == [("missing_value", "train.max_steps")]
    other = ["recipe=tiny", "~train.max_steps", "train.seed=${train.nothing}"]
    assert sorted(places(examine(other).problems)) == [
        ("bad_interpolation", "train.seed"), ("missing_value", "train.max_steps"),
    ]  # fmt: skip


def test_problems_come_in_the_order_of_the_command_line() -> None:
    problems = examine(["recipe=tiny", "train.seed=-1", "optim.lr=x", "data.seq_len=0"]).problems
    assert [problem.line for problem in problems] == sorted(problem.line or 0 for problem in problems)
    assert [problem.path for problem in problems][:3] == ["train.seed", "optim.lr", "data.seq_len"]


def test_a_plan_needs_no_data_and_a_run_does() -> None:
    asked = ["recipe=tiny", "data=text", "data.path=/no/such/folder"]
    assert load_for_planning(asked).spec.data.path == "/no/such/folder"
    with pytest.raises(RecipeError) as raised:
        load_for_planning([*asked, "optim.lr=x"])
    assert [problem.path for problem in raised.value.problems] == ["optim.lr"]


def test_a_draft_that_does_not_say_its_device_has_no_machine() -> None:
    assert machine_of_draft(load(["recipe=tiny"]).spec) is not None
    assert machine_of_draft(examine(["recipe=tiny", "cluster=nothing"]).draft) is None


@pytest.mark.parametrize(
    ("more", "to_run", "is_refused"),
    [((), True, True), ((), False, False), (("cluster.device=cpu",), True, False), (("cluster=auto",), True, False)],
)
def test_who_types_an_accelerator_does_not_train_on_cpus_without_a_word(
    more: tuple[str, ...], to_run: bool, is_refused: bool
) -> None:
    """The recipe itself is for CPUs."""
    problems = examine(["recipe=tiny", "cluster.accelerator=rtx_4090", *more], to_run=to_run).problems
    assert [problem.path for problem in problems] == ["cluster.accelerator"] * is_refused
    assert all("cluster=auto" in problem.hint and "cluster.device=cpu" in problem.hint for problem in problems)


def test_a_name_in_the_place_of_a_section_is_one_mistake(write) -> None:
    """The data's tokenizer refers to a key of the model."""
    write("recipes/mine.yaml", "model: llama_tiny\ntrain: {max_steps: 3}\nbatching: {global_batch_size: 8}\n")
    (problem,) = examine(["recipe=mine"]).problems
    assert (problem.code, problem.path) == ("wrong_type", "model") and "/model: llama_tiny" in problem.hint
