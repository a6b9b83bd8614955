from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.run.backend.nodes.backend import Reach, build_nodes_job
from trainspec_cli.run.job.job import build_job, job_environment, render_command, torchrun_command


def test_the_command_starts_as_many_workers_as_asked_for() -> None:
    command = torchrun_command(3, Path("/logs"), ("-m", "some.worker", "/run"))
    assert command[:3] == (sys.executable, "-m", "trainspec_cli.engine.comm.joining")
    assert command[-3:] == ("-m", "some.worker", "/run")
    assert command[command.index("--nproc-per-node") + 1] == "3"


def test_the_rendered_command_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    program = "import os, sys; print(os.getcwd(), os.environ['GREETING'], sys.argv[1:])"
    text = render_command([sys.executable, "-c", program, "--name", "it's"], {"GREETING": "two words"}, folder)
    shown = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == f"{folder} two words ['--name', \"it's\"]"


def test_an_option_stands_on_a_line_with_its_value() -> None:
    lines = render_command(["python", "-m", "torch", "--nnodes", "1", "worker"], {}, Path("/x")).splitlines()
    assert [line.strip(" \\") for line in lines] == ["cd /x && env", "python", "-m torch", "--nnodes 1", "worker"]


def test_the_cores_are_shared_among_the_workers(make_plan, machine: Machine) -> None:
    eight = Machine(hostname="here", cpu_cores=9, memory_bytes=1)
    assert job_environment(make_plan(), eight, "id")["OMP_NUM_THREADS"] == "4"
    one = Machine(hostname="here", cpu_cores=1, memory_bytes=1)
    assert job_environment(make_plan(), one, "id")["OMP_NUM_THREADS"] == "1"


def test_a_failure_of_nccl_ends_no_process_but_its_own(make_plan, machine: Machine) -> None:
    """Replica groups share a store, over which its watchdog would ask them all to write their records and end."""
    assert job_environment(make_plan(), machine, "id")["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_the_workers_import_this_very_copy(make_plan, machine: Machine, tmp_path: Path) -> None:
    """The command works in any folder, even in one with files named like modules of the standard library."""
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    environment = {**os.environ, **job_environment(make_plan(), machine, "id")}
    program = [sys.executable, "-c", "import random, trainspec_cli as t; print(t.__file__)"]
    shown = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    import trainspec_cli

    assert shown.strip() == trainspec_cli.__file__
    assert environment[LAUNCH_ID] == "id"


def test_a_compile_cache_that_another_may_write_is_refused(
    make_plan, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile loads code from it, under a name that anyone can guess."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(job_environment(make_plan(), machine, "id")["TORCHINDUCTOR_CACHE_DIR"])
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    folder.chmod(0o777)
    with raises(MachineError, "not_trusted", "by every user"):
        job_environment(make_plan(), machine, "id")


def test_a_job_on_several_nodes_takes_no_module_from_the_folder_one_stands_in(make_plan, tmp_path: Path) -> None:
    job = build_nodes_job(make_plan(), tmp_path, Reach("127.0.0.1", ("true",)))
    assert job.environment["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("inherited", [None, "/elsewhere"])
def test_a_python_path_of_the_users_is_kept(
    make_plan, machine: Machine, monkeypatch: pytest.MonkeyPatch, inherited: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if inherited:
        monkeypatch.setenv("PYTHONPATH", inherited)
    monkeypatch.setattr("sysconfig.get_path", lambda kind: "/site-packages")
    path = job_environment(make_plan(), machine, "id")["PYTHONPATH"].split(os.pathsep)
    assert path[1:] == ([inherited] if inherited else [])
    assert (Path(path[0]) / "trainspec_cli").is_dir()


def test_the_workers_command_is_kept_for_the_starts_to_come(make_plan, machine, tmp_path: Path) -> None:
    job = build_job(make_plan(), tmp_path / "run", machine, ("-m", "some.worker"))
    assert job.worker == ("-m", "some.worker", str(tmp_path / "run"))
    assert tuple(job.command[-3:]) == job.worker
    assert (job.world_size, job.stop_grace_s) == (2, 30.0)
    assert build_job(make_plan(), tmp_path / "run", machine).launch_id != job.launch_id
