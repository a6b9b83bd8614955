"""A block of one's own is tried before the first step: its form, its reach, its gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.own_model import OWN, OWN_LOSS

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.build.own_code import try_own_block
from trainspec_cli.engine.tools.trace import trace_rank
from trainspec_cli.planner.workload import flops_per_token
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.results.plan import Plan
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
        ("return x[..., :8]", "maps torch.float32 of shape (2, 32, 16) to torch.float32 of shape (2, 32, 8)"),
        ("return self.mix(x).double()", "to torch.float64 of shape (2, 32, 16)"),
        ("return (x, self.mix(x))", "to tuple"),
        ("return self.mix(x) / 0", "gives values that are not finite"),
        ("return self.mix(x) + torch.rand_like(x)", "gives another output at each call"),
        ("self.calls += 1; return self.mix(x)", "changes a buffer in its forward"),
        ("return self.mix(x) + x.mean(1, keepdim=True)", "lets a token see later ones"),
        ("return self.mix(x) - x.mean(0)", "mixes the samples of a batch"),
        ("return self.mix(x) / (1 if x.amax(0).any() else 2)", "raised IndexError: amax()"),
        ("return x + self.mix.weight[0]", "does not use `mix.bias`"),
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
    with pytest.raises(RecipeError, match="another gradient with recompute=selective"):
        tried(plan, tmp_path, body, "selective")


def test_a_traced_step_has_the_work_that_the_plan_counts(plan: Plan) -> None:
    """The loss multiplies by the head once more, since it keeps no logits."""
    planned = build_plan(Case("own", Layout(dp_shard=2)), "cpu")
    again = 2 * OWN.vocab_size * OWN.hidden_size
    expected = planned.tokens_per_step / 2 * (flops_per_token(OWN, 64) + again)
    assert trace_rank(planned, 0).flops == pytest.approx(expected, rel=0.02)
