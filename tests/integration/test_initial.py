"""Weights come from elsewhere and go back there, whatever the layout between."""

import pytest
from safetensors import safe_open

STILL = ("recipe=tiny", "model=auto", "train.max_steps=1", "optim.lr=1e-30", "precision=fp32", "data.max_bytes=100000")
"""A step that is too small to change a weight."""
LAYOUTS = {
    "mixtral": ("cluster.devices_per_node=4", "layout.dp_shard=2", "layout.tp=2", "layout.ep=2"),
    "qwen3": ("cluster.devices_per_node=2", "layout.pp=2"),
}


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - it is no dict
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_pass_through_any_layout_unchanged(name, trainspec, hf_folder, tmp_path):
    folder = hf_folder(name, max_shard_size="40KB")
    for begins_with, run in ((f"hf:{folder}", "first"), ("first", "second")):
        layout = LAYOUTS[name] if run == "first" else ("cluster.devices_per_node=1",)
        ended = trainspec("launch", *STILL, *layout, f"init.from={begins_with}", f"run.dir={run}", "--force")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    ended = trainspec("export", "second", "--output", "back", "--max-file-gb", "0.00003")
    assert ended.returncode == 0, ended.stderr
    before, after = tensors_of(folder), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_an_exported_run_is_loaded_with_no_code_of_ours(trainspec, tmp_path):
    transformers = pytest.importorskip("transformers")
    ended = trainspec("launch", "recipe=tiny_qwen3", "train.max_steps=2", "run.dir=run", "cluster.devices_per_node=1")
    assert ended.returncode == 0, ended.stderr
    assert trainspec("export", "run", "--format", "hf", "--output", "out").returncode == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = tokenizer("def main():", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("def main():")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
