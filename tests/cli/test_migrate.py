"""`trainspec migrate` as people and programs see it."""

from __future__ import annotations

import json

from trainspec_cli.__main__ import run
from trainspec_cli.cli.complete import complete
from trainspec_cli.cli.main import COMMANDS

RECIPE = "# mine\ncompile: true\n"


def test_a_file_is_migrated_once(capsys, write) -> None:
    file = write("mine.yaml", RECIPE)
    assert run(["migrate", "mine.yaml"]) == 0
    changed, counted = capsys.readouterr().out.splitlines()
    assert changed.startswith("mine.yaml: 0.1 to 1.0, ") and changed.endswith(" mine.yaml.0.1.bak")
    assert counted.startswith("1 file ")
    assert file.read_text() == '# mine\nspec_version: "1.0"\ncompile: true\n'
    assert run(["migrate", "mine.yaml"]) == 0
    assert capsys.readouterr().out.startswith("nothing to do: 1 file")


def test_a_dry_run_shows_the_lines_and_writes_nothing(capsys, write, tmp_path) -> None:
    file = write("mine.yaml", RECIPE)
    assert run(["migrate", "mine.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "--- mine.yaml (0.1)",
        "+++ mine.yaml (1.0)",
        "@@ -1,2 +1,3 @@",
        " # mine",
        '+spec_version: "1.0"',
        " compile: true",
        "1 file would change; nothing was written",
    ]
    assert file.read_text() == RECIPE and [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_for_programs(capsys, write) -> None:
    write("mine.yaml", RECIPE)
    for arguments, backup in ((["--dry-run"], None), ([], "mine.yaml.0.1.bak")):
        assert run(["migrate", "mine.yaml", "--json", *arguments]) == 0
        said = json.loads(capsys.readouterr().out)
        (file,) = said["files"]
        assert (said["spec_version"], said["dry_run"]) == ("1.0", backup is None)
        assert file.pop("diff").endswith("\n compile: true")
        assert file == {"path": "mine.yaml", "kind": "recipe", "from": "0.1", "to": "1.0", "backup": backup}


def test_what_is_refused_says_what_to_type(capsys, write) -> None:
    write("mine.yaml", 'spec_version: "2.0"\ncompile: true\n')
    assert run(["migrate", "mine.yaml"]) == 2
    said = capsys.readouterr().err
    assert "mine.yaml" in said and "version 2.0" in said
    assert "pip install --upgrade trainspec" in said
    assert run(["migrate"]) == 2
    assert "PATH" in capsys.readouterr().err


def test_the_shell_completes_its_options() -> None:
    assert {"--dry-run", "--to", "--json"} <= set(complete("trainspec migrate --", COMMANDS))
