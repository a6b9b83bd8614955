"""Models whose module is that of transformers: the same losses as transformers, in every data-parallel layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.models import module_worker as worker
from lab.ranks import outputs
from lab.transformers_models import CONFIGS, SEQ_LEN, VOCABULARY, config_of, counted, model_of, written

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.module_tensors import MODULE, module_adapters, module_parameters, open_module
from trainspec_cli.engine.build.assemble import allocate, build_model, build_train_state, materialise
from trainspec_cli.engine.build.initial import load_initial, load_tensors
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models import transformers_module
from trainspec_cli.engine.models.lora import apply_lora
from trainspec_cli.engine.models.transformers_module import positions_in
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.shares import Share
from trainspec_cli.engine.tools.count_module import run
from trainspec_cli.planner.workload import adapter_params, count_params
from trainspec_cli.recipe.keys.model import TransformersModel
from trainspec_cli.recipe.keys.run import InitSpec
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.tools import ModuleRequest
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import FAMILIES

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
WORKER = Path(worker.__file__)
slow = pytest.mark.slow
KINDS = [pytest.param(kind, marks=() if kind == "opt" else slow) for kind in CONFIGS]


def filled(model: TransformersModel, lora: LoraSpec = LoraSpec(), seed: int = 0) -> Any:  # noqa: B008
    with torch.device("meta"):
        part = build_model(model, SEQ_LEN)
        apply_lora(part, lora)
    allocate(part, CPU, offload=False)
    materialise(part, [Share(name, one) for name, one in part.named_parameters()], CPU, seed)
    return part


def draw(generator: torch.Generator, samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(2, 16, (samples, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", KINDS)
def test_25_losses_are_those_of_a_loop_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = written(kind, tmp_path).eval()  # without dropout
    found = counted((tmp_path / "config.json").read_text(), tmp_path).model
    assert found is not None
    monkeypatch.setitem(FAMILIES, "module", found)
    plan = build_plan(Case("module"), "cpu")
    state = build_train_state(plan, CPU)
    load_tensors(tmp_path, open_module(tmp_path, found), found, state.shares)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    losses: list[list[float]] = [[], []]
    for _ in range(25):
        tokens, targets = draw(generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        outcome = train_step(state, [(tokens, targets)], global_tokens=tokens.numel(), clip_norm=None)
        assert outcome is not None
        losses[0].append(loss.item())
        losses[1].append(float(outcome.loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][-1] < losses[0][0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[list[float]]]]:
    """two_ranks(name): for each rank, the losses of both ranks together, and those of one process."""

    @cache
    def computed() -> list[dict[str, list[list[float]]]]:
        file = tmp_path_factory.mktemp("module") / "meeting"
        printed = outputs(WORKER, [(file, rank, 2, *worker.RUNS) for rank in range(2)])
        return [json.loads(text.splitlines()[-1]) for text in printed]

    return lambda name: [rank[name] for rank in computed()]


@slow
@pytest.mark.parametrize("name", worker.RUNS)
def test_two_ranks_train_as_one_process(two_ranks: Callable[[str], list[list[list[float]]]], name: str) -> None:
    for together, alone in two_ranks(name):
        assert together == pytest.approx(alone, rel=1e-6)
        assert together[-1] != together[0]


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_spread_as_those_of_transformers_and_depend_on_the_seed_alone(kind: str) -> None:
    module = filled(model_of(kind)).module
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**json.loads(config_of(kind)))
    theirs = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 and float(theirs[name].detach().std()) > 0:
            continue  # too few random values to compare their spread
        moments = [(float(one.mean()), float(one.std(correction=0))) for one in (parameter, theirs[name])]
        assert moments[0] == pytest.approx(moments[1], rel=0.35, abs=0.05), name
    for name, buffer in transformers.AutoModelForCausalLM.from_config(config).named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    again = filled(model_of(kind)).module
    other = filled(model_of(kind), seed=1).module
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(*pair) for pair in zip(module.parameters(), other.parameters(), strict=True))


APERTUS = {
    "model_type": "apertus",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The constructor of its activation computes two parameters and two buffers."""


def test_buffers_of_the_constructor_keep_their_values() -> None:
    model = counted(json.dumps(APERTUS)).model
    assert model is not None
    built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**APERTUS))
    buffers = dict(built.named_buffers())
    assert any(name.endswith("act_fn.beta") for name in buffers)
    found = dict(filled(model).module.named_buffers())
    assert found.keys() == buffers.keys()
    assert all(torch.equal(found[name], buffer) for name, buffer in buffers.items())


