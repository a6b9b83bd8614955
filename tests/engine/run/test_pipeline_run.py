"""What a pipeline's actions count as; that they compute the right gradients is tested by tests/engine/parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from trainspec_cli.engine.build.train_state import Allowance, Throttle
from trainspec_cli.engine.run import pipeline_run
from trainspec_cli.engine.run.pipeline_run import PipelineRun
from trainspec_cli.policy.pipeline import Action


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
