"""Weights from Hugging Face folders: the models that transformers itself makes and reads are the judge."""

import json
from types import SimpleNamespace

import pytest
import torch

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.huggingface.config import read_model, write_config
from trainspec_cli.data.huggingface.folder import open_weights
from trainspec_cli.data.huggingface.safetensors import parameters
from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.build.initial import load_initial, load_tensors
from trainspec_cli.engine.shares import Cut, Share
from trainspec_cli.engine.tools.export import export
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import InitSpec
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.results.tools import ExportRequest

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_process")

FAMILIES = ["llama", "llama_biased", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]


def model_of(folder) -> DecoderModel:
    model, problems = build(DecoderModel, read_model(json.loads((folder / "config.json").read_text()), "config.json"))
    assert problems == []
    return model


def load_folder(folder, model, shares):
    load_tensors(folder, open_weights(folder, model), model, shares)


def loaded(folder, model):
    """Load a folder as at the start of a run."""
    ours = build_model(model, 24)
    ours.init_buffers()
    shares = [Share(name, parameter) for name, parameter in ours.named_parameters()]
    state = SimpleNamespace(shares=shares, parts=[ours])
    load_initial(SimpleNamespace(spec=SimpleNamespace(init=InitSpec(f"hf:{folder}"), model=model)), state)
    return ours


def logits_of_theirs(folder, tokens):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return theirs(tokens).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_in_both_directions(name, hf_folder, tmp_path, monkeypatch):
    folder = hf_folder(name)
    model = model_of(folder)
    ours = loaded(folder, model)
    tokens = torch.randint(0, model.vocab_size, (2, 21))
    with torch.no_grad():
        logits = ours(tokens)
    scale = float(logits.abs().max())
    torch.testing.assert_close(logits, logits_of_theirs(folder, tokens), rtol=0, atol=1e-5 * scale)

    back = tmp_path / "back"
    back.mkdir()
    (back / "config.json").write_text(json.dumps(write_config(model, 128, "float32")))
    state = dict(ours.named_parameters())
    monkeypatch.setattr(
        "trainspec_cli.engine.tools.export.read", lambda _plan, _folder, held: {p.name: state[p.name] for p in held}
    )
    export_model(model, back, max_file_bytes=20_000)
    assert len(list(back.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits_of_theirs(back, tokens), logits, rtol=0, atol=1e-5 * scale)


def export_model(model, folder, max_file_bytes):
    class PlanOf:
        class spec:  # noqa: N801
            pass

    PlanOf.spec.model = model
    export(PlanOf, ExportRequest("", "", str(folder), "F32", max_file_bytes))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_names_the_models_own_parameters(name, hf_folder):
    model = model_of(hf_folder(name))
    with torch.device("meta"):
        ours = {name: tuple(parameter.shape) for name, parameter in build_model(model, 24).named_parameters()}
    assert {parameter.name: parameter.shape for parameter in parameters(model)} == ours


@pytest.mark.parametrize(("dim", "count"), [(0, 3), (1, 2), (2, 5)])
def test_a_rank_reads_its_own_part(dim, count, hf_folder):
    """Experts' matrices are put together of many tensors, and cut again elsewhere."""
    folder = hf_folder("mixtral", max_shard_size="20KB")
    model = model_of(folder)
    whole = loaded(folder, model).blocks["0"].ffn.experts.up
    for index in range(count):
        cut = Cut(dim, whole.shape[dim], index, count, group=None)
        part = torch.nn.Parameter(torch.full_like(whole.narrow(dim, cut.start, cut.size), torch.nan))
        load_folder(folder, model, [Share("blocks.0.ffn.experts.up", part, cut)])
        assert torch.equal(part, whole.narrow(dim, cut.start, cut.size))


def test_bf16_files_are_read(hf_folder):
    folder = hf_folder("qwen3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs.save_pretrained(folder)
    ours = loaded(folder, model_of(folder))
    assert torch.equal(ours.embed.weight, theirs.model.embed_tokens.weight.float())


def test_tensors_that_are_not_the_models_are_named(hf_folder):
    folder = hf_folder("llama")
    tensors = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.7.surplus"] = torch.zeros(2)
    del tensors["model.norm.weight"]
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RecipeError) as raised:
        loaded(folder, model_of(folder))
    lacks, surplus, shapes = [problem.message for problem in raised.value.problems]
    assert lacks.endswith(" model.norm.weight") and surplus.endswith(" model.layers.7.surplus")
    assert "model.layers.0.mlp.up_proj.weight is 3 x 4 " in shapes and shapes.endswith(" 48 x 32")


def plant(folder, name, *values):
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[: len(values)] = torch.tensor(values, dtype=tensors[name].dtype)
    save_file(tensors, file)


@pytest.mark.parametrize("values", [(torch.nan,), (1.0, torch.inf, -torch.inf)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name_and_number(values, dtype, hf_folder):
    folder = hf_folder("qwen3")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    plant(folder, "model.norm.weight", *values)
    with pytest.raises(MachineError) as raised:
        loaded(folder, model_of(folder))
    count = sum(not torch.tensor(value).isfinite() for value in values)
    (problem,) = raised.value.problems
    assert problem.message.endswith(f": {count} of 32 in model.norm.weight (model.safetensors)")
    assert (problem.code, problem.path) == ("bad_checkpoint", "init.from")


def test_a_rank_looks_at_its_own_part_and_counts_the_whole(hf_folder):
    folder = hf_folder("mixtral")
    model = model_of(folder)
    plant(folder, "model.layers.0.block_sparse_moe.experts.1.w3.weight", torch.nan, torch.nan)
    full = (4, 32, 96)
    for index in range(4):
        cut = Cut(0, 4, index, 4, group=None)
        share = Share("blocks.0.ffn.experts.up", torch.nn.Parameter(torch.zeros(1, *full[1:])), cut)
        if index == 1:
            with pytest.raises(MachineError, match=r": 2 of 1,536 in model\.layers\.0\.\S*experts\.1\.w3\.weight \("):
                load_folder(folder, model, [share])
        else:
            load_folder(folder, model, [share])


def test_what_no_weight_can_hold_is_not_finite_either(hf_folder):
    folder = hf_folder("qwen3")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).save_pretrained(folder)
    plant(folder, "model.norm.weight", 1e300)
    with pytest.raises(MachineError, match=r"1 of 32 in model\.norm"):
        loaded(folder, model_of(folder))
