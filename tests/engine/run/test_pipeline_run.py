"""What a pipeline's actions count as; that they compute the right gradients is tested by tests/engine/parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import Allowance, Throttle
from trainspec_cli.engine.parallel.pipeline import Mailbox, Message
from trainspec_cli.engine.run import pipeline_run
from trainspec_cli.engine.run.pipeline_run import PipelineRun
from trainspec_cli.engine.run.step import compute_gradients
from trainspec_cli.engine.tools.trace import fake_batch, fake_world
from trainspec_cli.planner.pipeline import Action
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.wings.certify.cases import Case, build_plan


def test_the_time_of_a_split_backward_is_the_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    parts: list[str] = []

    @contextmanager
    def part(name: str) -> Iterator[None]:
        parts.append(name)
        yield
        parts.pop()

    kinds = ("forward", "backward_input", "backward_weight", "backward")
    handlers = {kind: lambda _, action: seen.append((action.kind, parts[-1])) for kind in kinds}
    monkeypatch.setattr(pipeline_run, "_HANDLERS", handlers)
    run = SimpleNamespace(
        _own=[Action(kind, 0, 0) for kind in kinds],
        _mail=SimpleNamespace(end=lambda: seen.append(("mail", "ended"))),
        stages=SimpleNamespace(clock=SimpleNamespace(part=part), throttle=Throttle({0: 1.0}), allowance=Allowance()),
        micro_batches=[(torch.zeros(1, 2),)],
        loss=torch.tensor(3.0),
    )
    assert PipelineRun.run(run) == 3.0  # type: ignore[arg-type]
    assert seen == [
        ("forward", "forward"),
        ("backward_input", "backward"),
        ("backward_weight", "backward"),
        ("backward", "backward"),
        ("mail", "ended"),
    ]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero_stage=1),
        Layout(dp_shard=2, zero_stage=2),
        Layout(dp_replicate=2),
        Layout(dp_shard=2, pp=2, zero_stage=1, pipeline_schedule="zbv"),
    ],
    ids=lambda layout: layout.describe(),
)
def test_parameters_that_are_kept_over_micro_batches_are_let_go_of_with_the_step(layout: Layout) -> None:
    """What is gathered is not what the update changes: the next step would compute with the parameters of this one."""
    plan = build_plan(Case("dense", layout, micro_batch_size=1), "cpu")
    with fake_world(0, layout.world_size):
        state = build_train_state(plan, torch.device("cpu"))
        compute_gradients(state, [fake_batch(plan, state)] * 4, plan.tokens_per_step)
        assert all(isinstance(share.parameter, DTensor) and share.gradient is not None for share in state.shares)
        assert all(isinstance(one, DTensor) for part in state.parts for one in part.parameters())


def test_a_gradient_is_sent_within_the_backward_pass_at_whose_end_the_stage_sums_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    backward = torch.Tensor.backward
    send = Mailbox.send

    def noting_backward(tensor: torch.Tensor) -> None:
        backward(tensor)
        seen.append("backward")

    def noting_send(mail: Mailbox, message: Message, tensor: torch.Tensor) -> None:
        seen.append("sent")
        assert message.is_gradient
        send(mail, message, tensor)

    monkeypatch.setattr(torch.Tensor, "backward", noting_backward)
    monkeypatch.setattr(Mailbox, "send", noting_send)
    layout = Layout(dp_replicate=2, pp=2)
    plan = build_plan(Case("dense", layout, micro_batch_size=1), "cpu")
    with fake_world(layout.rank_of_stage(1) * 2, layout.world_size):
        state = build_train_state(plan, torch.device("cpu"))
        compute_gradients(state, [fake_batch(plan, state)] * 3, plan.tokens_per_step)
    assert seen == ["sent", "backward"] * 3
