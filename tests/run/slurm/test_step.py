"""Slurm's environment as srun, a batch script and `salloc` leave it to a command."""

from __future__ import annotations

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.run.slurm.commands import Step, idle_nodes, read_step

OF_JOB = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
"""What a batch script has too."""
OF_TASK = OF_JOB | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
}


def test_a_task_of_srun_knows_its_node() -> None:
    assert read_step(OF_TASK) == Step("41", 3, node=1, num_nodes=2)
    assert read_step(OF_TASK | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Step(
        "41", 3, node=0, num_nodes=1
    )
    assert idle_nodes(OF_TASK) == 0


@pytest.mark.parametrize("more", [{}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_and_the_shell_of_salloc_are_no_tasks(more: dict[str, str]) -> None:
    assert read_step(OF_JOB | more) is None
    assert idle_nodes(OF_JOB | more) == 1


def test_without_slurm_there_is_no_job() -> None:
    assert read_step({}) is None
    assert idle_nodes({}) == 0


@pytest.mark.parametrize(
    ("tasks", "nodes", "said"), [("16", "2", "16 times on 2 nodes"), ("8", "1", "8 times on 1 node")]
)
def test_several_tasks_on_a_node_are_refused(tasks: str, nodes: str, said: str) -> None:
    with pytest.raises(RecipeError, match=f"srun has started this command {said}") as raised:
        read_step(OF_TASK | {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NUM_NODES": nodes})
    assert "srun --ntasks-per-node=1 trainspec run" in raised.value.problems[0].hint
