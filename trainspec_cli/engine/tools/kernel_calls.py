"""What a plan's step calls of each operation, at which shapes: found by making the step with fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainspec_cli.engine.build.kernel_loading import modules_with
from trainspec_cli.engine.build.train_state import TrainState, build_train_state
from trainspec_cli.engine.kernels.inputs import MAKERS, Call
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.run.pipeline_run import forward_only
from trainspec_cli.engine.tools.trace import CPU, even_out, fake_batch, fake_world
from trainspec_cli.spec.recipe.kernels import KernelSpec
from trainspec_cli.spec.results.plan import Plan


@dataclass
class Calls:
    """Of one rank's step with one micro-batch."""

    by_op: dict[str, Counter[Call]] = field(default_factory=dict)
    parameters: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Shapes of what the optimizer updates."""


def calls_of(plan: Plan, rank: int) -> Calls:
    """Called where no process group is open yet."""
    plan = replace(plan, spec=replace(plan.spec, compile=False), kernels=KernelSpec(), recompute="none")
    calls = Calls()
    with fake_world(rank, plan.group_size):
        mesh = build_mesh(plan.layout, "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = build_train_state(plan, CPU, mesh)
            state.clock.on_gpu = False
            for part in state.parts:
                even_out(part)
                _listen(part, calls)
            calls.parameters.update(tuple(share.local.shape) for share in state.shares if share.is_trained)
            _step(plan, state)
    return calls


def _listen(part: Any, calls: Calls) -> None:
    for op in MAKERS:
        for module in modules_with(part, op):
            setattr(module, op, _noting(getattr(module, op), calls.by_op.setdefault(op, Counter())))


def _noting(function: Callable[..., Any], seen: Counter[Call]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        seen[tuple(map(_describe, arguments))] += 1
        return function(*arguments)

    return noted


def _describe(argument: Any) -> tuple[int, ...] | float | None:
    if isinstance(argument, Tensor):
        return tuple(map(int, argument.shape))
    return argument if isinstance(argument, (int, float)) else None


def _step(plan: Plan, state: TrainState) -> None:
    """One micro-batch goes through all stages; what the backward calls follows from it."""
    tokens, targets, *_ = fake_batch(plan, state)
    documents = [torch.zeros_like(tokens)] if plan.spec.data.masks_documents else []
    forward_only(state.stages, tokens, targets, *documents)
