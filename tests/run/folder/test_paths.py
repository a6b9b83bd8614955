"""Where a run's files lie: other programs, and other versions, look for them there."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.run.folder.paths import RunDir

RUN = RunDir("run")


@pytest.mark.clause("RUN-1")
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (RUN.composed_yaml, "composed.yaml"),
        (RUN.run_json, "run.json"),
        (RUN.plan_json, "plan.json"),
        (RUN.directives, "directives.jsonl"),
        (RUN.kernels_json, "kernels.json"),
        (RUN.versions_json, "versions.json"),
        (RUN.command_txt, "command.txt"),
        (RUN.pid_json, "pid.json"),
        (RUN.result_json, "result.json"),
        (RUN.job_sbatch, "job.sbatch"),
        (RUN.slurm_json, "slurm.json"),
        (RUN.logs, "logs"),
        (RUN.huggingface, "huggingface"),
        (RUN.faults_folder, "faults"),
        (RUN.events_folder, "events"),
        (RUN.events(3), "events/rank00003.jsonl"),
        (RUN.group_events(1, 2), "events/group00001/rank00002.jsonl"),
        (RUN.supervisor_events, "events/supervisor.jsonl"),
        (RUN.errors_folder, "errors"),
        (RUN.error(3), "errors/rank00003.json"),
        (RUN.node_error(1), "errors/node00001.json"),
        (RUN.generations, "generations"),
        (RUN.generation(3), "generations/00000003.json"),
        (RUN.secret(3), "secrets/00000003"),
        (RUN.stop(3), "stops/00000003.json"),
        (RUN.checkpoints, "checkpoints"),
        (RUN.checkpoint(20), "checkpoints/step_00000020"),
        (RUN.manifest(20), "checkpoints/step_00000020/manifest.json"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_file_has_its_place(path: Path, name: str) -> None:
    assert path == Path("run") / name


def test_the_newest_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.newest_step == 0
    for step in (20, 100_000_000, 3):
        run.checkpoint(step).mkdir(parents=True)
    assert run.checkpoint_steps() == [3, 20, 100_000_000]
    assert run.newest_step == 100_000_000
