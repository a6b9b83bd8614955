"""Text that a model writes, with shapes that recur."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.engine_runs import CPU, MACHINE, fill
from lab.problems import raises

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.digest import REMEDY
from trainspec_cli.engine.run import evaluate
from trainspec_cli.engine.run.evaluate import _choose, _next_logits, write_text
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

CONTEXT = 20
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 1, 16, 48, 50),
    data=DataSpec(seq_len=CONTEXT, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=1),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)


@pytest.fixture
def state(one_process: None) -> TrainState:
    torch.manual_seed(0)
    state = build_train_state(plan(SPEC, MACHINE), CPU)
    fill(state, std=0.3)
    return state


@torch.no_grad()
def test_padding_changes_nothing_in_the_text(state: TrainState) -> None:
    ids = [1, 2, 3]
    for _ in range(30):
        ids.append(int(state.parts[0](torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    assert write_text(state, [1, 2, 3], count=30, temperature=0.0, max_context=CONTEXT, seed=0) == ids[3:]


def test_few_lengths_are_ever_met(state: TrainState) -> None:
    lengths = set()
    state.parts[0].register_forward_pre_hook(lambda _, arguments: lengths.add(arguments[0].shape[1]))
    write_text(state, [1, 2, 3], count=30, temperature=1.0, max_context=CONTEXT, seed=0)
    assert lengths == {16, 20}


def test_the_likeliest_token_is_chosen_without_temperature_and_others_with_it() -> None:
    logits_V = torch.tensor([0.0, 3.0, 1.0]).log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    assert {_choose(logits_V, 0.0, generator) for _ in range(20)} == {1}
    for temperature in (0.5, 2.0):
        drawn = torch.tensor([_choose(logits_V, temperature, generator) for _ in range(4000)])
        expected = (logits_V / temperature).softmax(-1)
        assert torch.allclose(drawn.bincount(minlength=3) / 4000, expected, atol=0.03)


def test_the_same_seed_writes_the_same_text(state: TrainState) -> None:
    def write(seed: int) -> list[int]:
        return write_text(state, [1, 2, 3], count=12, temperature=1.0, max_context=CONTEXT, seed=seed)

    assert write(0) == write(0) != write(1)
    assert len(write(0)) == 12


def test_a_model_whose_logits_are_not_finite_cannot_write(state: TrainState) -> None:
    with torch.no_grad():
        for share in state.shares:
            share.local.fill_(torch.nan)
    with raises(WorkerError, "not_finite", "logits") as caught:
        write_text(state, [1], count=1, temperature=0.0, max_context=CONTEXT, seed=0)
    assert caught.value.problems[0].hint == REMEDY


def logits_of(monkeypatch: pytest.MonkeyPatch, length: int, longest: int, **about: Any) -> tuple[list[int], Any]:
    """-> (the inputs of the model by number of tokens, from 1; the logits)."""
    seen: list[int] = []

    def forward(_stages: object, tokens: torch.Tensor) -> torch.Tensor:
        seen.extend(tokens[0].tolist())
        return torch.arange(float(tokens.shape[1]))[None, :, None].expand(1, -1, 2)

    monkeypatch.setattr(evaluate, "forward_only", forward)
    layout = SimpleNamespace(**{"tp": 1, "cp": 1} | about.pop("layout", {}))
    mesh = SimpleNamespace(layout=layout, group=lambda axis: f"group of {axis}")
    state: Any = SimpleNamespace(**{"device": CPU, "positions_S": None, "stages": None, "mesh": mesh} | about)
    return seen, _next_logits(state, range(1, length + 1), longest)


@pytest.mark.parametrize(
    ("length", "longest", "tp", "cp", "padded"),
    [
        (1, 64, 1, 1, 16),
        (16, 64, 1, 1, 16),
        (17, 64, 1, 1, 32),
        (33, 64, 1, 1, 64),
        (33, 40, 1, 1, 40),
        (3, 20, 3, 1, 18),
        (18, 20, 3, 1, 21),
        (3, 40, 1, 2, 40),
    ],
)
def test_a_context_is_padded_to_a_power_of_two_and_to_whole_parts(
    monkeypatch: pytest.MonkeyPatch, length: int, longest: int, tp: int, cp: int, padded: int
) -> None:
    monkeypatch.setattr(evaluate.dist, "all_gather", lambda *_, group: None)
    seen, _ = logits_of(monkeypatch, length, longest, layout={"tp": tp, "cp": cp})
    assert seen == [*range(1, length + 1), *[0] * (padded - length)]


def test_the_vocabulary_is_gathered_in_the_order_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: str) -> None:
        assert group == "group of tp"
        for rank, part in enumerate(parts):
            part.copy_(own + 10 * rank)

    monkeypatch.setattr(evaluate.dist, "all_gather", all_gather)
    _, logits_V = logits_of(monkeypatch, 3, 18, layout={"tp": 3})
    assert logits_V.tolist() == [2.0, 2.0, 12.0, 12.0, 22.0, 22.0]


@pytest.mark.parametrize(
    ("positions", "seen", "logits"),
    [([0, 1, 14, 15], [1, 2, 0, 0], None), ([2, 3, 4, 5], [3, 4, 0, 0], [1.0, 1.0])],
)
def test_the_rank_that_holds_the_last_token_answers(
    monkeypatch: pytest.MonkeyPatch, positions: list[int], seen: list[int], logits: list[float] | None
) -> None:
    """Two ranks of cp hold four of 16 positions each; the context ends at position 3."""
    given, logits_V = logits_of(monkeypatch, 4, 16, layout={"cp": 2}, positions_S=torch.tensor(positions))
    assert given == seen
    assert logits_V is None if logits is None else logits_V.tolist() == logits
