"""`trainspec run`: commands of the user, whose scripts know nothing of trainspec; those of several ranks are in
test_frameworks.py."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from lab.waiting import wait_for

from trainspec_cli.run.folder.event_types.events import StepEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script import journal as progress

SCRIPTS = Path(__file__).parents[1] / "lab" / "own_commands"


STAND_IN_LOOP = f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS / "standin")!r})
from torch.optim.optimizer import Optimizer
optimizer = Optimizer()
for _ in range(int(sys.argv[1])):
    time.sleep(0.01)
    optimizer.step()
print("trained", sys.argv[1])
"""


def loop(*arguments: str, place: str = "") -> list[str]:
    return ["--", "env", f"PLACE={place}", sys.executable, str(SCRIPTS / "loop.py"), *arguments]


def steps_of(run: RunDir, rank: int = 0) -> list[int]:
    return [event.step for event in read_log(run.events(rank)) if isinstance(event, StepEvent)]


def pids_of(run: RunDir) -> dict[int, int]:
    """The processes of the newest start that train, by rank."""
    folder = max((run.root / "progress").iterdir())
    found = (progress.StepFile(path).read()[0] for path in progress.step_files(folder))
    return {one.rank or 0: one.pid for one in found if one}


@pytest.mark.slow
def test_a_loop_is_counted_and_its_run_can_be_looked_at(trainspec, tmp_path, read_result):
    """Its torch is a stand-in; the slow tests train with the real one."""
    (tmp_path / "train.py").write_text(STAND_IN_LOOP)
    ran = trainspec("run", "--dir", "run", "--", sys.executable, "train.py", "30")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "trained 30" in ran.stdout and "done after 30 steps" in ran.stdout
    result = read_result("run")
    assert (result["status"], result["steps"], result["exit_code"]) == ("done", 30, 0)
    assert result["recoveries"] == []
    run = RunDir(tmp_path / "run")
    assert steps_of(run) == list(range(1, 31))
    assert "trained 30" in run.run_log.read_text()
    record = json.loads(run.run_json.read_text())
    assert record["command"] == [sys.executable, "train.py", "30"] and record["recipe"] == "train.py"
    told = trainspec("report", "run", "--json")
    assert json.loads(told.stdout)["steps"] == 30 and json.loads(told.stdout)["goodput"] > 0
    assert "steps/s" in trainspec("report", "run").stdout
    assert "no hang" in trainspec("diagnose", "run").stdout
    assert "trained 30" in trainspec("logs", "run").stdout
    refused = trainspec("resume", "run")
    assert refused.returncode == 2 and "trainspec run -- " in refused.stderr


@pytest.mark.slow
def test_the_commands_own_exit_code_is_kept(trainspec, read_result):
    ran = trainspec("run", "--dir", "run", "--max-restarts", "0", "--json", *loop("30", place="ends"))
    assert ran.returncode == 5, ran.stdout + ran.stderr
    assert "exit code 3" in json.loads(ran.stdout)["errors"][0]["message"]
    result = read_result("run")
    assert (result["status"], result["steps"], result["exit_code"]) == ("failed", 10, 3)


@pytest.mark.slow
def test_one_budget_of_restarts_ends_what_fails_again_and_again(trainspec, tmp_path, read_result):
    ran = trainspec("run", "--dir", "run", "--max-restarts", "2", *loop("30", place="ends"))
    assert ran.returncode == 5
    assert len(list((tmp_path / "run" / "generations").iterdir())) == 3
    result = read_result("run")
    assert (result["steps"], len(result["recoveries"])) == (10, 2)
    assert [recovery["lost_steps"] for recovery in result["recoveries"]] == [10, 10]


@pytest.mark.slow
def test_a_bug_of_the_script_is_started_twice_at_most_and_its_steps_count_once(trainspec, tmp_path, read_result):
    (tmp_path / "train.py").write_text(STAND_IN_LOOP + "raise ValueError(f'no such key at {time.time()}')\n")
    ran = trainspec("run", "--dir", "run", "--", sys.executable, "train.py", "31")
    said = " ".join((ran.stdout + ran.stderr).split())
    assert ran.returncode == 5, said
    assert len(list((tmp_path / "run" / "generations").iterdir())) == 2
    result = read_result("run")
    assert (result["steps"], result["exit_code"]) == (31, 1)
    assert "ValueError: no such" in said and "(train.py:10)" in said
    assert "hint: fix that" in said
    assert ran.stdout.count("Traceback (most recent") == 2, "each start's own, as it printed it"


