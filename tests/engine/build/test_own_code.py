"""User-defined blocks and losses are tried before the first step: their form, their reach, their gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.own_model import OWN, OWN_LOSS
from torch import Tensor

from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.engine.build.assemble import load_loss, try_own_block
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models import own
from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.engine.models.own import OwnLinearLoss
from trainspec_cli.engine.tools.trace import trace_rank
from trainspec_cli.planner.workload import flops_per_token
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.user_code import LOSS, Extension
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import FAMILIES, LOSSES

CPU = torch.device("cpu")
BLOCK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, hidden_size, layer):
        super().__init__()
        self.mix = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        BODY
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setitem(FAMILIES, "own", OWN)
    monkeypatch.setitem(LOSSES, "own", OWN_LOSS)
    return build_plan(Case("own"), "cpu")


def tried(plan: Plan, folder: Path, body: str, recompute: Recompute = "none") -> None:
    file = folder / "block.py"
    file.write_text(BLOCK.replace("BODY", body))
    model = OwnModel(2, 16, 256, block=f"{file}:Block", block_params=16 * 17)
    plan = replace(plan, spec=replace(plan.spec, model=model), recompute=recompute)
    try_own_block(plan, 0, torch.float32, CPU)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_good_block_is_taken_in_every_format(plan: Plan, compute: torch.dtype, recompute: Recompute) -> None:
    try_own_block(replace(plan, recompute=recompute), 1, compute, CPU)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return x[..., :8]", "(2, 32, 16) to torch.float32 of shape (2, 32, 8)"),
        ("return self.mix(x).double()", "torch.float64 of shape (2, 32, 16)"),
        ("return (x, self.mix(x))", "to tuple"),
        ("return self.mix(x) / 0", "non-finite values"),
        ("return self.mix(x) + torch.rand_like(x)", "different output"),
        ("self.calls += 1; return self.mix(x)", "changes a buffer"),
        ("return self.mix(x) + x.mean(1, keepdim=True)", "later tokens"),
        ("return self.mix(x) - x.mean(0)", "mixes the samples"),
        ("return self.mix(x) / (1 if x.amax(0).any() else 2)", "raised IndexError: amax()"),
        ("return x + self.mix.weight[0]", "use `mix.bias`"),
        ("return x.sin(1)", "raised TypeError: "),
    ],
)
def test_what_layouts_cannot_keep_the_same_is_refused(plan: Plan, tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        tried(plan, tmp_path, body)
    assert words in raised.value.problems[0].message


def test_results_changed_in_place_are_refused_where_they_are_kept(plan: Plan, tmp_path: Path) -> None:
    """Selective recomputation recalls the product as it was changed, and the change is made again."""
    body = "return self.mix(x).add_(x).tanh()"
    tried(plan, tmp_path, body)
    tried(plan, tmp_path, body, "full")
    with pytest.raises(RecipeError, match="gradient with recompute=selective"):
        tried(plan, tmp_path, body, "selective")


@pytest.mark.slow
def test_a_traced_step_has_the_work_that_the_plan_counts(plan: Plan) -> None:
    """The loss multiplies by the head once more, since it keeps no logits."""
    planned = build_plan(Case("own", Layout(dp_shard=2)), "cpu")
    again = 2 * OWN.vocab_size * OWN.hidden_size
    expected = planned.tokens_per_step / 2 * (flops_per_token(OWN, 64) + again)
    assert trace_rank(planned, 0).flops == pytest.approx(expected, rel=0.02)


# Losses


LOSS_HEAD = "import torch\nimport torch.nn.functional as F\n\ndef loss(logits, targets, **options):\n    "
CROSS_ENTROPY = "return F.cross_entropy(logits, targets, reduction='none')"
SMOOTHED = "return F.cross_entropy(logits, targets, reduction='none', **options)"


def loaded_loss(folder: Path, body: str, **options: float) -> OwnLinearLoss:
    (folder / "mine.py").write_text(LOSS_HEAD + body + "\n")
    extension = Extension(LOSS, LOSS.key, f"{folder}/mine.py:loss", tuple(options))
    return OwnLinearLoss(load_loss(extension, dict(options), 7, CPU))


def computed(module: LinearCrossEntropy, seed: int = 0) -> list[Tensor]:
    """Return the loss of some tokens, one without a target, and the gradients of inputs and weights."""
    generator = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn((2, 5, 3), generator=generator).requires_grad_()
    weight_VD = torch.randn((7, 3), generator=generator).requires_grad_()
    targets_BS = torch.randint(7, (2, 5), generator=generator)
    targets_BS[0, 3] = IGNORED_TARGET
    loss = module(x_BSD, weight_VD, targets_BS)
    return [loss.detach(), *torch.autograd.grad(loss / 9, [x_BSD, weight_VD])]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_cross_entropy_of_ones_own_is_the_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(own, "loss_chunk_tokens", lambda _rows: chunk)
    for found, expected in zip(
        computed(loaded_loss(tmp_path, CROSS_ENTROPY)), computed(LinearCrossEntropy()), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-6)


def test_options_reach_the_loss_and_evaluations_keep_cross_entropy(tmp_path: Path) -> None:
    module = loaded_loss(tmp_path, SMOOTHED, label_smoothing=0.5)
    x, weight, targets = torch.eye(3)[None], torch.randn((7, 3)), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(module(x, weight, targets), LinearCrossEntropy()(x, weight, targets))
    assert not torch.allclose(module(x, weight, targets), LinearCrossEntropy()(x, weight, targets))
    assert module(x, weight, None).shape == (1, 3, 7)


def test_a_micro_batch_without_samples_has_a_loss_and_gradients_of_zero(tmp_path: Path) -> None:
    x_BSD, weight_VD = torch.zeros((0, 5, 3), requires_grad=True), torch.randn((7, 3), requires_grad=True)
    loss = loaded_loss(tmp_path, CROSS_ENTROPY)(x_BSD, weight_VD, torch.zeros((0, 5), dtype=torch.int64))
    dx_BSD, dweight_VD = torch.autograd.grad(loss, [x_BSD, weight_VD])
    assert (float(loss.detach()), dx_BSD.shape) == (0.0, (0, 5, 3))
    assert torch.equal(dweight_VD, torch.zeros((7, 3)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return F.cross_entropy(logits, targets)", "shape () for 6 tokens"),
        ("return 3.0", "float for 6 tokens"),
        ("return targets.float()", "without a gradient"),
        (f"{CROSS_ENTROPY} / len(targets)", "a different loss"),
        ("return (logits - logits.mean(0)).square().sum(1)", "a different loss"),
        ("return (0 * logits).sqrt().sum(1)", "not finite"),
        ("raise ValueError('no')", "raised ValueError: no "),
    ],
)
def test_losses_that_are_not_of_each_token_are_refused(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        loaded_loss(tmp_path, body)
    assert words in raised.value.problems[0].message


def test_an_error_in_a_step_names_its_line(tmp_path: Path) -> None:
    module = loaded_loss(tmp_path, f"if len(targets) == 10: raise ValueError('ten')\n    {CROSS_ENTROPY}")
    with pytest.raises(WorkerError, match=r"ValueError: ten .*mine.py:5,"):
        computed(module)
