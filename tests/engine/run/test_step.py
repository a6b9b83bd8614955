"""What a step that is not committed leaves behind."""

from types import SimpleNamespace

import torch
from torch import nn

from trainspec_cli.engine.run import step
from trainspec_cli.engine.shares import Share


class Refused:
    def reduce(self, state, loss):
        pass

    def commit(self):
        return False


def test_a_step_that_is_not_committed_leaves_no_gradient_and_no_visit(monkeypatch):
    share = Share("w", nn.Parameter(torch.ones(2, 2)))
    router = SimpleNamespace(tokens_per_expert_E=torch.zeros(4, dtype=torch.int64))

    def compute_gradients(state, micro_batches, global_tokens):
        share.parameter.grad = torch.ones(2, 2)
        router.tokens_per_expert_E += 3
        return torch.ones(())

    monkeypatch.setattr(step, "compute_gradients", compute_gradients)
    state = SimpleNamespace(shares=[share], routers=[router])
    assert step.train_step(state, [], global_tokens=4, clip_norm=None, groups=Refused()) is None
    assert share.parameter.grad is None
    assert router.tokens_per_expert_E.tolist() == [0, 0, 0, 0]
