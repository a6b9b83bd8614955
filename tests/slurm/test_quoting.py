"""Text with blanks, quotation marks and signs reaches a real Slurm as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.cluster import Cluster

ODD = 'it\'s "odd" #1 100%j $(touch MARKER) `touch MARKER` ünï'
NAME = ODD + " \\ --comment=injected Restarts=9 UserId=1"


@pytest.mark.slow
def test_odd_names_are_names_alone(slurm: Cluster, sbatch, watch, tmp_path: Path, read_result) -> None:
    folder, name = (text.replace("'", "\\'") for text in (f"runs/{ODD}", NAME))
    job = sbatch(f"run.dir='{folder}'", f"cluster.slurm.job_name='{name}'")
    shown = slurm.run("scontrol", "show", "job", job)
    assert f"JobName={NAME}\n" in shown
    assert "Comment=" not in shown.replace(NAME, "")
    ended = slurm.wait(job)
    run = tmp_path / "runs" / ODD
    assert [log.name for log in (run / "logs").glob("slurm-*")] == [f"slurm-{job}.log"]
    assert ended["ExitCode"] == "0:0", watch.log(run)
    assert read_result(f"runs/{ODD}")["status"] == "done"
    assert not list(tmp_path.rglob("MARKER"))
