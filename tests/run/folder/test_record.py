"""run.json and result.json: what is written is read back, and what another version wrote is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MACHINE, SPEC
from lab.problems import raises

from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder.accounting import Recovery, WallTime
from trainspec_cli.run.folder.event_types.events import SetFigures
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import (
    NodeErrorRecord,
    PlanOutline,
    Resume,
    RunRecord,
    RunResult,
    WorkerErrorRecord,
    read_data_dir,
    read_error,
    read_plan,
    read_plan_outline,
    read_result,
    read_run_record,
    read_section,
    write_error,
    write_plan,
    write_result,
    write_run_record,
)

RECORD = RunRecord(
    recipe="tiny",
    created_at=1000.0,
    digest="d",
    argv=("launch", "recipe=tiny"),
    trainspec="0.1",
    data_dir=None,
    git={"commit": "c", "dirty": None},
    memory_secret="s",
)
RESULT = RunResult(
    status="done",
    exit_code=0,
    steps=9,
    final_loss=2.0,
    heldout_bits_per_byte=None,
    xz_bits_per_byte=2.5,
    tokens_per_s=100.0,
    mfu=0.5,
    peak_memory_bytes=2**20,
    weights_sha256="ab",
    goodput=0.9,
    time_s=WallTime(productive=9.0, idle=1.0),
)
SHARED = {"status", "exit_code", "steps", "final_loss", "mfu", "peak_memory_bytes", "weights_sha256", "goodput"}
SHARED.add("time_s")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_run_record_is_read_back(run: RunDir) -> None:
    write_run_record(run, RECORD)
    assert read_run_record(run) == RECORD
    keys = {"recipe", "digest", "argv", "trainspec", "created_at", "data_dir", "git", "resumes", "memory_secret"}
    assert json.loads(run.run_json.read_text()).keys() == {"spec_version", *keys}
    assert read_data_dir(run) is None


@pytest.mark.clause("RUN-6", "EXT-1")
def test_a_resume_keeps_what_another_version_has_written(run: RunDir) -> None:
    older = {"recipe": "tiny", "created_at": 5, "colour": [1], "others": "mine", "resumes": [{"at": 1.0, "who": "x"}]}
    write_json(run.run_json, older)
    record = read_run_record(run)
    write_run_record(run, replace(record, resumes=(*record.resumes, Resume(("resume",), "0.1", 2.0, 7))))
    resume = {"argv": ["resume"], "trainspec": "0.1", "at": 2.0, "from_step": 7}
    assert json.loads(run.run_json.read_text()) == older | {
        "spec_version": "1.0",
        "resumes": [{"at": 1.0, "who": "x"}, resume],
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"created_at": 1.0}, "no `recipe`"),
        ({"recipe": "tiny", "created_at": -1}, "`created_at` is -1; "),
        ({"recipe": 7, "created_at": 1.0}, "`recipe` is 7; "),
        ({"recipe": "tiny", "created_at": 1.0, "resumes": {}}, "`resumes` .* list"),
        ({"recipe": "tiny", "created_at": 1.0, "data_dir": 3}, "`data_dir` is 3; "),
    ],
)
def test_a_damaged_run_record_is_reported(run: RunDir, content: dict[str, Any], reason: str) -> None:
    write_json(run.run_json, content)
    with pytest.raises(UnreadableFileError, match=f"run.json .*{reason}"):
        read_run_record(run)


@pytest.mark.clause("RUN-7")
@pytest.mark.parametrize(
    ("result", "keys"),
    [
        (RESULT, {"heldout_bits_per_byte", "xz_bits_per_byte", "tokens_per_s"}),
        (
            RunResult(status="done", heldout_loss=1.0, heldout_accuracy=0.5, samples_per_s=2.0, time_s=WallTime()),
            {"heldout_loss", "heldout_accuracy", "samples_per_s"},
        ),
        (
            replace(
                RESULT,
                sets={"web": SetFigures(loss=1.0, bits_per_byte=None)},
                recoveries=(Recovery("restart", None, 7, 20.0, 3),),
            ),
            {"heldout_bits_per_byte", "xz_bits_per_byte", "tokens_per_s", "sets", "recoveries"},
        ),
    ],
)
def test_a_result_is_read_back_and_has_the_keys_of_its_data(run: RunDir, result: RunResult, keys: set[str]) -> None:
    write_result(run, result)
    assert read_result(run) == result
    assert json.loads(run.result_json.read_text()).keys() == SHARED | keys | {"spec_version"}


@pytest.mark.clause("RUN-7")
def test_a_run_that_goes_on_has_no_result(run: RunDir) -> None:
    assert read_result(run) is None


def test_a_damaged_result_is_reported(run: RunDir) -> None:
    write_json(run.result_json, {"status": "done", "time_s": {"productive": "long"}})
    with raises(UnreadableFileError, "unreadable_file", "`time_s`", "`productive` is 'long'"):
        read_result(run)
    write_json(run.result_json, {"exit_code": 0})
    with raises(UnreadableFileError, "unreadable_file", "no `status`"):
        read_result(run)


@pytest.mark.parametrize(("data_dir", "found"), [("/data", "/data"), (None, None)])
def test_a_run_says_where_its_data_lies(run: RunDir, data_dir: str | None, found: str | None) -> None:
    write_run_record(run, replace(RECORD, data_dir=data_dir))
    assert read_data_dir(run) == found


def test_a_run_that_does_not_say_where_its_data_lies_is_refused(run: RunDir) -> None:
    write_json(run.run_json, {"recipe": "tiny", "created_at": 1.0})
    with raises(UnreadableFileError, "unreadable_file", "run.json", "no `data_dir`"):
        read_data_dir(run)


@pytest.mark.clause("SEC-4")
@pytest.mark.parametrize("path", [("spec", "optim", "lr"), ("num_nodes",), ("layout", "tp"), ("sha256",)])
def test_a_plan_that_was_altered_anywhere_is_refused(run: RunDir, path: tuple[str, ...]) -> None:
    made = plan(SPEC, MACHINE)
    write_plan(run, made)
    assert read_plan(run) == made
    content = json.loads(run.plan_json.read_text())
    section = content
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = "0" if path == ("sha256",) else section[path[-1]] * 2
    run.plan_json.write_text(json.dumps(content))
    with raises(UnreadableFileError, "unreadable_file", "plan.json was altered"):
        read_plan(run)


def test_a_plan_is_written_differently_and_is_the_same(run: RunDir) -> None:
    """The digest is of the content, not of its lines."""
    write_plan(run, plan(SPEC, MACHINE))
    content = json.loads(run.plan_json.read_text())
    run.plan_json.write_text(json.dumps(dict(reversed(content.items()))))
    assert read_plan(run) == plan(SPEC, MACHINE)


def test_a_plan_is_read_back(run: RunDir) -> None:
    made = plan(SPEC, MACHINE)
    write_json(run.plan_json, to_plain(made))
    assert read_plan(run) == made
    assert read_plan_outline(run).total_steps == 1
    assert read_section(run, "train")["max_steps"] == 1
    assert read_section(run, "colour") == {}


def test_a_plan_of_another_version_is_refused_with_what_is_wrong(run: RunDir) -> None:
    write_json(run.plan_json, {"spec": {"train": {"max_steps": 9}}})
    with raises(UnreadableFileError, "unreadable_file", "plan.json", "plan of this version") as caught:
        read_plan(run)
    assert "another version" in caught.value.problems[0].hint
    assert read_plan_outline(run).total_steps == 9


def test_a_plan_that_states_a_former_key_as_it_always_was_is_read_and_one_that_used_it_is_refused(run: RunDir) -> None:
    plain = to_plain(plan(SPEC, MACHINE))
    plain["spec"]["comm"]["rank"] = 4
    write_json(run.plan_json, plain)
    assert read_plan(run) == plan(SPEC, MACHINE)
    plain["spec"]["comm"]["gradients"] = "low_rank"
    write_json(run.plan_json, plain)
    with raises(UnreadableFileError, "unreadable_file", "`spec.comm.gradients` is low_rank", "no longer a setting"):
        read_plan(run)
    assert read_plan_outline(run).spec["comm"]["gradients"] == "low_rank"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "no `spec`"),
        ({"spec": {"train": 7}}, "no section `spec.train`"),
        ({"spec": {"train": {"max_steps": "many"}}}, "'many' as `max_steps`"),
        ({"spec": {}, "steps": "many"}, "'many' as `steps`"),
    ],
)
def test_a_damaged_plan_is_reported_whatever_its_version(run: RunDir, content: dict[str, Any], reason: str) -> None:
    write_json(run.plan_json, content)
    with pytest.raises(UnreadableFileError, match=reason):
        read_plan_outline(run)


@pytest.mark.parametrize(("spec", "steps"), [({}, None), ({"train": {}}, None), ({"train": {"max_steps": 3}}, 3)])
def test_the_steps_of_a_run_of_any_version(run: RunDir, spec: dict[str, Any], steps: int | None) -> None:
    assert (read_plan_outline(run), read_plan_outline(run).total_steps) == (PlanOutline(), None)
    write_json(run.plan_json, {"spec": spec})
    assert read_plan_outline(run).total_steps == steps


@pytest.mark.parametrize(("planned", "steps"), [(None, 3), (2, 2)])
def test_a_plan_whose_batch_changes_says_how_many_steps_that_makes(run: RunDir, planned, steps: int) -> None:
    write_json(run.plan_json, {"spec": {"train": {"max_steps": 3}}, "steps": planned})
    assert read_plan_outline(run).total_steps == steps


def test_a_section_that_is_no_object_is_reported(run: RunDir) -> None:
    write_json(run.plan_json, {"spec": {"data": [1], "optim": None}})
    with raises(UnreadableFileError, "unreadable_file", "list", "`spec.data`", "object"):
        read_section(run, "data")
    assert read_section(run, "optim") == {}


@pytest.mark.parametrize(
    "error",
    [
        WorkerErrorRecord(rank=3, host="h", type="E", message="m", traceback="t"),
        WorkerErrorRecord(
            rank=3,
            host="h",
            type="Hang",
            message="m",
            traceback="t",
            time=5.5,
            code="hang",
            hint="x",
            step=8,
            exit_code=5,
        ),
        NodeErrorRecord(node=1, host="h", message="m", lost=True, time=7.0),
        NodeErrorRecord(node=1, host="h", message="m", lost=False),
    ],
)
def test_an_error_is_read_back(run: RunDir, error: WorkerErrorRecord | NodeErrorRecord) -> None:
    write_error(run.error(3), error)
    assert read_error(run.error(3), type(error)) == error


def test_a_damaged_error_is_reported(run: RunDir) -> None:
    write_json(run.node_error(1), {"node": 1, "host": "h", "message": "m", "lost": "yes"})
    with raises(UnreadableFileError, "unreadable_file", "`lost` is 'yes'"):
        read_error(run.node_error(1), NodeErrorRecord)
