"""A Hugging Face folder is fine-tuned on conversations, and goes back as a folder or as PEFT adapters."""

import json

import pytest
import torch

from trainspec_cli.data.huggingface.chat_template import CHATML
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

SHORT = (
    "recipe=finetune_chat",
    "data.path=talks.jsonl",
    "data.seq_len=64",
    "batching.global_batch_size=4",
    "train.max_steps=4",
    "optim.lr=1e-3",
    "optim.schedule.warmup_steps=0",
    "precision=fp32",
    "cluster=cpu",
    "--force",
)
LAYOUTS = {
    "one": ("cluster.devices_per_node=1",),
    "spread": ("cluster.devices_per_node=4", "layout.tp=2", "layout.pp=2"),
}


@pytest.fixture
def base(hf_folder, tmp_path):
    folder = hf_folder("llama")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with (tmp_path / "talks.jsonl").open("w") as file:
        for number in range(40):
            reply = {"role": "assistant", "content": f"number {number}"}
            file.write(json.dumps({"messages": [{"role": "user", "content": "which?"}, reply]}) + "\n")
    return folder


@pytest.fixture
def losses(trainspec, tmp_path, base):
    def train(run: str, *arguments: str) -> list[float]:
        ended = trainspec("launch", *SHORT, f"init.from=hf:{base}", f"run.dir={run}", *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [event["loss"] for event in read_events(RunDir(tmp_path / run).events(0)) if event["type"] == "step"]

    return train


@pytest.mark.slow
def test_adapters_are_the_same_in_any_layout_and_leave_in_both_forms(losses, trainspec, tmp_path, base):
    found = {name: losses(name, "lora.rank=4", *layout) for name, layout in LAYOUTS.items()}
    assert found["one"][-1] < found["one"][0]
    reported = json.loads(trainspec("report", "one", "--json").stdout)
    assert 0 < reported["adapter_params"] < reported["params"]
    for name in LAYOUTS:
        assert found[name] == pytest.approx(found["one"], rel=1e-5), name
    for form in ("hf", "peft"):
        ended = trainspec("export", "spread", "--format", form, "--output", form)
        assert ended.returncode == 0, ended.stderr
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    tokens = torch.arange(20)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        before = plain(tokens).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")(tokens).logits
        logits = merged(tokens).logits
    torch.testing.assert_close(adapted, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
    assert (logits - before).abs().max() > 1e-3
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == CHATML


@pytest.mark.slow
def test_the_whole_model_is_fine_tuned(losses, tmp_path):
    whole = losses("whole", "cluster.devices_per_node=2", "layout=fsdp")
    assert whole[-1] < whole[0]
    assert (tmp_path / "whole/huggingface/tokenizer_config.json").is_file()
