"""The same recipe under every data-parallel layout: the same losses, and where arithmetic allows the same bits."""

import pytest

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

STEPS = 8


@pytest.fixture
def losses(trainspec, tmp_path):
    def train(run: str, processes: int, *overrides: str, precision: str = "fp32") -> list[float]:
        ended = trainspec(
            "launch",
            "recipe=tiny",
            f"run.dir={run}",
            f"train.max_steps={STEPS}",
            f"precision={precision}",
            f"cluster.devices_per_node={processes}",
            *overrides,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [event["loss"] for event in read_events(RunDir(tmp_path / run).events(0)) if event["type"] == "step"]

    return train


@pytest.mark.slow
def test_every_layout_trains_the_same_model(losses, read_result):
    alone = losses("alone", 1)
    assert len(alone) == STEPS
    assert alone[-1] < alone[0]
    layouts = {
        "accumulated": (1, "batching.micro_batch_size=2"),
        "ddp": (2, "layout=ddp"),
        "zero3": (2, "layout=fsdp"),
        "zero2": (2, "layout=fsdp", "layout.zero_stage=2", "batching.micro_batch_size=2"),
        "hsdp": (4, "layout.dp_replicate=2", "layout.dp_shard=2"),
    }
    for name, (processes, *overrides) in layouts.items():
        assert losses(name, processes, *overrides) == pytest.approx(alone, rel=2e-6), name
    digests = {name: read_result(name)["weights_sha256"] for name in ("ddp", "zero3")}
    assert digests["ddp"] == digests["zero3"], "two ranks sum two numbers: the order cannot matter"
    assert read_result("alone")["heldout_bits_per_byte"] == pytest.approx(
        read_result("hsdp")["heldout_bits_per_byte"], rel=1e-5
    )


@pytest.mark.slow
def test_compiled_blocks_and_bf16_train_the_same_model(losses):
    eager = losses("eager", 2)
    assert losses("compiled", 2, "compile=true") == pytest.approx(eager, rel=1e-5)
    assert losses("bf16", 2, precision="bf16") == pytest.approx(eager, rel=0.01)
