"""What is migrated, how, and what is refused before anything is written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError, RecipeError, TrainspecError
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import claim
from trainspec_cli.session.recipe.migrate import apply, find_migrations

RESULT = {"status": "done", "exit_code": 0}


def migrate(*paths: Path) -> dict[Path, Path]:
    return apply(find_migrations([str(path) for path in paths]))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    write_json(run.run_json, {"recipe": "tiny", "created_at": 1.0})
    write_json(run.result_json, RESULT)
    return run


RECIPES = {
    "comments": (
        "# $schema=x\n# mine\ntrain:  # steps\n    max_steps: 1_000   # many\n",
        '# $schema=x\n# mine\nspec_version: "1.0"\ntrain:  # steps\n    max_steps: 1_000   # many\n',
    ),
    "an older version": (
        "compile: true\nspec_version: '0.1'  # first\n",
        'compile: true\nspec_version: "1.0"  # first\n',
    ),
    "a document's start": ("---\n\n# a\ncompile: true\n", '---\n\n# a\nspec_version: "1.0"\ncompile: true\n'),
    "an indented file": ("  compile: true\n  fault: ''\n", "  spec_version: \"1.0\"\n  compile: true\n  fault: ''\n"),
    "Windows": ("# é\r\ncompile: true\r\n", '# é\r\nspec_version: "1.0"\r\ncompile: true\r\n'),
    "a byte order mark": ("\ufeffcompile: true\n", '\ufeffspec_version: "1.0"\ncompile: true\n'),
    "no end of line": ("compile: true", 'spec_version: "1.0"\ncompile: true'),
}


@pytest.mark.clause("VER-6")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_all_but_the_line_of_its_version(tmp_path: Path, name: str) -> None:
    before, after = RECIPES[name]
    file = tmp_path / "mine.yaml"
    file.write_bytes(before.encode())
    assert migrate(file) == {file: tmp_path / "mine.yaml.0.1.bak"}
    assert file.read_bytes().decode() == after
    assert (tmp_path / "mine.yaml.0.1.bak").read_bytes().decode() == before
    assert migrate(file) == {} and file.read_bytes().decode() == after


@pytest.mark.clause("VER-6")
def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for number, name in enumerate(("mine.yaml.0.1.bak", "mine.yaml.0.1.bak2", "mine.yaml.0.1.bak3")):
        file.write_text(f"fault: '{number}'\n")
        assert migrate(file) == {file: tmp_path / name}
    file.write_text("fault: '0'\n")
    assert migrate(file) == {file: tmp_path / "mine.yaml.0.1.bak"}, "the same copy is there already"
    assert [(tmp_path / f"mine.yaml.0.1.bak{end}").read_text() for end in ("", "2", "3")] == [
        "fault: '0'\n",
        "fault: '1'\n",
        "fault: '2'\n",
    ]


def test_a_file_and_its_copy_keep_their_mode(run: RunDir) -> None:
    run.result_json.chmod(0o640)
    (backup,) = migrate(run.result_json).values()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run.result_json, backup)] == [0o640, 0o640]


def test_events_state_the_version_in_their_first_whole_line(run: RunDir) -> None:
    rest = b'{"type": "retry", "time": 2.0, "step": 2}\nhalf of'
    run.events_folder.mkdir()
    run.events(0).write_bytes(b'half a line\n{"type": "retry", "time": 1.0, "step": 1}\n' + rest)
    run.events(1).write_bytes(b"")
    migrate(run.root)
    first = b'half a line\n{"spec_version": "1.0", "type": "retry", "time": 1.0, "step": 1}\n'
    assert run.events(0).read_bytes() == first + rest
    assert run.events(1).read_bytes() == b""


def test_a_number_of_a_form_of_its_own_makes_room_for_the_version(run: RunDir) -> None:
    write_json(run.root / "looks.json", {"version": 1, "orders": []})
    migrate(run.root / "looks.json")
    assert json.loads((run.root / "looks.json").read_text()) == {"spec_version": "1.0", "orders": []}


def test_the_lines_that_change_are_shown(run: RunDir) -> None:
    (found,) = find_migrations([str(run.result_json)])
    assert found.diff().splitlines() == [
        f"--- {run.result_json} (0.1)",
        f"+++ {run.result_json} (1.0)",
        "@@ -1,2 +1,3 @@",
        " {",
        '+  "spec_version": "1.0",',
        '   "status": "done",',
    ]
    assert "spec_version" not in run.result_json.read_text()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(*paths: Path, **options: str) -> TrainspecError:
    with pytest.raises(TrainspecError) as caught:
        apply(find_migrations([str(path) for path in paths], **options))
    return caught.value


@pytest.mark.clause("VER-7")
def test_all_that_stands_against_it_is_told_before_anything_is_written(run: RunDir, tmp_path: Path) -> None:
    write_json(run.plan_json, {"spec_version": "7.0", "spec": {}})
    write_json(run.root / "speeds.json", {"spec_version": 3, "step": 1})
    (run.root / "looks.json").symlink_to(run.result_json)
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "group.yaml").write_text("num_layers: 3\n")
    (tmp_path / "flow.yaml").write_text("{compile: true}\n")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "result.json").write_text('{"colour": 1}')
    before = snapshot(tmp_path)
    names = ("x.txt", "group.yaml", "flow.yaml", "empty.yaml", "result.json", "gone.yaml")
    error = refused(run.root, *(tmp_path / name for name in names))
    assert [problem.code for problem in error.problems] == [
        *("newer_version", "unknown_version", "not_trusted"),
        *("no_form", "no_form", "no_form", "no_form", "no_form", "missing_file"),
    ]
    said = [problem.message for problem in error.problems]
    assert " version 7.0 " in said[0]
    assert said[2] == f"{run.root / 'looks.json'} is a link"
    assert said[4].startswith(f"{tmp_path}/group.yaml ") and "`num_layers`" in said[4]
    assert snapshot(tmp_path) == before


@pytest.mark.clause("VER-7")
def test_a_run_that_goes_on_is_left_alone(run: RunDir) -> None:
    with claim(run, "other"):
        for path in (run.root, run.result_json):
            error = refused(path)
            assert error.problems[0].code == "still_running"
            assert f"trainspec stop {run.root}" in error.problems[0].hint
    found = find_migrations([str(run.root)])
    with claim(run, "begun meanwhile"), pytest.raises(RecipeError, match="is still running"):
        apply(found)
    assert json.loads(run.result_json.read_text()) == RESULT
    assert len(migrate(run.root)) == 2 and not run.pid_json.exists()


@pytest.mark.clause("VER-7")
def test_files_of_others_are_refused(run: RunDir) -> None:
    run.result_json.chmod(0o666)
    for path in (run.root, run.result_json):
        error = refused(path)
        assert isinstance(error, MachineError) and error.problems[0].code == "not_trusted"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can give a file away")
@pytest.mark.clause("VER-7")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("compile: true\n")
    os.chown(file, 12345, 12345)
    assert "another user, number 12345" in str(refused(file))


@pytest.mark.clause("VER-7")
@pytest.mark.parametrize(
    ("version", "code", "hint"),
    [
        ("0.1", "downgrade", "mv FILE.0.1.bak FILE"),
        ("3.0", "newer_version", "pip install --upgrade trainspec"),
        ("x", "unknown_version", "--to 1.0"),
    ],
)
def test_another_version_than_the_current_one_is_no_aim(run: RunDir, version: str, code: str, hint: str) -> None:
    (problem,) = refused(run.root, version=version).problems
    assert problem.code == code and hint in problem.hint


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path).problems[0].code == "no_run"


def test_a_file_that_has_changed_since_it_was_read_is_not_written(run: RunDir) -> None:
    found = find_migrations([str(run.result_json)])
    write_json(run.result_json, {"status": "failed"})
    with pytest.raises(MachineError, match="has changed"):
        apply(found)
    assert json.loads(run.result_json.read_text()) == {"status": "failed"}
    assert sorted(path.name for path in run.root.iterdir()) == ["result.json", "run.json"]
