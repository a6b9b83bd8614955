"""run.json and result.json: what is written is read back, and what another version wrote is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.reading.files import UnreadableFileError
from trainspec_cli.rundir.accounting import Recovery, WallTime
from trainspec_cli.rundir.event_types import SetFigures
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import (
    Resume,
    RunRecord,
    RunResult,
    read_data_dir,
    read_result,
    read_run_record,
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
    assert json.loads(run.run_json.read_text()).keys() == keys
    assert read_data_dir(run) is None


def test_a_resume_keeps_what_another_version_has_written(run: RunDir) -> None:
    older = {"recipe": "tiny", "created_at": 5, "colour": [1], "others": "mine", "resumes": [{"at": 1.0, "who": "x"}]}
    write_json(run.run_json, older)
    record = read_run_record(run)
    write_run_record(run, replace(record, resumes=(*record.resumes, Resume(("resume",), "0.1", 2.0, 7))))
    resume = {"argv": ["resume"], "trainspec": "0.1", "at": 2.0, "from_step": 7}
    assert json.loads(run.run_json.read_text()) == older | {"resumes": [{"at": 1.0, "who": "x"}, resume]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"created_at": 1.0}, "it has no `recipe`"),
        ({"recipe": "tiny", "created_at": -1}, "`created_at` is -1; a number from 0 to 1e\\+11 is needed"),
        ({"recipe": 7, "created_at": 1.0}, "`recipe` is 7; text is needed"),
        ({"recipe": "tiny", "created_at": 1.0, "resumes": {}}, "`resumes` is an object; a list"),
        ({"recipe": "tiny", "created_at": 1.0, "data_dir": 3}, "`data_dir` is 3; text or null is needed"),
    ],
)
def test_a_damaged_run_record_is_reported(run: RunDir, content: dict[str, Any], reason: str) -> None:
    write_json(run.run_json, content)
    with pytest.raises(UnreadableFileError, match=f"run.json is no record of a run: .*{reason}"):
        read_run_record(run)


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
    assert json.loads(run.result_json.read_text()).keys() == SHARED | keys


def test_a_run_that_goes_on_has_no_result(run: RunDir) -> None:
    assert read_result(run) is None


def test_a_damaged_result_is_reported(run: RunDir) -> None:
    write_json(run.result_json, {"status": "done", "time_s": {"productive": "long"}})
    with pytest.raises(UnreadableFileError, match="`time_s` does not fit: `productive` is 'long'; a number"):
        read_result(run)
    write_json(run.result_json, {"exit_code": 0})
    with pytest.raises(UnreadableFileError, match="it has no `status`"):
        read_result(run)
