"""`disturb=NAME|FILE`: which file is read, and where its mistakes are."""

from pathlib import Path

import pytest

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.session.planning.disturbance import load_disturbance


def problem_of(arguments: list[str], cwd: Path) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load_disturbance(arguments, cwd)
    return caught.value.problems[0]


@pytest.mark.parametrize("name", find_folders(Path.cwd()).options("disturb"))
def test_every_shipped_disturbance_can_be_read(name: str, tmp_path: Path) -> None:
    named = load_disturbance(["recipe=tiny", f"disturb={name}"], tmp_path)
    assert named is not None and named.name == name
    assert named.disturbance.events or named.disturbance.by_chance


def test_none_is_simulated_where_none_is_named(tmp_path: Path) -> None:
    assert load_disturbance(["recipe=tiny"], tmp_path) is None


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("slow_nodes:\n  - {node: 1, factor: 10}\n")
    named = load_disturbance(["disturb=mine.yaml"], tmp_path)
    assert named is not None and named.disturbance.slow_nodes[0].factor == 10


def test_a_name_of_the_own_folder_comes_before_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "conf/disturb").mkdir(parents=True)
    (tmp_path / "conf/disturb/slow_node.yaml").write_text("steps: 7\n")
    named = load_disturbance(["disturb=slow_node"], tmp_path)
    assert named is not None and named.disturbance.steps == 7


def test_a_misspelt_name_leads_to_the_one_that_was_meant(tmp_path: Path) -> None:
    problem = problem_of(["recipe=tiny", "disturb=slow_devise"], tmp_path)
    assert problem.where() == "command line:2" and "disturb=slow_device?" in problem.hint
    assert "two_at_once" not in problem.hint and "trainspec list disturb" in problem.hint


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        ("slow_devices:\n  - device: 1\n    factor: fast\n", "d.yaml:3:5", "expected a number", "write factor: <"),
        ("slow_devices:\n  - {device: 1, factor: 2}\n  - {device: 1}\n", "d.yaml:3:5", "has no value", "write factor"),
        ("steps: 9\n\nslow_node:\n  - {node: 1}\n", "d.yaml:3:1", "unknown key `slow_node`", "`slow_nodes`"),
        ("steps: 0\n", "d.yaml:1:1", "`steps` is 0", "write steps: 1"),
        ("steps: 1: 2\n", "d.yaml:1:9", "not YAML", "quote text"),
        ("- 1\n", "d.yaml:1:1", "`key: value`", ""),
        ("steps: 9\nseed: !new 1\n", "d.yaml:2:7", "not YAML", ""),
        ("steps: 9\nseed: !!int one\n", "d.yaml:1:1", "cannot be read", ""),
    ],
)
def test_a_mistake_is_shown_in_its_line(tmp_path: Path, text: str, where: str, message: str, hint: str) -> None:
    (tmp_path / "d.yaml").write_text(text)
    problem = problem_of(["disturb=d.yaml"], tmp_path)
    assert problem.where() == where
    assert message in problem.message and hint in problem.hint
    assert "disturb." not in problem.message + problem.hint


def test_no_name_at_all_is_told_as_that(tmp_path: Path) -> None:
    problem = problem_of(["recipe=tiny", "disturb="], tmp_path)
    assert "`disturb=`" in problem.message and problem.hint.startswith("available: ")
    assert "did you mean" not in problem_of(["disturb=zzzzzzzz"], tmp_path).hint
