"""Runs that others have made, or could have: what is refused before anything in them is believed or written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from lab.commands import Command, call
from lab.drawing import slow_after
from lab.problems import codes

from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir

HOME = Path(__file__).resolve().parents[2]
PAPER = ("sbatch", "recipe=tiny", "data.max_bytes=200000", "cluster.num_nodes=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def trainspec(place: Path) -> Command:
    return partial(call, folder=place, umask=0, TRAINSPEC_CACHE=str(place / "cache"))


@pytest.fixture(scope="module")
def paper(trainspec: Command, place: Path) -> Path:
    """A run on paper, made by someone whose umask keeps nothing from others."""
    (place / "runs").mkdir(0o755)
    done = trainspec(*PAPER, "run.dir=runs/paper")
    assert done.returncode == 0, done.stderr
    return place / "runs" / "paper"


@pytest.fixture
def run(paper: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(paper, tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of the run."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "thesis").write_text("words")
    return tmp_path / "outside" / "thesis"


def test_a_run_and_the_cache_are_for_their_user_alone(paper: Path, place: Path) -> None:
    made = [paper, *paper.rglob("*"), place / "cache"]
    assert {path for path in made if path.stat().st_mode & 0o077} == set()
    assert (paper.parent.stat().st_mode & 0o777) == 0o755, "what was there is left as it was"


def test_a_stranger_reads_nothing_of_a_run(
    trainspec: Command, shared: Path, stranger: Callable[..., None], paper: Path
) -> None:
    done = trainspec(*PAPER, f"run.dir={shared / 'mine'}")
    assert done.returncode == 0, done.stderr
    stranger("! ls $1 && ! cat $1/run.json", shared / "mine")


@pytest.mark.clause("LAUNCH-9")
@pytest.mark.parametrize("name", ["pid.json", "result.json", "composed.yaml"])
def test_resume_writes_through_no_link(trainspec: Command, run: RunDir, victim: Path, name: str) -> None:
    (run.root / name).unlink(missing_ok=True)
    (run.root / name).symlink_to(victim)
    refused = trainspec("resume", run.root, "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("not_trusted", "")]), refused.stdout
    assert str(victim) in refused.stdout and f"rm {run.root / name}" in refused.stdout
    assert victim.read_text() == "words"


def test_resume_writes_into_no_folder_behind_a_link(trainspec: Command, run: RunDir, victim: Path) -> None:
    run.events_folder.symlink_to(victim.parent)
    refused = trainspec("resume", run.root, "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("not_trusted", "")]), refused.stdout
    assert [path.name for path in victim.parent.iterdir()] == ["thesis"]


def test_export_publishes_nothing_that_a_link_names(trainspec: Command, run: RunDir, victim: Path) -> None:
    run.huggingface.mkdir()
    (run.huggingface / "tokenizer.json").symlink_to(victim)
    run.checkpoint(1).mkdir(parents=True)
    refused = trainspec("export", run.root, "--output", "published", "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("not_trusted", "")]), refused.stdout
    assert "huggingface/tokenizer.json" in refused.stdout


def test_nothing_begins_with_what_a_link_names(trainspec: Command, run: RunDir, victim: Path) -> None:
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "rank00000.safetensors").symlink_to(victim)
    refused = trainspec("validate", "recipe=tiny", f"init.from={run.root}", "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("not_trusted", "")]), refused.stdout
    assert "rank00000.safetensors" in refused.stdout


@pytest.mark.clause("LAUNCH-9")
def test_a_strangers_run_may_be_looked_at_and_no_more(
    trainspec: Command, run: RunDir, shared: Path, stranger: Callable[..., None]
) -> None:
    shutil.copytree(run.root, shared / "copied")
    subprocess.run(["chmod", "-R", "a+rX", shared / "copied"], check=True)
    stranger("cp -r $1/copied $1/theirs && chmod -R a+rX $1/theirs && touch $1/theirs/pid.json", shared)
    theirs = shared / "theirs"
    assert trainspec("report", theirs).returncode == 0
    for command in (("resume", theirs), ("export", theirs, "--output", "published")):
        refused = trainspec(*command, "--json")
        assert (refused.returncode, codes(refused.stdout)) == (4, [("not_trusted", "")]), refused.stdout
        assert "another user, nobody" in refused.stdout
        assert f"cp -rP {theirs} ./theirs-copy" in refused.stdout
    refused = trainspec("launch", "recipe=tiny", f"run.dir={theirs}", "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("not_trusted", "")]), refused.stdout


AS_STRANGER = """
import contextlib, io, os, sys
from trainspec_cli.__main__ import run
os.chdir(sys.argv[1])
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    run(sys.argv[2:])
    run(["report", "nowhere"])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(run(sys.argv[2:]))
"""
"""Once as this user, since the other one may not see where the modules lie."""


@pytest.mark.parametrize("closed", slow_after(1, ["", "run.json", "plan.json"]))
def test_a_run_that_is_closed_says_so_and_is_not_listed(
    paper: Path, shared: Path, stranger: Callable[..., None], closed: str
) -> None:
    mine = shared / "runs" / "mine"
    shutil.copytree(paper, mine)
    subprocess.run(["chmod", "-R", "a+rX", shared / "runs"], check=True)
    (mine / closed).chmod(0o700)

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", AS_STRANGER, str(shared), *arguments]
        return subprocess.run(command, cwd=HOME, capture_output=True, text=True)

    told = ask("report", "runs/mine", "--json")
    assert (told.returncode, codes(told.stdout)) == (4, [("closed_run", "")]), told.stderr
    assert f"runs/mine/{closed or 'run.json'} " in told.stdout and "chmod -R g+rX runs/mine" in told.stdout
    listed = ask("runs")
    assert (listed.returncode, "no runs" in listed.stdout) == (0, True), listed.stderr


def test_ones_own_run_behind_ones_own_link_goes_on(trainspec: Command, run: RunDir, place: Path) -> None:
    """A link such as that of a runs/ on another disk is accepted; the run is refused later, for another reason."""
    about = read_json(run.run_json)
    write_json(run.run_json, {**about, "data_dir": str(place / "gone")})
    plan = read_json(run.plan_json)
    del plan["sha256"]  # as in plans of 0.1: one that is stated is compared
    plan["spec"]["data"] = {**plan["spec"]["data"], "source": "tokens", "path": "gone"}
    write_json(run.plan_json, plan)
    (place / "scratch").symlink_to(run.root.parent)
    assert codes(trainspec("resume", "scratch/run", "--json").stdout) == [("missing_data", "data")]
