"""The other files of an exported run, and the choice of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.keys.model import TracedPart, TransformersModel
from trainspec_cli.recipe.keys.run import DataSpec, InitSpec, TokenizerSpec
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import ExportRequest
from trainspec_cli.run import exporting
from trainspec_cli.run.exporting import Export, find_checkpoint, how_to_load, write_adapters, write_folder
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.tools import EXPORT

Make = Callable[..., RunDir]


@pytest.fixture
def make(tmp_path: Path, make_plan: Callable[..., Plan]) -> Make:
    """make(data_dir=None, lora=...): -> a run with checkpoints of steps 4 and 12."""

    def make(data_dir: Path | None = None, **changes: Any) -> RunDir:
        run, plan = RunDir(tmp_path / "run"), make_plan()
        write_json(run.plan_json, to_plain(replace(plan, spec=replace(plan.spec, **changes))))
        data = str(data_dir) if data_dir else None
        write_json(run.run_json, {"recipe": "tiny", "created_at": 1.0, "data_dir": data})
        for step in (4, 12):
            run.checkpoint(step).mkdir(parents=True, exist_ok=True)
        return run

    return make


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[ExportRequest]:
    """The requests to the engine."""
    requests: list[ExportRequest] = []

    def run_tool(tool: Any, request: ExportRequest) -> None:
        assert tool is EXPORT
        assert Path(request.output).is_dir()
        requests.append(request)

    monkeypatch.setattr(exporting, "run_tool", run_tool)
    return requests


def test_the_newest_checkpoint_is_exported_unless_another_is_asked_for(make: Make) -> None:
    run = make()
    assert (find_checkpoint(run, None), find_checkpoint(run, 4)) == (12, 4)
    with raises(RecipeError, "no_checkpoint", "step 5", path="--step") as caught:
        find_checkpoint(run, 5)
    assert caught.value.problems[0].hint == "4, 12"
    with raises(RecipeError, "no_checkpoint", path=""):
        find_checkpoint(RunDir(run.root / "nothing"), None)


def test_the_best_checkpoint_is_that_of_the_lowest_heldout_loss(make: Make) -> None:
    run = make()
    with raises(RecipeError, "no_checkpoint", path="--best"):
        find_checkpoint(run, None, best=True)
    journal = EventWriter(run.events(0), 0)
    for step, loss in ((4, 1.5), (8, 1.0), (12, 1.2), (4, 1.1)):
        journal.write(EvalEvent(step=step, heldout_loss=loss, heldout_bits_per_byte=None))
    journal.close()
    assert find_checkpoint(run, None, best=True) == 4, "step 8 has no checkpoint, and step 4 was made again"
    with raises(RecipeError, "usage", "--step", path="--best"):
        find_checkpoint(run, 4, best=True)


@pytest.mark.parametrize(("dtype", "tensors", "config"), [("bf16", "BF16", "bfloat16"), ("fp32", "F32", "float32")])
def test_the_engine_is_asked_for_the_checkpoint_in_its_precision(
    make: Make, requests: list[ExportRequest], tmp_path: Path, dtype: Any, tensors: str, config: str
) -> None:
    run = make()
    kind = write_folder(Export(run, 4, dtype, max_file_bytes=1000), tmp_path / "out")
    written = read_json(tmp_path / "out" / "config.json")
    assert kind == written["model_type"]
    assert config in (written.get("torch_dtype"), written.get("dtype"))
    (request,) = requests
    assert (request.dtype, request.max_file_bytes, request.what) == (tensors, 1000, "merged")
    assert request.checkpoint == str(run.checkpoint(4).absolute())
    assert request.plan_json == str(run.plan_json.absolute())
    assert read_json(tmp_path / "out" / "generation_config.json") == {
        key: written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in written
    }


def test_what_the_run_began_with_is_kept(make: Make, requests: list[ExportRequest], tmp_path: Path) -> None:
    run = make()
    began = {"bos_token_id": 7, "eos_token_id": [8, 9], "max_position_embeddings": 4096, "hidden_size": 1}
    write_json(run.huggingface / "config.json", began)
    write_json(run.huggingface / "tokenizer.json", {"kept": True})
    write_folder(Export(run, 4), tmp_path / "out")
    written = read_json(tmp_path / "out" / "config.json")
    assert {key: written[key] for key in began} == {**began, "hidden_size": 64}
    assert read_json(tmp_path / "out" / "tokenizer.json") == {"kept": True}
    assert read_json(tmp_path / "out" / "generation_config.json") == {"bos_token_id": 7, "eos_token_id": [8, 9]}


def test_the_datas_own_tokenizer_goes_with_the_weights(
    make: Make, requests: list[ExportRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text("some words of a text " * 9)
    data = prepare(DataSpec(8, "text", str(tmp_path / "texts"), tokenizer=TokenizerSpec(vocab_size=300)))
    write_folder(Export(make(data), 12), tmp_path / "out")
    out = tmp_path / "out"
    end = Collection.open(data).main.manifest.end_of_document_id
    settings = read_json(out / "tokenizer_config.json")
    words = {
        token["id"]: token["content"] for token in json.loads((out / "tokenizer.json").read_text())["added_tokens"]
    }
    assert (settings["eos_token"], settings["model_max_length"]) == (words[end], 8)
    assert read_json(out / "config.json")["eos_token_id"] == end
    assert read_json(out / "generation_config.json")["eos_token_id"] == end


def test_adapters_go_alone_and_whole_weights_have_none(
    make: Make, requests: list[ExportRequest], tmp_path: Path
) -> None:
    with raises(RecipeError, "unsupported", "adapters", path="--format"):
        write_adapters(Export(make(), 4), tmp_path / "out")
    run = make(lora=LoraSpec(rank=4), init=InitSpec(f"hf:{tmp_path / 'base'}"))
    assert write_adapters(Export(run, 4), tmp_path / "out") == "LoRA adapters"
    (request,) = requests
    assert request.what == "adapters"
    written = read_json(tmp_path / "out" / "adapter_config.json")
    assert (written["r"], written["base_model_name_or_path"]) == (4, str(tmp_path / "base"))


@pytest.mark.parametrize(("revision", "named"), [("", True), ("@v2", False)])
def test_adapters_of_a_checkpoint_of_the_hub_name_it(
    make: Make,
    requests: list[ExportRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    revision: str,
    named: bool,
) -> None:
    """PEFT knows no revision by a name: then it is the folder on this machine."""
    cached = tmp_path / "hub/models--some-org--tiny"
    for ref, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / ref).write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    run = make(lora=LoraSpec(rank=4), init=InitSpec(f"hf:some-org/tiny{revision}"))
    write_adapters(Export(run, 4), tmp_path / "out")
    base = read_json(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"]
    assert base == ("some-org/tiny" if named else str(cached / "snapshots" / ("b" * 40)))


def test_adapters_of_a_run_without_a_folder_have_their_base_beside_them(
    make: Make, requests: list[ExportRequest], tmp_path: Path
) -> None:
    write_adapters(Export(make(lora=LoraSpec(rank=4), init=InitSpec("another/run")), 4), tmp_path / "out")
    assert sorted(request.what for request in requests) == ["adapters", "base"]
    base = tmp_path / "out" / "base"
    assert read_json(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"] == str(base)
    assert read_json(base / "config.json")["hidden_size"] == 64
    assert not (tmp_path / "out" / "config.json").exists(), "transformers would take the folder for a whole model"


def test_adapters_beside_four_bits_have_a_card_that_says_so(
    make: Make, requests: list[ExportRequest], tmp_path: Path
) -> None:
    lora = LoraSpec(rank=4, base="nf4")
    write_adapters(Export(make(lora=lora, init=InitSpec(f"hf:{tmp_path / 'base'}")), 4), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'base_model: "{tmp_path / "base"}"' in card and 'bnb_4bit_quant_type="nf4"' in card
    write_adapters(Export(make(lora=lora, init=InitSpec("another/run")), 4), tmp_path / "beside")
    card = (tmp_path / "beside" / "README.md").read_text()
    assert str(tmp_path / "beside" / "base") in card and "dequantised" in card


@pytest.mark.parametrize("trusted", [True, False])
def test_code_that_computes_the_model_goes_with_it(
    make: Make, requests: list[ExportRequest], tmp_path: Path, trusted: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("modeling.py", "configuration.py", "notes.txt"):
        (folder / name).write_text(name)
    part = TracedPart(("4x4",))
    config = json.dumps({"model_type": "some", "auto_map": {"AutoModelForCausalLM": "modeling.Some"}})
    sizes = {"num_layers": 1, "hidden_size": 8, "vocab_size": 16, "traced_seq_len": 8, "traced_width": 4}
    names = {"block_list": "layers", "prefix": "", "folder": str(folder)}
    model = TransformersModel(config, **sizes, **names, blocks=(part,), outside=part, trust_remote_code=trusted)
    run = make(model=model, lora=LoraSpec(rank=2), init=InitSpec("another/run"))
    write_folder(Export(run, 4), tmp_path / "whole")
    write_adapters(Export(run, 4), tmp_path / "adapters")
    for out in (tmp_path / "whole", tmp_path / "adapters" / "base"):
        code = {file.name: file.read_text() for file in out.glob("*.py")}
        assert code == ({name: name for name in ("modeling.py", "configuration.py")} if trusted else {})
        assert ("auto_map" in read_json(out / "config.json")) == trusted
        assert not (out / "notes.txt").exists()
    for out in ("whole", "adapters"):
        assert ("trust_remote_code=True" in how_to_load(tmp_path / out)[0]) == trusted


ROLES = ("user", "assistant")
CHAT = DataSpec(64, "chat", "chat.jsonl", chat_template="chatml", tokenizer=TokenizerSpec(vocab_size=300))


def test_a_chat_model_has_its_template_and_ends_with_a_message(
    make: Make, requests: list[ExportRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    said = {"messages": [{"role": role, "content": "some words " * 9} for role in ROLES]}
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(said)}\n" * 10)
    spec = replace(CHAT, path=str(tmp_path / "chat.jsonl"))
    data = prepare(spec)
    write_folder(Export(make(data, data=spec), 12), tmp_path / "out")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    question = [{"role": "user", "content": "hot?"}]
    shown = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>user\nhot?<|im_end|>\n<|im_start|>assistant\n"
    end = Collection.open(data).main.manifest.end_of_document_id
    message_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenizer.eos_token, message_end == end) == ("<|im_end|>", False)
    assert read_json(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [message_end, end]


def test_the_template_that_the_run_kept_is_exported(make: Make, requests: list[ExportRequest], tmp_path: Path) -> None:
    run = make(data=replace(CHAT, chat_template="gone.jinja"))
    run.huggingface.mkdir()
    (run.huggingface / "chat_template.jinja").write_text("{{ messages }}")
    write_folder(Export(run, 4), tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    write_folder(Export(make(data=replace(CHAT, source="text")), 4), tmp_path / "plain")
