"""Which run a name means."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.reporter.runs import RunLine
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.known_runs import remember_run
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.runs import find
from trainspec_cli.session.runs.find import LAST, check_name_free, find_own_run, find_run, runs_here


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    monkeypatch.chdir(tmp_path)

    def make(name: str, created_at: float = 1.0) -> RunDir:
        run = RunDir(tmp_path / "runs" / "tiny" / name)
        write_json(run.run_json, {"recipe": "tiny", "created_at": created_at})
        return run

    return make


def test_a_misspelt_run_has_the_nearest_one_beside_it(make: Callable[..., RunDir]) -> None:
    make("2026-11-23_1")
    for name, near in (("lst", "last"), ("runs/tiny/2026-11-23_2", "runs/tiny/2026-11-23_1")):
        with pytest.raises(RecipeError) as caught:
            find_run(name)
        assert f"did you mean `{near}`?" in caught.value.problems[0].hint


def test_a_folder_is_a_run_where_its_record_is(make: Callable[..., RunDir]) -> None:
    run = make("a")
    assert find_run(str(run.root)).root == run.root
    assert find_own_run(str(run.root)).root == run.root
    for name in (str(run.root.parent), "nothing", "a\0b", "x" * 5000):
        with pytest.raises(RecipeError, match="contains no run") as caught:
            find_run(name)
        assert caught.value.problems[0].code == "no_run"


def test_last_is_the_newest_run(make: Callable[..., RunDir]) -> None:
    make("a", created_at=3.0)
    newest = make("b", created_at=5.0)
    make("c", created_at=4.0)
    assert find_run(LAST).root.resolve() == newest.root


def test_runs_in_other_folders_are_known(make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    """Below this folder or launched from it they are `last`; launched elsewhere they are found by their name."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(Path.cwd() / "state"))
    project, scratch = Path.cwd(), Path.cwd().with_name(f"{Path.cwd().name}-scratch")
    make("old")
    first, far = RunDir(project / "first"), RunDir(scratch / "far")
    for created_at, run in ((2.0, first), (3.0, far)):
        write_json(run.run_json, {"recipe": "tiny", "created_at": created_at})
        remember_run(RunDir(os.path.relpath(run.root)), run.root.name + "-name")
    assert find_run(LAST).root == far.root
    assert [line.path for line in runs_here()] == [str(far.root), "first", "runs/tiny/old"]
    shutil.rmtree(far.root)
    assert find_run(LAST).root == Path("first")

    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert runs_here() == []
    assert find_run("first-name").root == first.root
    with pytest.raises(RecipeError) as refused:
        find_run(LAST)
    assert str(first.root) in refused.value.problems[0].hint


def test_a_name_is_taken_once(make: Callable[..., RunDir]) -> None:
    for name, run in (("mine", make("a")), ("mine-2", make("b"))):
        write_json(run.plan_json, {"spec": {"train": {"max_steps": 20}, "run": {"name": name}}})
    check_name_free("")
    check_name_free("other")
    with pytest.raises(RecipeError) as refused:
        check_name_free("mine")
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("name_taken", "run.name")
    assert "run.name=mine-3" in problem.hint


def test_last_passes_over_damaged_runs_and_says_so(
    make: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, damaged = make("a", created_at=3.0), make("b")
    damaged.run_json.write_text("{")
    assert find_run(LAST).root.resolve() == whole.root
    assert " runs/tiny/b, which" in capsys.readouterr().err
    whole.run_json.write_text("{")
    with raises(RecipeError, "no_run", "damaged"):
        find_run(LAST)


def test_without_runs_there_is_no_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(RecipeError, "no_run", "./runs"):
        find_run(LAST)


def test_a_run_in_which_others_can_write_is_looked_at_and_not_believed(make: Callable[..., RunDir]) -> None:
    run = make("a")
    run.root.chmod(0o777)
    assert find_run(str(run.root)).root == run.root
    with pytest.raises(MachineError):
        find_own_run(str(run.root))


def test_a_run_that_is_closed_is_the_machines_fault(
    make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(run: RunDir) -> bool:
        raise PermissionError(13, "Permission denied", str(run.run_json))

    monkeypatch.setattr(find, "_is_there", closed)
    with pytest.raises(MachineError) as caught:
        find_run("their run")
    (problem,) = caught.value.problems
    assert problem.code == "closed_run" and problem.message.startswith("their run/run.json ")
    assert problem.hint.endswith("chmod -R g+rX 'their run'")


def line(path: str, damage: str = "") -> RunLine:
    return RunLine(path, "tiny", "done", 1, 1, 1.0, 1.0, damage)


def test_the_first_sound_line_is_the_newest() -> None:
    assert find._newest([line("a", "cut"), line("b"), line("c")]) == "b"


def test_a_runs_state_hangs_on_whether_it_lives_or_waits(
    make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lives, waits = make("a"), [False], [False]
    monkeypatch.setattr(find, "is_running", lambda _: lives[0])
    monkeypatch.setattr(find.Queue, "holds", lambda *_: waits[0])
    found = {}
    for state in ((False, False), (False, True), (True, False)):
        lives[0], waits[0] = state
        found[state] = find.status_of_run(run)
        write_json(run.plan_json, {"spec": {"train": {"max_steps": 20}}})
        assert find.collect_run(str(run.root)).status == found[state]
        run.plan_json.unlink()
    assert found[True, False] == "running" and found[False, True] == "queued"
    assert found[False, False] not in ("running", "queued")