@pytest.mark.usefixtures("one_process")
def test_parameters_without_initial_values_must_be_loaded(tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**APERTUS)).eval()
    theirs.save_pretrained(tmp_path)
    model = counted((tmp_path / "config.json").read_text(), tmp_path).model
    assert model is not None
    part = filled(model)
    state = SimpleNamespace(shares=[Share(name, one) for name, one in part.named_parameters()], parts=[part])

    def load(init: InitSpec) -> None:
        load_initial(SimpleNamespace(spec=SimpleNamespace(init=init, model=model)), state)  # type: ignore[arg-type]

    with pytest.raises(RecipeError) as refused:
        load(InitSpec())
    assert [problem.path for problem in refused.value.problems] == ["init.from"]
    load(InitSpec(f"hf:{tmp_path}"))
    load(InitSpec())  # all parameters have values
    tokens, _ = draw(torch.Generator().manual_seed(0))
    assert torch.equal(part(tokens), theirs(tokens).logits)


def test_causality_is_not_tried_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    part = filled(model_of("opt"))
    asked: list[torch.device | None] = []
    monkeypatch.setattr(transformers_module, "has_values", lambda device=None: asked.append(device))
    monkeypatch.setattr(part, "_try", None)  # not callable
    part(*draw(torch.Generator().manual_seed(0)))
    assert asked == [CPU]


def test_positions_begin_anew_with_each_document() -> None:
    documents = torch.tensor([[4, 4, 4, 7, 7, 9], [1, 2, 2, 2, 2, 2]])
    assert positions_in(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


def test_packed_documents_have_the_losses_of_separate_ones() -> None:
    part = filled(model_of("gptj"))
    tokens, targets = draw(torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 12 + [1] * 20, [0] * 5 + [1] * 27])
    packed = part(tokens, targets, documents)
    separate = sum(
        part(tokens[row : row + 1, piece], targets[row : row + 1, piece])
        for row, cut in enumerate((12, 5))
        for piece in (slice(cut), slice(cut, None))
    )
    assert float(packed) == pytest.approx(float(separate), rel=1e-6)
    assert float(part(tokens, targets)) != pytest.approx(float(separate), rel=1e-4)


@pytest.mark.parametrize(
    "kind", ["bloom", pytest.param("opt", marks=slow), pytest.param("recurrent_gemma", marks=slow)]
)
def test_models_that_let_documents_see_each_other_refuse_packing(kind: str) -> None:
    part = filled(model_of(kind))
    tokens, targets = draw(torch.Generator().manual_seed(0))
    with pytest.raises(RecipeError) as refused:
        part(tokens, targets, torch.zeros_like(tokens))
    assert refused.value.problems[0].path == "data.document_masks"


def test_models_that_see_later_tokens_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    bert = counted(json.dumps({"model_type": "bert", "vocab_size": VOCABULARY, **sizes})).model
    assert bert is not None
    tokens, targets = draw(torch.Generator().manual_seed(0))
    with pytest.raises(RecipeError) as refused:
        filled(bert)(tokens, targets)
    assert [problem.path for problem in refused.value.problems] == ["init.from"]


def test_a_batch_without_samples_has_no_loss_and_zero_gradients() -> None:
    part = filled(model_of("opt"))
    empty = torch.zeros((0, SEQ_LEN), dtype=torch.int64)
    loss = part(empty, empty)
    loss.backward()
    assert float(loss) == 0.0
    assert not any(parameter.grad.any() for parameter in part.parameters())
    assert part(empty).shape == (0, SEQ_LEN, VOCABULARY)


def test_ignored_targets_do_not_count() -> None:
    part = filled(model_of("gptj"))
    tokens, targets = draw(torch.Generator().manual_seed(0), samples=1)
    whole = part(tokens, targets)
    halves = [targets.clone(), targets.clone()]
    halves[0][:, 8:] = IGNORED_TARGET
    halves[1][:, :8] = IGNORED_TARGET
    assert float(whole) == pytest.approx(sum(float(part(tokens, half)) for half in halves), rel=1e-6)


@pytest.mark.parametrize("targets", [("q_proj", "fc_out"), pytest.param(LoraSpec().targets, marks=slow)])
def test_adapters_are_on_the_named_linear_layers_of_the_blocks(targets: tuple[str, ...]) -> None:
    lora = LoraSpec(rank=2, targets=targets)
    model = model_of("gptj", lora)
    part = filled(model, lora)
    trained = {name for name, one in part.named_parameters() if one.requires_grad}
    adapted = sorted({name.split(".")[-2] for name in trained})
    assert adapted == sorted(
        ["q_proj", "fc_out"] if len(targets) == 2 else ["k_proj", "v_proj", "q_proj", "out_proj", "fc_in", "fc_out"]
    )
    assert len(trained) == 2 * 3 * len(adapted)
    assert sum(one.numel() for one in part.parameters() if one.requires_grad) == adapter_params(model, lora)
    tokens, _ = draw(torch.Generator().manual_seed(0))
    assert torch.equal(part(tokens), filled(model)(tokens))  # the second halves are zero at first


