"""`trainspec run` until its start, and how a command's output is shown."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import EXIT_DONE, MachineError, RecipeError
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_run_record
from trainspec_cli.run.job.job import Job
from trainspec_cli.session.launching.nodes import NodeOptions
from trainspec_cli.wings.own_script import launching as own_command
from trainspec_cli.wings.own_script.job import CommandSettings, describe_own_command, read_own_job
from trainspec_cli.wings.own_script.launching import Output, run_command

COMMAND = (sys.executable, "train.py")
WANTED = CommandSettings(3, 60.0, None, None, 300.0)


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Collect the jobs instead of running them."""
    jobs: list[Job] = []

    def run(job: Job, *_: Any, **__: Any) -> int:
        jobs.append(job)
        return EXIT_DONE

    monkeypatch.setattr(own_command, "run", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return jobs


def test_nothing_is_printed_without_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, "mine", WANTED, as_json=False) == EXIT_DONE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_wait_for_each_other_as_long_as_requested(
    started: list[Job], monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(own_command, "join", lambda *_, **options: joined.append(options))
    handler = signal.getsignal(signal.SIGUSR2)
    wanted = replace(WANTED, join_timeout_s=1800.0)
    run_command(COMMAND, "mine", wanted, NodeOptions(2, node, "127.0.0.1:29500"), as_json=False)
    signal.signal(signal.SIGUSR2, handler)
    if node:
        ((wait_s, asked),) = [(one["wait_s"], one["joined"]) for one in joined]
        assert (wait_s, asked.folder, asked.join_key, asked.of_slurm) == (1800.0, "--dir", "--join-timeout-s", False)
        other = describe_own_command(["torchrun", "other.py"], wanted, 1)
        record = GenerationRecord(1, 0.0, "a", "a", 1, {}, 2, "id", "logs", (), (), own=other)
        with pytest.raises(RecipeError, match=r"torchrun other\.py") as raised:
            asked.check(RunDir("mine"), record)
        assert raised.value.problems[0].path == "COMMAND"
    else:
        assert [job.join_timeout_s for job in started] == [1800.0]
        assert read_own_job(RunDir("mine")).wanted == wanted


def test_a_requeued_slurm_job_continues_in_its_folder(
    started: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setattr("trainspec_cli.session.launching.in_slurm.slurm", None)
    assert run_command(COMMAND, "mine", WANTED, as_json=False) == EXIT_DONE
    run = RunDir(tmp_path / "mine")
    write_json(run.result_json, {"status": "stopped", "exit_code": 1, "steps": 3})
    (run.logs / "launch_01").mkdir(parents=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_command(COMMAND, "mine", WANTED, as_json=False) == EXIT_DONE
    assert [job.logs.name for job in started] == ["launch_01", "launch_02"]
    assert len(read_run_record(run).resumes) == 1 and not run.result_json.exists()
    write_json(run.result_json, {"status": "done", "exit_code": 0, "steps": 9})
    assert run_command(COMMAND, "mine", WANTED, as_json=False) == EXIT_DONE
    assert len(started) == 2
    assert "mine" in capsys.readouterr().out


def test_a_full_disk_is_reported_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device", "mine/run.json")

    monkeypatch.setattr(own_command, "write_own_launch", refuse)
    with raises(MachineError, "cannot_write", "mine/run.json") as raised:
        run_command(COMMAND, "mine", WANTED, as_json=False)
    assert "--dir" in raised.value.problems[0].hint


def test_only_the_output_of_this_launch_is_shown(started: list[Job], tmp_path: Path) -> None:
    run_command(COMMAND, "mine", WANTED, as_json=False)
    logs = tmp_path / "mine" / "logs"
    job = replace(started[0], logs=logs / "launch_02")
    shown: list[str] = []
    output = Output(job)
    for name in ("launch_01", "launch_02", "launch_02_start002"):
        (logs / name).mkdir(parents=True)
        (logs / name / "output.log").write_text(f"{name}\n")
        output.look(shown.append)
    assert shown == ["launch_02", "launch_02_start002"]


def test_a_bar_is_one_line_and_colours_and_empty_rank_lines_are_omitted(started: list[Job], tmp_path: Path) -> None:
    run_command(COMMAND, "mine", WANTED, as_json=False)
    started[0].logs.mkdir(parents=True)
    text = "\r 10%|#  |\r100%|###|\n\x1b[32mgreen\x1b[0m\n[default0]:\n[default0]:step 3\n\nlast\n half"
    (started[0].logs / "output.log").write_text(text, newline="")
    shown: list[str] = []
    output = Output(started[0])
    output.look(shown.append)
    output.look(shown.append)
    assert shown == ["100%|###|", "green", "[default0]:step 3", "", "last"]


@pytest.mark.parametrize(
    ("printed", "is_shown"),
    [
        ("Traceback\n  File a\nValueError: boo\n", True),
        ("[default1]:Traceback\n[default0]:step 3\n[default1]:  File a\n[default1]:ValueError: boo\n", True),
        ("\x1b[31m  File a\x1b[0m\nValueError: boo\n", True),
        ("ValueError: boo\n", False),
        ("", False),
    ],
)
def test_an_excerpt_that_was_printed_is_recognised(
    started: list[Job], tmp_path: Path, printed: str, is_shown: bool
) -> None:
    run_command(COMMAND, "mine", WANTED, as_json=False)
    started[0].logs.mkdir(parents=True)
    (started[0].logs / "output.log").write_text(printed)
    output = Output(started[0])
    assert not output.has_shown("  File a\nValueError: boo"), "no output was shown yet"
    output.look(lambda _: None)
    assert output.has_shown("  File a\nValueError: boo") is is_shown
