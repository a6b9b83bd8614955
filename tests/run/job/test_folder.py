from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from lab.problems import raises
from lab.waiting import wait_for

from trainspec_cli import __version__
from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.run import DataSpec, InitSpec
from trainspec_cli.recipe.records import digest
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.family import start
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan, read_plan_of_all_nodes
from trainspec_cli.run.job import folder
from trainspec_cli.run.job.folder import (
    LaunchOrigin,
    check_free,
    claim,
    drop_claim,
    make_folder,
    read_claim,
    storage,
    write_launch,
    write_other_nodes,
    write_resume,
)
from trainspec_cli.run.job.job import Job

MakePlan = Callable[..., Plan]
MakeJob = Callable[..., Job]
ORIGIN = LaunchOrigin("tiny", ["launch", "recipe=tiny"], "train:\n  max_steps: 20\n")


def test_launches_of_one_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    with ThreadPoolExecutor(8) as pool:
        roots = list(pool.map(lambda _: make_folder(AUTO, "tiny"), range(8)))
    assert len(set(roots)) == 8
    assert all(root.parent == Path("runs/tiny") and root.is_dir() for root in roots)
    assert {mode(root) for root in roots} == {0o700}


def test_a_recipe_named_by_a_path_stays_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_folder(AUTO, "../../mine/a recipe").parent == Path("runs/.._.._mine_a_recipe")


def test_a_folder_that_holds_a_run_is_refused_with_the_way_on(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {})
    with pytest.raises(RecipeError, match="already holds a run") as caught:
        check_free(str(tmp_path))
    assert f"trainspec resume {tmp_path}" in caught.value.problems[0].hint


def test_a_folder_in_other_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with raises(RecipeError, "run_exists", "not an empty folder"):
        make_folder(str(tmp_path), "tiny")
    assert make_folder(str(tmp_path / "new" / "run"), "tiny").is_dir()


@pytest.mark.clause("LAUNCH-3", "RUN-2")
def test_what_the_workers_need_is_written_before_the_run_exists(
    make_job: MakeJob, make_plan: MakePlan, tmp_path: Path
) -> None:
    job, plan = make_job("train"), make_plan()
    write_launch(job, plan, ORIGIN, tmp_path / "tokens")
    run = job.run
    about = read_json(run.run_json)
    assert read_plan(run) == plan
    assert (about["recipe"], about["argv"], about["digest"]) == ("tiny", ORIGIN.argv, digest(plan.spec))
    assert Path(about["data_dir"]) == tmp_path / "tokens"
    assert run.composed_yaml.read_text() == f'spec_version: "1.0"\n{ORIGIN.composed_yaml}'
    assert read_json(run.versions_json)["torch"]
    assert "trainspec_cli.engine.comm.joining" in run.command_txt.read_text()
    with pytest.raises(RecipeError, match="already holds a run"):
        write_launch(job, plan, ORIGIN, tmp_path / "tokens")


def test_a_resume_clears_away_how_the_run_ended_and_is_written_down(
    make_job: MakeJob, make_plan: MakePlan, tmp_path: Path
) -> None:
    job = make_job("train")
    write_launch(job, make_plan(), ORIGIN, tmp_path)
    write_json(job.run.result_json, {"status": "failed"})
    write_json(job.run.error(1), {"rank": 1})
    write_resume(job, make_plan(stop_grace_s=5.0), ["resume", "last"], from_step=10)
    assert not job.run.result_json.exists()
    assert not job.run.error(1).exists()
    (resume,) = read_json(job.run.run_json)["resumes"]
    assert (resume["argv"], resume["from_step"]) == (["resume", "last"], 10)
    assert read_json(job.run.plan_json)["spec"]["run"]["stop_grace_s"] == 5.0


def test_the_first_plan_is_kept_while_nodes_are_left_out_and_a_resume_ends_that(
    make_job: MakeJob, make_plan: MakePlan, tmp_path: Path
) -> None:
    job, plan = make_job("train"), replace(make_plan(), num_nodes=3)
    write_launch(job, plan, ORIGIN, tmp_path)
    for nodes in (2, 1):
        write_other_nodes(job.run, replace(plan, num_nodes=nodes))
        assert (read_plan(job.run).num_nodes, read_plan_of_all_nodes(job.run)) == (nodes, plan)
    write_resume(job, plan, ["resume", "last"], from_step=10)
    assert read_plan(job.run) == plan
    assert not job.run.plan_of_all_nodes.exists()


def test_a_full_disk_is_the_machines_fault(tmp_path: Path) -> None:
    with raises(MachineError, "cannot_write", "No space left") as caught, storage(str(tmp_path)):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run.json"))
    problem = caught.value.problems[0]
    assert str(tmp_path / "run.json") in problem.message
    assert "free some space" in problem.hint and "run.dir=" in problem.hint


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted = str(tmp_path / "file" / "run")
    with pytest.raises(MachineError, match=re.escape(f"cannot write {wanted}: Not a directory")), storage(wanted):
        make_folder(wanted, "tiny")


def test_other_errors_pass_storage_by() -> None:
    with pytest.raises(OSError, match="strange") as caught, storage(AUTO):
        raise OSError(errno.EIO, "strange")
    assert not isinstance(caught.value, MachineError)


