"""Convolutional networks as whole runs: one process trains as two do, resume gives the same bits, recipes learn."""

from __future__ import annotations

import numpy as np
import pytest

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

STEPS = 6


@pytest.fixture
def losses(trainspec, tmp_path):
    def train(run: str, recipe: str, processes: int, *overrides: str, command: str = "launch") -> list[float]:
        where = [f"recipe={recipe}", f"run.dir={run}", f"cluster.devices_per_node={processes}", "precision=fp32"]
        steps = [] if any("max_steps" in text for text in overrides) else [f"train.max_steps={STEPS}"]
        ended = trainspec(command, *(where if command == "launch" else [run]), *steps, *overrides)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [event["loss"] for event in read_events(RunDir(tmp_path / run).events(0)) if event["type"] == "step"]

    return train


@pytest.mark.slow
def test_batch_norm_over_two_processes_trains_as_one(losses, read_result):
    alone = losses("alone", "tiny_resnet", 1)
    assert alone[-1] < alone[0]
    layouts = {"ddp": ["layout=ddp"], "zero3": ["layout=fsdp", "recompute=full"]}
    for name, overrides in layouts.items():
        assert losses(name, "tiny_resnet", 2, *overrides) == pytest.approx(alone, rel=2e-5), name
    judged = {name: read_result(name) for name in ("alone", *layouts)}
    assert judged["zero3"]["weights_sha256"] == judged["ddp"]["weights_sha256"]
    for result in judged.values():
        assert result["heldout_loss"] == pytest.approx(judged["alone"]["heldout_loss"], rel=1e-3), "running statistics"


@pytest.mark.slow
def test_a_unet_over_two_processes_trains_as_one(losses, read_result):
    alone = losses("alone", "tiny_unet3d", 1, "batching.micro_batch_size=2")
    assert alone[-1] < alone[0]
    sharded = losses("zero3", "tiny_unet3d", 2, "layout=fsdp", "recompute=full", "batching.micro_batch_size=2")
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert read_result("zero3")["heldout_dice"] == pytest.approx(read_result("alone")["heldout_dice"], abs=1e-3)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_bits(losses, read_result):
    """The running statistics are part of the checkpoint."""
    constant = "optim.schedule.kind=constant"
    through = losses("through", "tiny_resnet", 2, constant)
    first = losses("cut", "tiny_resnet", 2, constant, "train.max_steps=3")
    assert first == through[:3]
    assert losses("cut", "tiny_resnet", 2, f"train.max_steps={STEPS}", command="resume") == through
    for key in ("weights_sha256", "heldout_loss", "heldout_accuracy"):
        assert read_result("cut")[key] == read_result("through")[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "metric", "least"),
    [("tiny_resnet", "accuracy", 0.7), ("tiny_unet3d", "dice", 0.8)],
)
def test_recipes_learn(trainspec, read_result, recipe, metric, least):
    """Four classes by chance: 0.25."""
    ended = trainspec("launch", f"recipe={recipe}", "run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_result("run")[f"heldout_{metric}"] > least
    assert "samples/s" in ended.stdout and "tokens" not in ended.stdout


@pytest.mark.slow
def test_volumes_of_ones_own_are_read(trainspec, tmp_path, read_result):
    for kind in ("images", "labels"):
        (tmp_path / "scans" / kind).mkdir(parents=True)
    for number in range(6):
        label = np.random.default_rng(number).integers(3, size=(18, 16, 20))
        np.save(tmp_path / "scans" / "images" / f"{number}.npy", label.astype(np.float32))
        np.save(tmp_path / "scans" / "labels" / f"{number}.npy", label.astype(np.uint8))
    arguments = ["recipe=tiny_unet3d", "data=volumes", "data.path=scans", "run.dir=run", "train.max_steps=4"]
    ended = trainspec("launch", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_result("run")["heldout_dice"] is not None
    (tmp_path / "scans" / "labels" / "4.npy").unlink()
    ended = trainspec("launch", *arguments[:3], "run.dir=other")
    assert ended.returncode == 2
    assert "images/4.npy" in ended.stderr and "labels/" in ended.stderr
