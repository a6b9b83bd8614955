"""launch, resume, runs and report on the real engine: a whole run, one that is stopped, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from lab.commands import Command, call
from lab.problems import codes
from lab.waiting import wait_for

from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.tools import probe_path
from trainspec_cli.session.recipe.load import load, plan_on, this_machine

CLI = (sys.executable, "-m", "trainspec_cli")
TINY = ("recipe=tiny", "checkpoint.interval_steps=null", "data.max_bytes=200000", "train.log_interval_steps=5")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, measured_cache: Path) -> Path:
    """A working directory and a cache with a probe of this machine."""
    place = tmp_path_factory.mktemp("place")
    cache = place / "cache" / "machine"
    cache.mkdir(parents=True)
    for probe in (measured_cache / "machine").glob("probe-*.json"):
        shutil.copy2(probe, cache)  # with its time, by which a disturbed probe grows old
    return place


@pytest.fixture(scope="module")
def environment(place: Path) -> dict[str, str]:
    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "TRAINSPEC_CACHE": str(place / "cache"), "PYTHONPATH": home}


@pytest.fixture(scope="module")
def trainspec(place: Path, environment: dict[str, str]) -> Command:
    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*CLI, *arguments], cwd=place, env=environment, capture_output=True, text=True)

    return start


@pytest.fixture(scope="module")
def ask(place: Path) -> Command:
    """For commands that start no worker."""
    return partial(call, folder=place, TRAINSPEC_CACHE=str(place / "cache"))


@pytest.fixture(scope="module")
def done(trainspec: Command) -> subprocess.CompletedProcess[str]:
    return trainspec("launch", *TINY, "run.dir=runs/tiny/done")


def test_a_recipe_is_trained_and_summed_up(done: subprocess.CompletedProcess[str], place: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert "step 20/20: loss" in done.stdout
    assert "per byte (xz" in done.stdout
    assert "  runs/tiny/done\n" in done.stdout and "trainspec report runs/tiny/done\n" in done.stdout
    result = read_json(place / "runs/tiny/done/result.json")
    assert (result["status"], result["exit_code"], result["steps"]) == ("done", 0, 20)


@pytest.mark.clause("RUN-10")
def test_all_that_supervisor_and_workers_have_made_is_for_this_user_alone(
    done: subprocess.CompletedProcess[str], place: Path
) -> None:
    run = place / "runs/tiny/done"
    made = [run, *run.rglob("*")]
    assert {path for path in made if path.stat().st_mode & 0o077} == set()
    assert {path.relative_to(run).parts[0] for path in made[1:]} >= {"checkpoints", "events", "logs", "result.json"}


def test_the_report_agrees_with_the_result(done: subprocess.CompletedProcess[str], ask: Command, place: Path) -> None:
    report = json.loads(ask("report", "runs/tiny/done", "--json").stdout)
    result = read_json(place / "runs/tiny/done/result.json")
    assert report["status"] == "done"
    assert [report["steps"], report["final_loss"]] == [20, result["final_loss"]]
    assert report["speed"]["tokens_per_s"] == pytest.approx(result["tokens_per_s"])
    assert report["speed"]["mfu"] == pytest.approx(result["mfu"])
    assert sum(part["share"] for part in report["speed"]["parts"]) == pytest.approx(1.0)
    assert report["missing_ranks"] == []
    assert "the time went" in ask("report", "last").stdout


def test_a_done_run_is_listed_and_has_nothing_left_to_do(done: subprocess.CompletedProcess[str], ask: Command) -> None:
    listed = ask("runs").stdout.splitlines()
    assert listed[0].split() == ["recipe", "status", "step", "loss", "age", "path"]
    assert listed[1].split()[:3] == ["tiny", "done", "20/20"]
    (row,) = json.loads(ask("runs", "--json").stdout)
    assert (row["path"], row["status"]) == ("runs/tiny/done", "done")
    again = ask("resume", "last", "--json")
    assert (again.returncode, codes(again.stdout)) == (2, [("nothing_left", "train.max_steps")])
    assert "resume runs/tiny/done train.max_steps=40" in again.stdout


def test_a_folder_with_a_run_is_not_launched_into(done: subprocess.CompletedProcess[str], ask: Command) -> None:
    again = ask("launch", *TINY, "run.dir=runs/tiny/done", "--json")
    assert (again.returncode, codes(again.stdout)) == (2, [("run_exists", "run.dir")])
    assert "trainspec resume runs/tiny/done" in again.stdout


@pytest.mark.clause("LAUNCH-8")
def test_a_resume_refuses_what_the_checkpoint_depends_on(done: subprocess.CompletedProcess[str], ask: Command) -> None:
    changes = ("model.num_layers=3", "train.max_steps=many", "train.what=1")
    refused = ask("resume", "runs/tiny/done", *changes, "--json")
    errors = json.loads(refused.stdout)["errors"]
    assert refused.returncode == 2
    assert {(error["code"], error["path"], error["line"]) for error in errors} == {
        ("fixed_value", "model.num_layers", 1),
        ("wrong_type", "train.max_steps", 2),
        ("unknown_key", "train.what", 3),
    }


def hear_ctrl_c() -> None:
    """A shell starts what runs in its background with SIGINT ignored, which the program respects and inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on(
    trainspec: Command, ask: Command, place: Path, environment: dict[str, str]
) -> None:
    run = RunDir(place / "runs/tiny/stopped")
    command = [*CLI, "launch", *TINY, "train.max_steps=1e6", "run.dir=runs/tiny/stopped", "--json"]
    running = subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=hear_ctrl_c,
    )
    wait_for(lambda: run.events(0).is_file() and b'"step": 5,' in run.events(0).read_bytes())
    descendants = psutil.Process(running.pid).children(recursive=True)
    refused = ask("resume", "runs/tiny/stopped")
    running.send_signal(signal.SIGINT)
    output = running.communicate()[0]

    assert (refused.returncode, "is still running" in refused.stderr) == (2, True)
    assert running.returncode == 6
    result = json.loads(output)
    assert (result["status"], result["exit_code"], result["run"]) == ("stopped", 6, str(run.root))
    assert run.checkpoint_steps() == [result["steps"]]
    assert len(descendants) == 4  # the guard, torchrun and two workers
    assert not any(process.is_running() for process in descendants)

    steps = result["steps"] + 3
    resumed = trainspec("resume", "runs/tiny/stopped", f"train.max_steps={steps}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"continues from step {result['steps']}" in resumed.stdout
    assert read_json(run.result_json)["steps"] == steps
    report = json.loads(ask("report", "runs/tiny/stopped", "--json").stdout)
    assert report["start_steps"] == [0, result["steps"]]
    assert [step for step, _ in report["loss"]] == list(range(1, steps + 1))


@pytest.mark.slow
def test_an_error_of_a_worker_is_shown_as_its_own(trainspec: Command, place: Path) -> None:
    launched = trainspec("launch", *TINY, "run.dir=runs/tiny/failed", "optim.lr=1e30", "optim.grad_clip_norm=null")
    assert launched.returncode == 5
    assert "for 10 steps" in launched.stderr
    assert "ChildFailedError" not in launched.stdout + launched.stderr
    assert read_json(place / "runs/tiny/failed/result.json")["status"] == "failed"


def test_a_dry_run_shows_everything_and_leaves_nothing(ask: Command, place: Path) -> None:
    before = sorted(place.rglob("*"))
    shown = ask("launch", *TINY, "--dry-run")
    assert shown.returncode == 0
    assert "trainspec_cli.engine.comm.joining" in shown.stdout
    assert "OMP_NUM_THREADS=" in shown.stdout
    plan = json.loads(ask("launch", *TINY, "--dry-run", "--json", "run.dir=somewhere").stdout)
    assert plan["plan"]["devices_per_node"] == 2
    assert plan["run"] == plan["command"][-1] == str(place / "somewhere")
    assert sorted(place.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_the_machines_fault(ask: Command, place: Path) -> None:
    (place / "file").touch()
    refused = ask("launch", *TINY, "run.dir=file/run", "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("cannot_write", "run.dir")])
    assert "file/run: Not a directory" in refused.stdout


def test_a_run_that_is_not_there_is_refused(ask: Command) -> None:
    for command in ("report", "resume"):
        refused = ask(command, "nowhere", "--json")
        assert (refused.returncode, codes(refused.stdout)) == (2, [("no_run", "")])


def test_a_run_whose_data_is_gone_is_not_resumed(
    done: subprocess.CompletedProcess[str], ask: Command, place: Path
) -> None:
    about = read_json(place / "runs/tiny/done/run.json")
    moved = RunDir(place / "moved")
    write_json(moved.run_json, {**about, "data_dir": str(place / "gone")})
    write_json(moved.plan_json, read_json(place / "runs/tiny/done/plan.json"))
    refused = ask("resume", "moved", "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("missing_data", "data")])
    assert str(place / "gone") in refused.stdout


def test_a_run_has_its_prediction(done: subprocess.CompletedProcess[str], ask: Command) -> None:
    assert "predicted: " in done.stdout
    predicted = json.loads(ask("report", "runs/tiny/done", "--json").stdout)["predicted"]
    assert predicted["time_s"]["forward"] > 0


@pytest.fixture
def too_small(place: Path, monkeypatch: pytest.MonkeyPatch, made_up_probe: MachineProbe) -> Iterator[None]:
    """The cache says that a bare worker takes 909 TiB here."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(place / "cache"))
    loaded = load(TINY)
    machine = this_machine(loaded.spec)
    assert machine is not None
    path = probe_path(plan_on(loaded, machine), machine)
    before = path.read_text()
    write_json(path, to_plain(replace(made_up_probe, bare_bytes=1e15)))
    yield
    path.write_text(before)


def test_a_plan_that_does_not_fit_is_refused_before_any_worker_starts(
    done: subprocess.CompletedProcess[str], ask: Command, place: Path, too_small: None
) -> None:
    refused = ask("launch", *TINY, "run.dir=runs/tiny/large")
    assert refused.returncode == 3
    assert "2 x 909.49 TiB" in refused.stderr
    assert "--force launches anyway" in refused.stderr
    assert not (place / "runs/tiny/large").exists()
    assert ask("launch", *TINY, "--dry-run").returncode == 3
    resumed = ask("resume", "runs/tiny/done", "train.max_steps=21")
    assert (resumed.returncode, "2 x 909.49 TiB are needed" in resumed.stderr) == (3, True)
