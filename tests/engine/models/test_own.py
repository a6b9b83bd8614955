"""User-defined blocks in a language model: their constructors, their first values, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.own_model import BLOCK_PARAMS, HIDDEN, OWN

from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.engine.build.assemble import allocate, build_model, materialise, modules_with
from trainspec_cli.engine.models.own import OwnLanguageModel
from trainspec_cli.engine.parallel.pipeline import WeightQueue
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.model import OwnModel

CPU = torch.device("cpu")
BLOCK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, hidden_size, layer):
        super().__init__()
        self.mix = nn.Linear(hidden_size, hidden_size)
        MADE

    def forward(self, x):
        FORWARD
        return x + self.mix(x)
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., OwnModel]:
    """own(made, forward): a model of blocks with such a line in the constructor, and in the forward."""

    def write(made: str = "pass", forward: str = "pass", params: int = 20) -> OwnModel:
        file = tmp_path / f"block{len(list(tmp_path.iterdir()))}.py"
        file.write_text(BLOCK.replace("MADE", made).replace("FORWARD", forward))
        return OwnModel(2, 4, 8, block=f"{file}:Block", block_params=params)

    return write


def filled(model: OwnModel, seed: int = 0, layers: range | None = None) -> OwnLanguageModel:
    with torch.device("meta"):
        part: OwnLanguageModel = build_model(model, 8, layers)
    allocate(part, CPU, offload=False)
    materialise(part, [Share(name, parameter) for name, parameter in part.named_parameters()], CPU, seed)
    return part


def test_a_blocks_first_values_are_those_of_its_own_code_by_seed_and_layer_alone() -> None:
    whole, again = filled(OWN), filled(OWN, layers=range(2, 4))
    block = whole.blocks["2"]
    assert torch.equal(block.get_parameter("scale"), torch.full((HIDDEN,), 3.0))
    assert torch.equal(block.get_buffer("decay"), torch.linspace(0.5, 1.0, HIDDEN))
    bound = HIDDEN**-0.5
    assert bound / 2 < float(block.get_parameter("up.weight").detach().abs().max()) <= bound, (
        "torch's own for linear layers"
    )
    assert all(torch.equal(value, block.state_dict()[name]) for name, value in again.blocks["2"].state_dict().items())
    for other in (whole.blocks["1"], filled(OWN, seed=1).blocks["2"]):
        assert not torch.equal(other.get_parameter("up.weight"), block.get_parameter("up.weight"))
    assert float(whole.head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)  # type: ignore[union-attr, arg-type]


def test_first_values_leave_the_random_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    filled(OWN)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("asked", [7, BLOCK_PARAMS + 1])
def test_another_number_of_parameters_is_refused_with_the_right_one(asked: int) -> None:
    with pytest.raises(RecipeError) as raised:
        build_model(replace(OWN, block_params=asked), 8)
    (problem,) = raised.value.problems
    assert problem.path == "model.block_params"
    assert f"model.block_params={BLOCK_PARAMS};" in problem.hint


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("self.one = nn.Parameter(torch.zeros(()))", "`one` has no dimension"),
        ("self.mix.weight.requires_grad_(False)", "`mix.weight` is not"),
        ("self.half()", "`mix.weight` .*float16"),
        ("self.twin = self.mix.weight", "under two names"),
        ("self.mask = torch.ones(3)", "attribute `mask`"),
        ("raise ValueError('no')", "ValueError: no .* layer 0"),
    ],
)
def test_blocks_that_cannot_be_sharded_or_moved_are_refused(
    own: Callable[..., OwnModel], made: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words.replace("(", r"\(")):
        build_model(own(made), 8)


def test_what_makes_a_block_returns_a_module(tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text("def make(hidden_size, layer): return hidden_size\n")
    with pytest.raises(RecipeError, match="returned int; expected a"):
        build_model(OwnModel(1, 4, 8, block=f"{tmp_path}/block.py:make", block_params=1), 8)


def test_an_error_in_a_step_names_the_line_of_the_block(own: Callable[..., OwnModel]) -> None:
    model = filled(own(forward="if x.shape[1] == 3: raise ValueError('three')"))
    tokens = torch.zeros((1, 4), dtype=torch.int64)
    model(tokens)
    with pytest.raises(WorkerError, match=r"ValueError: three .*block0\.py:12,"):
        model(tokens[:, :3])


def test_methods_of_a_block_are_no_kernels_of_the_engine(own: Callable[..., OwnModel]) -> None:
    made = "self.norm = nn.RMSNorm(hidden_size)\n    def attention(self, x): return x\n    def rest(self): pass"
    model = filled(own(made, params=24))
    assert modules_with(model, "attention") == []
    assert [type(module).__name__ for module in modules_with(model, "rms_norm")] == ["RMSNorm"], "the final norm"


def test_heirs_of_linear_layers_keep_their_own_forward_where_backwards_are_split(own: Callable[..., OwnModel]) -> None:
    made = "self.mix = nn.utils.parametrizations.weight_norm(self.mix)"
    model = filled(own(made, params=24))
    tokens = torch.arange(4)[None]
    before = model(tokens)
    WeightQueue().apply(model)
    assert torch.equal(model(tokens), before)
    assert "forward" not in vars(model.blocks["0"].mix)
