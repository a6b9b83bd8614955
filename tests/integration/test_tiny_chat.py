"""The recipe that shows what fine-tuning is: a chat model learns to reply, then adapters go on from it."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir


@pytest.mark.slow
def test_it_learns_to_reply_and_adapters_go_on_from_it(trainspec, read_result, tmp_path):
    launch = ("launch", "recipe=tiny_chat", "cluster.devices_per_node=1")
    ended = trainspec(*launch, "run.dir=whole")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The opposite of hot is cold." in ended.stdout
    adapted = ("run.dir=adapted", "init.from=whole", "lora.rank=4", "optim.lr=1e-4", "train.max_steps=5")
    ended = trainspec(*launch, *adapted)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = {
        run: [event["loss"] for event in read_events(RunDir(tmp_path / run).events(0)) if event["type"] == "step"]
        for run in ("whole", "adapted")
    }
    assert losses["whole"][-1] < 0.2 * losses["whole"][0]
    assert losses["adapted"][0] < 0.2 * losses["whole"][0], "it begins with what was learnt"


@pytest.mark.slow
def test_adapters_beside_four_bits_go_on_to_the_bit_and_leave_for_peft(trainspec, read_result, tmp_path):
    """What PEFT adds to the dequantised base is what the merged export holds."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    launch = ("launch", "recipe=tiny_chat", "cluster.devices_per_node=2", "train.max_steps=6")
    quantised = ("init.from=whole", "lora.rank=4", "lora.base=nf4", "checkpoint.interval_steps=2")
    runs = {
        "whole": (),
        "beside": ("init.from=whole", "lora.rank=4"),
        "nf4": quantised,
        "killed": (*quantised, "fault='kill(rank=1,step=5)'"),
    }
    for run, arguments in runs.items():
        ended = trainspec(*launch, f"run.dir={run}", *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {run: read_result(run) for run in runs}
    assert found["killed"]["weights_sha256"] == found["nf4"]["weights_sha256"]
    sizes = {
        run: sum(file.stat().st_size for file in RunDir(tmp_path / run).checkpoint(6).glob("*.safetensors"))
        for run in ("beside", "nf4")
    }
    assert sizes["nf4"] < 0.75 * sizes["beside"], "embedding and head, which stay in full, are most of it"
    for form in ("hf", "peft"):
        ended = trainspec("export", "nf4", "--format", form, "--output", form)
        assert ended.returncode == 0, ended.stderr
    tokens = torch.arange(20)[None]
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        merged = load(tmp_path / "hf")(tokens).logits
        adapted = peft.PeftModel.from_pretrained(load(tmp_path / "peft" / "base"), tmp_path / "peft")(tokens).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5 * float(merged.abs().max()))
    refused = trainspec(*launch, "run.dir=other", "init.from=nf4", "lora.rank=4")
    assert refused.returncode == 2 and "LoRA adapters" in refused.stderr
