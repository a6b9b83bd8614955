"""Text that a model writes, with shapes that recur."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.engine.build import Machinery, build_machinery
from trainspec_cli.engine.evaluate import write_text

CONTEXT = 20


@pytest.fixture
def built(one_process) -> Machinery:
    built = build_machinery(build_plan(Case("dense"), "cpu"), torch.device("cpu"))
    for share in built.shares:
        torch.nn.init.normal_(share.local, std=0.3)
    return built


@torch.no_grad()
def test_padding_changes_nothing_in_the_text(built) -> None:
    ids = [1, 2, 3]
    for _ in range(30):
        ids.append(int(built.parts[0](torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    assert write_text(built, [1, 2, 3], count=30, temperature=0.0, max_context=CONTEXT, seed=0) == ids[3:]


def test_few_lengths_are_ever_met(built) -> None:
    lengths = set()
    built.parts[0].register_forward_pre_hook(lambda _, arguments: lengths.add(arguments[0].shape[1]))
    write_text(built, [1, 2, 3], count=30, temperature=1.0, max_context=CONTEXT, seed=0)
    assert lengths == {16, 20}