def test_every_launch_has_its_own_logs(make_job: MakeJob) -> None:
    first = make_job("train")
    first.logs.mkdir(parents=True)
    second = make_job("train")
    assert (first.logs.name, second.logs.name) == ("launch_01", "launch_02")
    assert first.launch_id != second.launch_id
    assert json.dumps(dict(second.environment)).count(second.launch_id) == 1


def test_the_run_folder_is_whole_for_the_workers_wherever_they_start(make_job: MakeJob) -> None:
    job = make_job("train")
    assert job.root.is_absolute()
    assert RunDir(job.command[-1]).root == job.root


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.clause("RUN-10")
def test_a_run_is_for_its_user_alone_and_what_was_there_stays_as_it_was(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        Path("runs").mkdir(0o750)
        with storage(AUTO):
            made = make_folder(AUTO, "tiny")
            job = make_job("train")
            start(["sh", "-c", f"echo said; touch {made}/childs"], job).wait()
    finally:
        os.umask(before)
    assert [mode(path) for path in (Path("runs"), made.parent, made)] == [0o750, 0o700, 0o700]
    assert [mode(path) for path in (made / "childs", job.logs, job.torchrun_log)] == [0o600, 0o700, 0o600]


@pytest.mark.clause("LAUNCH-9")
def test_a_folder_in_which_others_write_is_no_place_for_a_run(shared: Path, stranger: Callable[..., None]) -> None:
    stranger("mkdir $1", shared / "theirs")
    (shared / "everybodys").mkdir()
    (shared / "everybodys").chmod(0o777)
    for name, why in (("theirs", "another user, nobody"), ("everybodys", "by every user")):
        for use in (check_free, lambda place: make_folder(place, "tiny")):
            with pytest.raises(MachineError, match=why) as caught:
                use(str(shared / name))
            assert "run.dir" in caught.value.problems[0].hint


def test_a_run_has_a_secret_and_keeps_it(make_job: MakeJob, make_plan: MakePlan, tmp_path: Path) -> None:
    job = make_job("train")
    write_launch(job, make_plan(), ORIGIN, tmp_path)
    secret = read_json(job.run.run_json)["memory_secret"]
    write_resume(job, make_plan(), ["resume", "last"], from_step=10)
    assert len(secret) == 32
    assert read_json(job.run.run_json)["memory_secret"] == secret
    about = {key: value for key, value in read_json(job.run.run_json).items() if key != "memory_secret"}
    write_json(job.run.run_json, about)  # as an earlier version has left it
    write_resume(job, make_plan(), ["resume", "last"], from_step=10)
    assert len(read_json(job.run.run_json)["memory_secret"]) == 32


def test_what_an_export_needs_of_the_beginning_is_kept_through_other_runs(
    make_job: MakeJob, make_plan: MakePlan, tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("[]")
    (source / "model.safetensors").write_text("large")
    first, second = make_job("train"), make_job("train")
    plan = make_plan()
    begins = replace(plan, spec=replace(plan.spec, init=InitSpec(f"hf:{source}")))
    write_launch(first, begins, ORIGIN, tmp_path / "tokens")
    kept = first.run.huggingface
    assert {path.name: path.read_text() for path in kept.iterdir()} == {"config.json": "{}", "tokenizer.json": "[]"}
    second = replace(second, root=tmp_path / "second")
    goes_on = replace(plan, spec=replace(plan.spec, init=InitSpec(str(first.root))))
    write_launch(second, goes_on, ORIGIN, None)
    assert sorted(path.name for path in second.run.huggingface.iterdir()) == ["config.json", "tokenizer.json"]
    about = read_json(second.run.run_json)
    assert (about["trainspec"], about["data_dir"]) == (__version__, None)


def test_a_run_that_begins_with_nothing_keeps_nothing(make_job: MakeJob, make_plan: MakePlan, tmp_path: Path) -> None:
    job = make_job("train")
    write_launch(job, make_plan(), ORIGIN, tmp_path)
    assert not job.run.huggingface.exists()


def test_the_chat_template_that_the_data_names_is_kept(make_job: MakeJob, make_plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    plan = make_plan()
    data = DataSpec(8, "chat", "chat.jsonl", chat_template=str(tmp_path / "mine.jinja"))
    job = make_job("train")
    write_launch(job, replace(plan, spec=replace(plan.spec, data=data)), ORIGIN, tmp_path)
    assert (job.run.huggingface / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_claim_shows_other_nodes_that_its_owner_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "BEAT_S", 0.01)
    run = RunDir(tmp_path)
    assert read_claim(run) is None
    with claim(run, "a"):
        first = read_claim(run)
        assert first is not None and first.is_locked
        wait_for(lambda: (now := read_claim(run)) is not None and now.is_locked and now.beat_ns > first.beat_ns)
    assert read_claim(run) is None


def test_a_dropped_claim_can_be_taken_and_its_owner_leaves_the_new_one_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with claim(run, "b" * 16):
        with raises(RecipeError, "still_running"), claim(run, "c" * 16):
            pytest.fail("it is claimed")
        drop_claim(run)
        second = claim(run, "c" * 16)
        second.__enter__()
    signs = read_claim(run)
    assert signs is not None and signs.is_locked
    second.__exit__(None, None, None)