@pytest.mark.parametrize("magnitude", [False, True])
def test_linear_layers_of_one_name_and_several_shapes_keep_their_adapters(magnitude: bool) -> None:
    """Both `attn.c_proj` (32x32) and `mlp.c_proj` (32x128)."""
    lora = LoraSpec(rank=2, magnitude=magnitude)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = counted(json.dumps({"model_type": "gpt_bigcode", "vocab_size": VOCABULARY, **sizes}), lora=lora).model
    assert model is not None
    trained = {name: one.shape for name, one in filled(model, lora).named_parameters() if one.requires_grad}
    matrices = module_parameters(dict(filled(model).module.named_parameters()))
    exported = {half.name: half.shape for one in matrices for half in module_adapters(one, model, lora)}
    assert exported == trained
    assert adapter_params(model, lora) == sum(shape.numel() for shape in trained.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_and_written_to_the_byte(kind: str, tmp_path: Path) -> None:
    theirs = written(kind, tmp_path)
    model = counted((tmp_path / "config.json").read_text(), tmp_path).model
    assert model is not None
    assert count_params(model) == sum(one.numel() for one in theirs.parameters())
    part = filled(model)
    entries = open_module(tmp_path, model)
    load_tensors(tmp_path, entries, model, [Share(name, one) for name, one in part.named_parameters()])
    tensors = theirs.state_dict()
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, tensors[name.removeprefix(MODULE)]), name
    tokens, _ = draw(torch.Generator().manual_seed(0))
    assert torch.equal(part(tokens), theirs.eval()(tokens).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_name_for_tied_weights_is_loaded(kind: str) -> None:
    part, other = filled(model_of(kind)), filled(model_of(kind), seed=1)
    weights = {name: parameter.detach() for name, parameter in part.named_parameters()}
    other.load_state_dict(weights)
    tokens, _ = draw(torch.Generator().manual_seed(0))
    assert torch.equal(part(tokens), other(tokens))
    with pytest.raises(KeyError):
        other.load_state_dict(dict(list(weights.items())[1:]))


@pytest.mark.parametrize(("kind", "positions"), [("opt", 64), ("gptj", 64), ("bloom", 0), ("apertus", 0)])
def test_the_longest_sample_is_that_of_the_table_of_positions(kind: str, positions: int) -> None:
    found = counted(json.dumps(APERTUS) if kind == "apertus" else config_of(kind), seq_len=128).model
    assert found is not None
    assert found.learned_positions == positions
    assert found.traced_seq_len == (positions or 128)


def test_problems_of_folders_are_named(tmp_path: Path) -> None:
    written("opt", tmp_path / "opt")
    text = (tmp_path / "opt" / "config.json").read_text()
    config = json.loads(text)

    def problems(values: dict[str, Any]) -> list[tuple[str, str]]:
        found = counted(json.dumps(config | values), tmp_path / "opt")
        assert found.model is None
        return [(problem.code, problem.path) for problem in found.problems]

    assert problems({"model_type": "nosuch"}) == [("unsupported", "init.from")]
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    assert problems({"model_type": "nosuch", "auto_map": code}) == [("untrusted_code", "model.trust_remote_code")]
    assert problems({"ffn_dim": 48}) == [("bad_checkpoint", "init.from")]  # other shapes
    assert problems({"num_hidden_layers": 4}) == [("bad_checkpoint", "init.from")]  # missing tensors
    assert problems({"hidden_size": "wide"}) == [("unsupported", "init.from")]


def test_code_of_a_folder_runs_only_with_permission(tmp_path: Path) -> None:
    code = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class TinyConfig(PretrainedConfig):
    model_type = "tiny_of_the_folder"
    def __init__(self, vocab_size=256, width=16, **others):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**others)

class Tiny(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(config.width, config.width) for _ in range(2))
        self.head = torch.nn.Linear(config.width, config.vocab_size)
        self.register_buffer("strength", torch.tensor(0.5), persistent=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def get_output_embeddings(self):
        return self.head
    def forward(self, input_ids, use_cache=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x).relu() * self.strength
        return CausalLMOutput(logits=self.head(x))
"""
    (tmp_path / "code.py").write_text(code)
    config = {
        "model_type": "tiny_of_the_folder",
        "auto_map": {"AutoConfig": "code.TinyConfig", "AutoModelForCausalLM": "code.Tiny"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = counted(json.dumps(config), None)
    assert [problem.code for problem in refused.problems] == ["untrusted_code"]
    found = run(ModuleRequest(json.dumps(config), str(tmp_path), SEQ_LEN, "fp32", LoraSpec(), False, True))
    assert found.model is not None, found.problems
    assert [part.count for part in found.model.blocks] == [2]
    part = filled(found.model)
    assert float(part.module.strength) == 0.5
    tokens, targets = draw(torch.Generator().manual_seed(0))
    assert torch.isfinite(part(tokens, targets))
