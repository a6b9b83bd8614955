"""The script as bash reads it, and what stands in it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.launch.slurm.script import render_script
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.slurm import SlurmSpec


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.fixture
def render(make_plan, tmp_path: Path):
    def make(slurm: SlurmSpec = SlurmSpec(), roots: int = 1, device: str = "cpu", groups: int = 1) -> str:  # noqa: B008
        plan: Plan = make_plan()
        cluster = replace(plan.spec.cluster, slurm=slurm)
        plan = replace(
            plan, spec=replace(plan.spec, cluster=cluster), num_nodes=4, device=device, replica_groups=groups
        )
        folders = [tmp_path / f"run {i}" for i in range(roots)]
        return render_script(plan, folders, "tiny", ["sbatch", "recipe=tiny"], tmp_path)

    return make


def test_what_is_not_asked_for_is_left_to_the_site(render, tmp_path: Path) -> None:
    assert options(render()) == [
        "--job-name=trainspec-tiny",
        "--nodes=4",
        "--ntasks-per-node=1",
        f"--output={tmp_path}/run 0/logs/slurm-%j.log",
        "--open-mode=append",
        "--exclusive",
        "--signal=B:USR2@120",
        "--requeue",
    ]


def test_what_is_asked_for_stands_in_it(render) -> None:
    slurm = SlurmSpec(
        partition="gpu",
        account="lab",
        qos="high",
        time="2:00:00",
        gpus_per_node="h100:8",
        mem="0G",
        constraint="ib",
        exclude="node[3,7]",
        dependency="singleton",
        sbatch_lines=("--reservation=mine",),
        max_requeues=0,
    )
    expected = ("partition=gpu", "account=lab", "qos=high", "time=2:00:00", "gpus-per-node=h100:8", "mem=0G")
    more = ("constraint=ib", "exclude=node[3,7]", "dependency=singleton", "reservation=mine", "no-requeue")
    assert {f"--{option}" for option in (*expected, *more)} <= set(options(render(slurm)))


def test_gpus_are_asked_for_where_the_run_uses_them(render) -> None:
    assert "--gpus-per-node=2" in options(render(device="cuda"))


def test_nothing_is_exported_through_sbatch_or_srun(render) -> None:
    assert "--export" not in render()


def test_a_container_is_for_srun(render) -> None:
    text = render(SlurmSpec(container_image="/images/torch.sqsh", container_mounts="/data:/data"))
    (srun,) = [line for line in text.splitlines() if line.strip().startswith("srun")]
    assert "--container-image=/images/torch.sqsh --container-mounts=/data:/data" in srun
    assert not [option for option in options(text) if option.startswith("--container")]


@pytest.mark.parametrize(("roots", "task"), [(1, "0"), (3, "2")])
def test_bash_takes_the_run_of_its_task(render, tmp_path: Path, roots: int, task: str) -> None:
    """The script itself, with a stand-in for what it ends in."""
    text = render(SlurmSpec(setup=("export GREETING='two words'",)), roots)
    head, _, _ = text.partition("exec ")
    script = f'{head}echo "$PWD|$run|$GREETING"\n'
    done = subprocess.run(
        ["bash", "-eu"], input=script, env={"SLURM_ARRAY_TASK_ID": task}, capture_output=True, text=True
    )
    assert done.stdout == f"{tmp_path}|{tmp_path}/run {task}|two words\n", done.stderr


def test_a_sweep_is_an_array(render, tmp_path: Path) -> None:
    asked = options(render(SlurmSpec(array_parallel=2), roots=5))
    assert "--array=0-4%2" in asked
    assert f"--output={tmp_path}/slurm/%A_%a.log" in asked


def test_replica_groups_outlive_a_node(render) -> None:
    text = render(groups=2)
    assert "--no-kill" in options(text)
    assert "--no-kill" in next(line for line in text.splitlines() if line.strip().startswith("srun"))
    assert "--no-kill" not in render()
