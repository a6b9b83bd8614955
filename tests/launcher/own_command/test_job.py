"""What is set for a command of the user's own, and what is seen of it beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.errors import RecipeError
from trainspec_cli.launcher.own_command.job import (
    HOOK,
    Wanted,
    build_own_job,
    check_command,
    process_count,
    script_name,
    what_it_opens,
    why_uncounted,
)
from trainspec_cli.spec.recipe.cluster import Machine

MACHINE = Machine("host", cpu_cores=8, memory_bytes=2**34, bf16=True)
WANTED = Wanted(max_restarts=2, grace_s=90.0, hang_s=600.0)


@pytest.mark.parametrize(
    ("line", "processes", "name"),
    [
        ("python train.py --lr 1", None, "train.py"),
        ("torchrun --nproc-per-node 4 a/train.py", 4, "train.py"),
        ("torchrun --nproc_per_node=2 -m pack.train", 2, "pack.train"),
        ("python -m torch.distributed.run --nproc-per-node auto train.py", None, "train.py"),
        ("accelerate launch --num_processes 3 train.py", 3, "train.py"),
        ("bash job.sh", None, "job.sh"),
        ("./train", None, "train"),
    ],
)
def test_processes_and_script_are_read_off_the_command(line: str, processes: int | None, name: str) -> None:
    assert process_count(line.split()) == processes
    assert script_name(line.split()) == name


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("python -I train.py", "-I"),
        ("python3.12 -u -E train.py", "-E"),
        ("env A=b python -uS train.py", "-uS"),
        ("python train.py -I", ""),
        ("python -m train -E", ""),
        ("torchrun train.py", ""),
    ],
)
def test_a_python_that_reads_no_path_is_named(line: str, option: str) -> None:
    assert why_uncounted(line.split()).startswith(f"python {option} reads no PYTHONPATH" if option else "") is True
    assert bool(why_uncounted(line.split())) is bool(option)


def test_torchruns_open_store_is_warned_of() -> None:
    assert "torchrun opens a store" in what_it_opens(["torchrun", "train.py"])
    assert "torchrun opens a store" in what_it_opens(
        ["env", "A=b", "python", "-m", "torch.distributed.run", "train.py"]
    )
    assert what_it_opens(["python", "train.py", "torchrun"]) == ""


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MASTER_PORT", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    environment = build_own_job(["torchrun", "--nproc-per-node", "4", "a.py"], tmp_path, MACHINE, WANTED).environment
    assert "OMP_NUM_THREADS" not in environment
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("PYTHONPATH", "mine")
    environment = build_own_job(["torchrun", "--nproc-per-node", "4", "a.py"], tmp_path, MACHINE, WANTED).environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["PYTHONPATH"] == f"{HOOK}:mine"
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "90"
    assert environment["MASTER_PORT"] == environment["PET_MASTER_PORT"]
    several = build_own_job(["torchrun", "--nnodes", "2", "a.py"], tmp_path, MACHINE, WANTED).environment
    assert "GLOO_SOCKET_IFNAME" not in several and "MASTER_PORT" not in several


def test_what_cannot_be_started_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for command, message, hint in (
        ([], "there is no command to run", "trainspec run -- python train.py"),
        (["./train.py"], "./train.py is a file that cannot be executed", "python ./train.py"),
        (["no_such_program"], "no_such_program is no program here", "whole path"),
    ):
        with pytest.raises(RecipeError, match=message) as raised:
            check_command(command)
        assert hint in raised.value.problems[0].hint