@pytest.mark.slow
def test_a_terminal_shows_the_scripts_own_output(tmp_path, environment, read_result):
    (tmp_path / "train.py").write_text(
        STAND_IN_LOOP
        + "print('\\r\\x1b[32mbar\\x1b[0m', sys.stdout.isatty(), end='', flush=True)\nraise ValueError('boo')\n"
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "trainspec_cli", "run", "--dir", "run", "--max-restarts", "0", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "train.py", "30"], cwd=tmp_path, env=environment, stdout=slave, stderr=slave
    )
    os.close(slave)
    said = b""
    with suppress(OSError):
        while data := os.read(master, 2**16):
            said += data
    os.close(master)
    assert process.wait() == 5
    assert b"\r\x1b[32mbar\x1b[0m True" in said
    assert said.count(b"ValueError: boo") == 2, "the script's own traceback, and the line that names its end"
    log = (tmp_path / "run" / "logs" / "launch_01" / "output.log").read_bytes()
    assert b"\rbar True" in log and b"\x1b" not in log
    assert read_result("run")["steps"] == 30


@pytest.mark.slow
def test_what_fails_before_its_first_step_is_not_started_again(trainspec, tmp_path, read_result):
    ran = trainspec("run", "--dir", "run", *loop("30", place="begin"))
    assert ran.returncode == 5
    assert "ValueError: broken" in ran.stdout + ran.stderr
    assert read_result("run")["exit_code"] == 1
    assert len(list((tmp_path / "run" / "generations").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accumulating", "in_backward", "compiled", "scaled", "trainer", "accelerated"])
def test_steps_are_counted_exactly(trainspec, read_result, kind):
    if kind == "trainer":
        pytest.importorskip("transformers")
    if kind in ("trainer", "accelerated"):
        pytest.importorskip("accelerate")
    ran = trainspec("run", "--dir", "run", "--", sys.executable, str(SCRIPTS / "kinds.py"), kind)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert read_result("run")["steps"] == 12


@pytest.mark.slow
def test_what_sleeps_is_a_hang_and_what_evaluates_is_none(trainspec, read_result):
    limits = ("--hang-s", "4", "--max-restarts", "0")
    well = trainspec("run", "--dir", "well", *limits, *loop("30", "0.01", place="evaluates"))
    hung = trainspec("run", "--dir", "hung", *limits, *loop("30", "0.01", place="stands"))
    assert well.returncode == 0, well.stdout + well.stderr
    assert hung.returncode == 5 and "<module>, loop.py:" in " ".join((hung.stdout + hung.stderr).split())
    assert read_result("hung")["steps"] == 10


@pytest.mark.slow
def test_a_request_to_stop_is_heard_and_leaves_nothing(start_trainspec, tmp_path, read_result, wait_for_step):
    process = start_trainspec("run", "--dir", "run", *loop("4000", "0.01", place="saves"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, process)
    started = pids_of(run)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6, said
    assert "saved" in said
    result = read_result("run")
    assert (result["status"], result["exit_code"]) == ("stopped", 0)
    wait_for(lambda: not any(map(psutil.pid_exists, started.values())))


@pytest.mark.slow
def test_a_command_that_hears_no_request_is_killed_when_its_grace_is_over(start_trainspec, tmp_path, wait_for_step):
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + (SCRIPTS / "loop.py").read_text()
    )
    process = start_trainspec(
        "run", "--dir", "run", "--grace-s", "1", "--", sys.executable, str(script), "4000", "0.01"
    )
    wait_for_step(RunDir(tmp_path / "run"), 10, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130


@pytest.mark.slow
def test_the_users_own_sitecustomize_still_runs(tmp_path, read_result, environment):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.OWN = __name__\n")
    (tmp_path / "own.py").write_text(
        "import sitecustomize\nprint(OWN, sitecustomize.__file__)\n" + (SCRIPTS / "loop.py").read_text()
    )
    path = os.pathsep.join(filter(None, (str(tmp_path / "site"), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "trainspec_cli", "run", "--dir", "run", "--", sys.executable, "own.py", "5"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert f"sitecustomize {tmp_path / 'site' / 'sitecustomize.py'}" in ran.stdout, ran.stdout + ran.stderr
    assert read_result("run")["steps"] == 5


@pytest.mark.slow
def test_an_isolated_python_is_not_counted_and_that_is_said(trainspec, read_result):
    ran = trainspec("run", "--dir", "run", "--", sys.executable, "-I", str(SCRIPTS / "loop.py"), "5")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "python -I ignores PYTHONPATH" in " ".join(ran.stdout.split())
    assert "trained 5" in ran.stdout
    result = read_result("run")
    assert (result["status"], result["steps"]) == ("done", 0)
