"""`trainspec schema` as people, editors and shells see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.cli.complete import complete
from trainspec_cli.cli.main import COMMANDS
from trainspec_cli.recipe.compose.folders import find_folders

PUBLISHED = Path(__file__).parents[2] / "conf" / "schema"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    assert run(["schema", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_of_a_recipe_and_of_a_group(capsys, write) -> None:
    for arguments, name in (
        ([], "recipe"),
        (["recipe"], "recipe"),
        (["fabric"], "fabric"),
        (["disturb"], "disturb"),
        (["plan"], "plan"),
    ):
        assert printed(capsys, *arguments) == json.loads((PUBLISHED / f"{name}.json").read_text())


def test_all_are_written_where_no_group_and_no_recipe_is_seen_in_them(capsys, write, tmp_path: Path) -> None:
    before = find_folders(tmp_path)
    assert run(["schema", "--write", "conf/schema"]) == 0
    written = sorted((tmp_path / "conf" / "schema").iterdir())
    assert [file.read_bytes() for file in written] == [file.read_bytes() for file in sorted(PUBLISHED.iterdir())]
    assert sorted(capsys.readouterr().out.splitlines()) == [f"wrote conf/schema/{file.name}" for file in written]
    after = find_folders(tmp_path)
    assert after.conf != before.conf, "conf/schema alone counts as the user's conf folder"
    assert (after.groups, after.recipe_names()) == (before.groups, before.recipe_names())
    assert not [word for word in complete("trainspec launch ", COMMANDS) if word.startswith("schema")]
    assert run(["validate", "recipe=tiny"]) == 0


def test_one_alone_is_written(write, tmp_path: Path) -> None:
    assert run(["schema", "optim", "--write", "schemas"]) == 0
    assert [file.name for file in (tmp_path / "schemas").iterdir()] == ["optim.json"]


def test_ones_own_group_can_be_chosen_in_a_recipe(capsys, write) -> None:
    write("conf/optim/schedule/mine.yaml", "kind: cosine\n")
    write("conf/experiment/mine.yaml", "a: 1\n")
    recipe = json.dumps(printed(capsys))
    assert "override /experiment" in recipe and "override /optim/schedule" in recipe
    assert json.dumps(printed(capsys, "optim/schedule")).count("warmup_steps") == 1
    assert run(["schema", "experiment"]) == 2, "no section of a recipe has its name"


@pytest.mark.parametrize(
    ("group", "hint"),
    [
        ("optm", " schema optim\n"),
        ("xyz", ": recipe, accelerator, batching, "),
    ],
)
def test_an_unknown_group(capsys, write, group: str, hint: str) -> None:
    assert run(["schema", group]) == 2
    said = capsys.readouterr().err
    assert f"`{group}`" in said and hint in said


def test_a_folder_that_cannot_be_written_to(capsys, write, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(["schema", "--write", "file"]) == 2
    assert "error: file/recipe.json " in capsys.readouterr().err


def test_the_shell_completes_groups() -> None:
    assert {"recipe", "optim", "cluster", "disturb"} <= set(complete("trainspec schema ", COMMANDS))
    assert complete("trainspec schema optim ", COMMANDS) == []
