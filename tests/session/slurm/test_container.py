"""What a job's container must see: the data that its workers read, the weights they begin with, the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.run import InitSpec
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.recipe.load import Loaded, load, plan_on
from trainspec_cli.session.slurm.container import check_container, folders_read

IMAGE = ("cluster.slurm.container_runtime=apptainer", "cluster.slurm.container_image=/images/torch.sif")
TWO = ("recipe=tiny", "cluster.device=cpu", "cluster.num_nodes=2", "cluster.devices_per_node=1")


def test_the_script_mounts_what_the_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids of another program stay in its file, and the folder that describes them is in the cache."""
    work, data, cache = tmp_path / "work", tmp_path / "data", tmp_path / "cache"
    for folder in (work, data):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(cache))
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 10_000
    for name in ("train_000.bin", "val_000.bin"):
        (data / name).write_bytes(header.tobytes() + np.arange(10_000, dtype=np.uint16).tobytes())
    arguments = ("data=nanogpt", f"data.path={data}/*.bin", "model.vocab_size=50304", "run.dir=../run")
    assert run(["sbatch", *TWO, *IMAGE, *arguments]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    for folder in (work, tmp_path / "run", data, cache):
        assert f"--bind {folder}:{folder} " in said.out
    assert "container_image is /images/torch.sif" in said.err
    assert RunDir(tmp_path / "run").job_sbatch.read_text() == said.out


@pytest.fixture
def planned(here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loaded]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: load([*TWO, *IMAGE, *arguments])


def test_weights_are_seen_with_what_their_links_lead_to(planned, here, tmp_path: Path) -> None:
    plan = plan_on(planned(), here)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0" / "config.json"
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    for init, expected in (
        (f"hf:{snapshot.parent}", tmp_path / "models--org--name"),
        (f"hf:{tmp_path}/plain", tmp_path / "plain"),
        ("runs/before", tmp_path / "runs/before"),
    ):
        _, folder = folders_read(replace(plan, spec=replace(plan.spec, init=InitSpec(init))), None)
        assert folder == expected


def test_kernels_are_not_measured_outside_the_container(planned, here) -> None:
    with pytest.raises(RecipeError, match="outside the container") as refused:
        check_container(plan_on(planned("kernels=auto"), here))
    assert refused.value.problems[0].hint == "set kernels=default"
