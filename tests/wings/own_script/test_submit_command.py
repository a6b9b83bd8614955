"""A user's command as a Slurm job: the written files, and refusals with what to type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_run_record
from trainspec_cli.wings.own_script.job import read_own_job

COMMAND = (sys.executable, "train.py", "--lr", "1e-3", "--", "it's")
CPU = "cluster.device=cpu"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_the_run_and_its_script_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("cluster.num_nodes=2", "cluster.slurm.gpus_per_node=h100:8", "cluster.slurm.gpu_request=gres")
    more = ("cluster.slurm.time=4:00:00", "cluster.slurm.exclude=node7", "--max-restarts", "5", "--hang-s", "0")
    assert run(["sbatch", *asked, *more, "--dir", "mine", "--", *COMMAND]) == 0
    text, made = capsys.readouterr().out, RunDir(tmp_path / "mine")
    assert text == made.job_sbatch.read_text()
    lines = text.splitlines()
    assert {f"#SBATCH --{option}" for option in ("nodes=2", "gres=gpu:h100:8", "time=4:00:00", "requeue")} <= set(lines)
    assert "#SBATCH --job-name=mine" in lines
    assert read_run_record(made).command == COMMAND
    own = read_own_job(made)
    assert (own.num_nodes, own.exclude, own.max_requeues) == (2, "node7", 10)
    assert (own.wanted.max_restarts, own.wanted.hang_s, own.wanted.silent_s) == (5, None, None)
    assert subprocess.run(["bash", "-n", str(made.job_sbatch)], check=False).returncode == 0


def test_the_command_gets_the_pythonpath_of_the_jobs_shell(tmp_path: Path, capsys) -> None:
    """trainspec's processes need another one, and must not import from the current folder."""
    assert run(["sbatch", CPU, 'cluster.slurm.setup=["export PYTHONPATH=/mine"]', "--dir", "mine", "--", *COMMAND]) == 0
    script = (tmp_path / "mine/job.sbatch").read_text().partition("exec ")[0]
    shown = 'echo "$TRAINSPEC_OWN_PYTHONPATH,$TRAINSPEC_OWN_PYTHONSAFEPATH,$PYTHONSAFEPATH"'
    done = subprocess.run(
        ["bash", "-u"], input=script + shown, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout == "/mine,,1\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        ([CPU, "time=3:00:00", "--", *COMMAND], "unknown_key", "cluster.slurm.time=3:00:00"),
        ([CPU, "nodes=2", "--", *COMMAND], "unknown_key", "cluster.num_nodes=2"),
        ([CPU, "num_nodes=2", "--", *COMMAND], "unknown_key", "cluster.num_nodes=2"),
        ([CPU, "slurm.time=1", "--", *COMMAND], "unknown_key", "cluster.slurm.time=1"),
        ([CPU, "run.dir=x", "--", *COMMAND], "unknown_key", "pass --dir x"),
        ([CPU, "recipe=tiny", "--", *COMMAND], "unknown_key", "remove it"),
        ([CPU, "optim.lr=1", "--", *COMMAND], "unknown_key", "remove it"),
        ([CPU, "cluster.slurm.tme=1", "--", *COMMAND], "unknown_key", "`cluster.slurm.time`?"),
        ([CPU, "cluster.slurm.time=soon", "--", *COMMAND], "bad_time", "two hours"),
        ([CPU, "cluster.num_nodes=0", "--", *COMMAND], "out_of_range", "cluster.num_nodes=1"),
        (["--", *COMMAND], "left_open", "cluster.device=cuda cluster.devices_per_node=8"),
        (["cluster.device=cuda", "--", *COMMAND], "left_open", "cluster.devices_per_node=8"),
        ([CPU, "--grace-s", "300", "--", *COMMAND], "out_of_range", "cluster.slurm.warn_s=300"),
        ([CPU, "--"], "usage", " -- python train.py"),
        ([CPU, "--", "no_such_program"], "no_command", "activate the environment"),
        ([CPU, "--", "deepspeed", "train.py"], "no_command", "deepspeed"),
        ([CPU, "--", "torchrun", "--nproc-per-node", "8", "trian.py"], "no_script", " train.py?"),
        (
            [CPU, "cluster.slurm.setup=[module load x]", "--", "python", "trian.py"],
            "no_script",
            " train.py?",
        ),
        ([CPU, "cluster.slurm.time=2", "--", *COMMAND], "out_of_range", "cluster.slurm.time=2:00:00"),
        ([CPU, "--dry-run", "--submit", "--", *COMMAND], "usage", "leave one"),
        ([CPU, "--", "srun", *COMMAND], "usage", "remove srun"),
        ([CPU, "--", "trainspec", "run", *COMMAND], "usage", "remove `trainspec run`"),
        ([CPU, "cluster.num_nodes=2", "--", *COMMAND, "--node-rank", "0"], "usage", "remove it"),
        ([CPU, "--force", "--", *COMMAND], "usage", "leave it out"),
        (["recipe=tiny", "--dir", "x"], "usage", "set run.dir=x"),
        (["recipe=tiny", "--max-restarts", "1"], "usage", "after --"),
        ([CPU, "bash", "train.sh"], "usage", f"run trainspec sbatch {CPU} -- bash train.sh"),
        (["--partition=gpu", "--", *COMMAND], "usage", "cluster.slurm.partition=<value>"),
        (["--nodes=2", "--", *COMMAND], "usage", "cluster.num_nodes=<value>"),
        ([CPU, "bash", "--nproc-per-node", "8"], "usage", "after --"),
        ([], "usage", "sbatch recipe=quickstart"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(
    arguments: list[str], code: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sbatch", "--json", *arguments]) == 2
    problems = json.loads(capsys.readouterr().out)["errors"]
    assert [problem["code"] for problem in problems] == [code]
    assert hint in problems[0]["hint"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing is created"


def test_all_unknown_keys_are_reported_with_their_location(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sbatch", "time=3", CPU, "nodes=2", "--", *COMMAND]) == 2
    printed = capsys.readouterr().err
    assert "command line:1" in printed and "command line:3" in printed


def test_a_command_in_a_container_or_a_module_need_not_exist_here(tmp_path: Path, capsys) -> None:
    image = ("cluster.slurm.container_image=/images/torch.sif", "cluster.slurm.container_runtime=apptainer")
    assert run(["sbatch", CPU, *image, "--dir", "inside", "--", "no_such_program"]) == 0
    text = capsys.readouterr().out
    assert f"--bind {tmp_path}:{tmp_path} " in text and "HF_HUB_CACHE" not in text
    assert run(["sbatch", CPU, "cluster.slurm.setup=[module load train]", "--dir", "set", "--", "no_such_program"]) == 0


def test_an_existing_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sbatch", CPU, "--dir", "mine", "--", *COMMAND]) == 0
    capsys.readouterr()
    for again in (["sbatch", CPU, "--dir", "mine", "--", *COMMAND, "x"], ["run", "--dir", "mine", "--", *COMMAND]):
        assert run(again) == 2
        assert "sbatch mine/job.sbatch" in capsys.readouterr().err
    assert run(["resume", "mine"]) == 2
    assert "sbatch mine/job.sbatch" in capsys.readouterr().err


def test_a_damaged_job_is_named(tmp_path: Path) -> None:
    (tmp_path / "own_job.json").write_text('{"num_nodes": 2}')
    with pytest.raises(UnreadableFileError, match="own_job"):
        read_own_job(RunDir(tmp_path))


@pytest.mark.parametrize("given", ["cluster.slurm.time=90", "cluster.slurm.mem=512", "cluster.slurm.gpus_per_node=2"])
def test_numbers_for_sbatch_are_passed_unchanged(given: str, capsys) -> None:
    assert run(["sbatch", CPU, given, "--dry-run", "--", *COMMAND]) == 0
    name, _, value = given.rpartition(".")[2].partition("=")
    assert f"#SBATCH --{name.replace('_', '-')}={value}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("more", "command", "warns"),
    [
        ((), ("python", "train.py", "--lr", "1"), True),
        ((), ("env", "A=b", sys.executable, "-u", "train.py"), True),
        (("cluster.slurm.gpus_per_node=h100:8",), ("python", "train.py"), False),
        (("cluster.devices_per_node=1",), ("python", "train.py"), False),
        ((), ("python", "-m", "torch.distributed.run", "train.py"), False),
        ((), ("bash", "job.sh"), False),
    ],
)
def test_one_process_for_several_gpus_gives_a_warning(more, command, warns: bool, tmp_path: Path, capsys) -> None:
    (tmp_path / "job.sh").touch()
    assert run(["sbatch", "cluster=h100", *more, "--dry-run", "--json", "--", *command]) == 0
    warned = json.loads(capsys.readouterr().out)["warnings"]
    assert bool(warned) is warns
    if warns:
        assert "-- torchrun --nproc-per-node 8 train.py" in warned[0]


def test_a_preview_creates_nothing_and_an_existing_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho >> {tmp_path}/submitted\necho 12\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = ["sbatch", CPU, "--dir", "mine"]
    assert run([*asked, "--dry-run", "--", *COMMAND]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "mine").exists()
    assert run([*asked, "--", *COMMAND]) == 0
    assert capsys.readouterr().out == shown
    assert run([*asked, "--submit", "--max-restarts", "7", "--", *COMMAND]) == 2, "the job differs from the written one"
    assert not (tmp_path / "submitted").exists()
    capsys.readouterr()
    assert run([*asked, "--submit", "--", *COMMAND]) == 0
    assert capsys.readouterr().out == "12\n"
    assert run([*asked, "--submit", "--", *COMMAND]) == 2, "the job was submitted already"
    assert (tmp_path / "submitted").read_text().count("\n") == 1


def test_a_setup_line_that_fails_ends_the_job(tmp_path: Path, capsys) -> None:
    (tmp_path / "module.sh").write_text("false\nquiet() { false; true; }\n")
    for last, reached in (("true", True), ("module load nothing", False), ("false || true", True)):
        setup = f'cluster.slurm.setup=["[ -f absent ] && true", "source ./module.sh", quiet, "{last}"]'
        assert run(["sbatch", CPU, setup, "--dry-run", "--dir", "mine", "--", *COMMAND]) == 0
        script = capsys.readouterr().out.partition("exec ")[0] + "echo reached\n"
        done = subprocess.run(["bash"], input=script, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
        assert (done.stdout == "reached\n") is reached, done.stderr
        assert (done.returncode == 0) is reached and ("module load nothing" in done.stderr) is not reached


def test_a_sweep_has_its_runs_below_the_folder_that_is_given(tmp_path: Path, capsys) -> None:
    asked = [
        "sbatch",
        "recipe=tiny",
        CPU,
        "cluster.devices_per_node=1",
        "run.dir=mine",
        "--sweep",
        "optim.lr=1e-3,3e-4",
    ]
    assert run([*asked, "--dry-run", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["runs"]
    assert made == [str(tmp_path / "mine" / f"lr={rate}") for rate in ("1e-3", "3e-4")]


def test_a_recipe_is_shown_then_made_then_submitted_as_it_was_made(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 12\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = ["sbatch", "recipe=tiny", CPU, "cluster.devices_per_node=1", "run.dir=mine"]
    assert run([*asked, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "mine").exists()
    assert run(asked) == 0
    assert capsys.readouterr().out == shown
    assert run([*asked, "optim.lr=0.5", "--submit"]) == 2
    assert "sbatch mine/job.sbatch" in capsys.readouterr().err, "resume would train on this machine"
    assert run([*asked, "--submit"]) == 0
    assert capsys.readouterr().out == "12\n"
    assert run([*asked, "--submit"]) == 2
