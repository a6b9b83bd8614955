"""Text that a model writes, with shapes that recur."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.engine.build.train_state import TrainState, build_train_state
from trainspec_cli.engine.run.evaluate import write_text
from trainspec_cli.planner.plan import plan
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec, Machine
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection

CONTEXT = 20
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 1, 16, 48, 50),
    data=DataSpec(seq_len=CONTEXT, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=1),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
MACHINE = Machine("host", cpu_cores=1, memory_bytes=2**34, bf16=False)


@pytest.fixture
def state(one_process: None) -> TrainState:
    torch.manual_seed(0)
    state = build_train_state(plan(SPEC, MACHINE), torch.device("cpu"))
    for share in state.shares:
        torch.nn.init.normal_(share.local, std=0.3)
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
