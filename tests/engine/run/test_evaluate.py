"""Text that a model writes, with shapes that recur."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.engine.build.train_state import Machinery, build_machinery
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
def built(one_process: None) -> Machinery:
    torch.manual_seed(0)
    built = build_machinery(plan(SPEC, MACHINE), torch.device("cpu"))
    for share in built.shares:
        torch.nn.init.normal_(share.local, std=0.3)
    return built


@torch.no_grad()
def test_padding_changes_nothing_in_the_text(built: Machinery) -> None:
    ids = [1, 2, 3]
    for _ in range(30):
        ids.append(int(built.parts[0](torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    assert write_text(built, [1, 2, 3], count=30, temperature=0.0, max_context=CONTEXT, seed=0) == ids[3:]


def test_few_lengths_are_ever_met(built: Machinery) -> None:
    lengths = set()
    built.parts[0].register_forward_pre_hook(lambda _, arguments: lengths.add(arguments[0].shape[1]))
    write_text(built, [1, 2, 3], count=30, temperature=1.0, max_context=CONTEXT, seed=0)
    assert lengths == {16, 20}
