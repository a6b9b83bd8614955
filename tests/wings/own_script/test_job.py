"""The job of a user's command: its environment, and what is known before it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.events import stepped, write_event

from trainspec_cli.core.environment_names import OWN_PATH, OWN_SAFE_PATH
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import NodePlace
from trainspec_cli.wings.own_script.job import (
    HOOK,
    CommandSettings,
    build_own_job,
    build_own_node_job,
    check_command,
    check_for_nodes,
    command_on_node,
    describe_own_command,
    notes_on,
    process_count,
    script_name,
)

MACHINE = Machine("host", cpu_cores=8, memory_bytes=2**34, bf16=True)
WANTED = CommandSettings(
    max_restarts=2, grace_s=90.0, hang_s=600.0, silent_s=1800.0, work_s=300.0, join_timeout_s=900.0
)


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
def test_processes_and_script_are_read_from_the_command(line: str, processes: int | None, name: str) -> None:
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
def test_a_python_that_ignores_pythonpath_is_reported(line: str, option: str) -> None:
    notes = [note for note in notes_on(line.split()) if "PYTHONPATH" in note]
    assert len(notes) == bool(option) and all(f"python {option} " in note for note in notes)


@pytest.mark.parametrize(
    ("line", "warns"),
    [
        ("torchrun train.py", True),
        ("env A=b python -m torch.distributed.run train.py", True),
        ("python train.py torchrun", False),
    ],
)
def test_torchruns_open_store_gives_a_warning(line: str, warns: bool) -> None:
    assert bool(notes_on(line.split())) is warns


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_command_that_cannot_be_started_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for command, code, hint in (
        ([], "usage", "trainspec run -- python train.py"),
        (["./train.py"], "no_command", "python ./train.py"),
        (["no_such_program"], "no_command", "full path"),
    ):
        with pytest.raises(RecipeError) as raised:
            check_command(command)
        (problem,) = raised.value.problems
        assert problem.code == code and hint in problem.hint


def test_a_continued_job_knows_the_steps_of_its_earlier_starts(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_event(RunDir(tmp_path).events(0), stepped(step))
    job = build_own_job(["python", "train.py"], tmp_path, MACHINE, WANTED)
    assert (job.earlier_steps, job.max_restarts, job.program) == (3, 2, "train.py")
    assert (job.begins_unseen, job.torchrun_log.name) == (True, "output.log")


# Several nodes


def node_environment(tmp_path: Path, line: str) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as first_node:
        first_node.setenv(OWN_PATH, "/their/modules")
        first_node.setenv(OWN_SAFE_PATH, "")
        own = describe_own_command(line.split(), CommandSettings(3, 60.0, None, None, 300.0), 2950)
    record = GenerationRecord(
        *(3, 0.0, "host", "127.0.0.1", 1, {}, 4, "launch", str(tmp_path / "logs"), (), ()), own=own
    )
    return dict(build_own_node_job(tmp_path, MACHINE, NodePlace(2, 4, "127.0.0.1"), record).environment)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_a_node_of_torchrun_gets_the_rendezvous(tmp_path: Path, bare: None) -> None:
    given = node_environment(tmp_path, "torchrun --nproc-per-node 4 train.py")
    assert (given["PET_NNODES"], given["PET_NODE_RANK"]) == ("4", "2")
    assert (given["PET_MASTER_ADDR"], given["PET_MASTER_PORT"]) == ("127.0.0.1", "2950")
    assert given["OMP_NUM_THREADS"] == "2"
    assert given["PYTHONPATH"] == f"{HOOK}:/their/modules" and given["PYTHONSAFEPATH"] == ""
    assert not {"RANK", "WORLD_SIZE"} & given.keys(), "torchrun sets the ranks of its processes"


def test_a_node_without_a_launcher_is_a_rank(tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = node_environment(tmp_path, "python train.py")
    assert [given[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")] == ["2", "4", "0", "2950"]
    monkeypatch.setenv("MASTER_PORT", "77")
    assert "MASTER_PORT" not in node_environment(tmp_path, "python train.py"), "the user has set it"


def test_accelerate_gets_options_for_its_nodes(tmp_path: Path, bare: None) -> None:
    launcher, rest = "python -u -m accelerate.commands.launch", "--num_processes 8 --main-process-port 9 train.py"
    added = "--num_machines 2 --machine_rank 1 --main_process_ip head"
    found = command_on_node(f"{launcher} {rest}".split(), NodePlace(1, 2, "head"), 5)
    assert list(found) == f"{launcher} {added} {rest}".split()
    assert node_environment(tmp_path, "accelerate launch --num_processes 8 train.py")["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --node-rank=1 train.py",
        "accelerate launch --machine_rank 1 train.py",
        "torchrun --standalone train.py",
        "torchrun --nnodes 3 train.py",
        "/bin/deepspeed train.py",
    ],
)
def test_a_command_that_contradicts_the_nodes_is_refused(line: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check_for_nodes(line.split(), 2)
    (problem,) = raised.value.problems
    assert (problem.code, problem.path) == ("usage", "COMMAND")
    check_for_nodes(["torchrun", "--nnodes", "2", "train.py"], 2)
