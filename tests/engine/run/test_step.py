"""The state after a step that is not committed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainspec_cli.engine.build.train_state import LateSum
from trainspec_cli.engine.comm.compressed import Compression, Feedback
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.parallel.noise import Columns, NoiseProbe, SampleParts
from trainspec_cli.engine.run import step
from trainspec_cli.engine.run.shortage import PassesOutOfMemory
from trainspec_cli.engine.run.step_report import LinkFigures, StepReport
from trainspec_cli.engine.shares import Share


class Refused:
    """Other replica groups that do not agree."""

    def __init__(self):
        self.told = []

    def begin_passes(self, state, micro_batches):
        self.told.append(("begin", micro_batches))

    def abandon_passes(self, state):
        self.told.append("abandon")

    def reduce(self, state, loss):
        self.told.append("reduce")

    def commit(self):
        return False


def test_a_step_that_is_not_committed_leaves_no_gradient_and_no_visit(monkeypatch):
    share = Share("w", nn.Parameter(torch.ones(2, 2)))
    router = SimpleNamespace(tokens_per_expert_E=torch.zeros(4, dtype=torch.int64))

    def compute_gradients(state, micro_batches, global_tokens, parts):
        share.parameter.grad = torch.ones(2, 2)
        router.tokens_per_expert_E += 3
        return torch.ones(())

    monkeypatch.setattr(step, "compute_gradients", compute_gradients)
    feedback = Feedback(2, torch.device("cpu"))
    feedback.keep(0, torch.ones(2))
    compression = Compression(feedbacks={"exchange": feedback})
    state = SimpleNamespace(shares=[share], routers=[router], compression=compression)
    assert step.train_step(state, [], global_tokens=4, clip_norm=None, groups=Refused()) is None
    assert share.parameter.grad is None
    assert router.tokens_per_expert_E.tolist() == [0, 0, 0, 0]
    assert feedback.newest.tolist() == [0.0, 0.0]


def test_gradients_may_go_from_the_beginning_of_the_passes_and_not_after_they_fail(monkeypatch):
    groups = Refused()

    def run_out(*_):
        assert groups.told == [("begin", 3)]
        raise PassesOutOfMemory(4)

    monkeypatch.setattr(step, "compute_gradients", run_out)
    for others in (groups, None):
        with pytest.raises(PassesOutOfMemory):
            step.train_step(SimpleNamespace(), [None] * 3, global_tokens=4, clip_norm=None, groups=others)
        if others is not None:
            assert groups.told.pop() == "abandon"


class Peer:
    """Peers whose other member has twice this rank's gradients."""

    def __init__(self):
        self.exchanges = []

    def sum_(self, tensor):
        self.exchanges.append(tensor.clone())
        tensor.mul_(3)


def share_with_gradient(name, gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return Share(name, parameter)


def test_late_gradients_are_summed_in_one_exchange_and_both_copies_of_a_name_get_the_sum():
    norm, head = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    first, again = share_with_gradient("embed", torch.full((2, 2), 10.0)), share_with_gradient("embed", head)
    only = share_with_gradient("norm", norm)
    without = Share("frozen", nn.Parameter(torch.zeros(3)))
    peers = Peer()
    step.sum_late(LateSum(shares=[first, only, again, without], peers=peers))
    (sent,) = peers.exchanges
    assert sent.tolist() == [11.0, 12.0, 13.0, 14.0, 1.0, 2.0]
    for share in (first, again):
        assert share.parameter.grad.tolist() == [[33.0, 36.0], [39.0, 42.0]]
    assert only.parameter.grad.tolist() == [3.0, 6.0]
    assert without.parameter.grad is None


def test_an_outcome_is_copied_to_the_host_as_it_is():
    scalars = {
        "loss": 1.25,
        "grad_norm": 2.5,
        "skipped": True,
        "stop": 3.0,
        "writing": 4.0,
        "steps_to_sample": 5.0,
    }
    noise = torch.tensor([1 + 1e-12, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    figures = torch.tensor([[1e-9, 2.0], [3.0, 4.0]], dtype=torch.float64)
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    found = step.StepOutcome(**tensors, noise=noise, figures=figures, own=StepReport(stop=True)).on_host()
    assert {name: getattr(found, name).item() for name in scalars} == scalars
    assert torch.equal(found.figures, figures)
    assert found.own == StepReport(stop=True)
    assert torch.equal(found.noise, noise)


class TwoRanks:
    """Stands in for torch.distributed: rank 0 has what `theirs` says, in the same order; this is rank 1."""

    def __init__(self, theirs):
        self.theirs = theirs

    def all_reduce(self, tensor):
        tensor += torch.tensor(self.theirs, dtype=tensor.dtype)

    def get_world_size(self):
        return 2

    def get_rank(self):
        return 1


def state_of(share):
    alone = SimpleNamespace(size=1)
    noise = NoiseProbe(torch.device("cpu"), alone, alone, alone)
    return SimpleNamespace(
        shares=[share],
        optimizer=torch.optim.SGD([share.local], lr=1.0, fused=True),
        clock=StepClock(torch.device("cpu")),
        routers=[],
        spread_experts=(),
        stages=SimpleNamespace(noise=noise),
        compression=Compression(feedbacks={"exchange": kept_feedback()}),
    )


def kept_feedback():
    feedback = Feedback(2, torch.device("cpu"))
    feedback.keep(0, torch.ones(2))
    return feedback


@pytest.mark.parametrize(("clip_norm", "scale"), [(None, 1.0), (2.5, 0.5), (10.0, 1.0)])
def test_an_update_is_clipped_by_the_norm_of_all_ranks_together(monkeypatch, clip_norm, scale):
    """This rank's gradient has the norm 3, the other's 4."""
    monkeypatch.setattr(step, "dist", TwoRanks([0.5, 16.0, 1.0, 1.0, *[0.0] * 6]))
    share = share_with_gradient("w", torch.tensor([3.0]))
    state = state_of(share)
    found = step._update(state, torch.tensor(1.0), clip_norm, lambda: StepReport(stop=True))
    assert state.compression.feedbacks["exchange"].committed.tolist() == [1.0, 1.0]
    assert [float(value) for value in (found.loss, found.grad_norm, found.skipped)] == [1.5, 5.0, 0.0]
    assert (float(found.stop), float(found.writing)) == (2.0, 1.0)
    assert share.local.item() == pytest.approx(-3.0 * scale)


def test_a_loss_that_is_not_finite_on_another_rank_skips_the_update_here(monkeypatch):
    monkeypatch.setattr(step, "dist", TwoRanks([float("nan"), 16.0, 0.0, 0.0, *[0.0] * 6]))
    share = share_with_gradient("w", torch.tensor([3.0]))
    state = state_of(share)
    found = step._update(state, torch.tensor(1.0), None, lambda: StepReport(writing=True))
    assert state.compression.feedbacks["exchange"].newest.tolist() == [0.0, 0.0]
    assert float(found.skipped) == 1.0
    assert share.local.item() == 0.0
    assert (float(found.stop), float(found.writing)) == (0.0, 1.0)


def test_every_rank_learns_the_figures_of_all_and_the_sum_of_their_noise(monkeypatch):
    """Rank 0 reports 1e-9 and 7; its gradients add 2 to the noise, ours |(3)|^2 / 0.25. Ours are of experts."""
    monkeypatch.setattr(
        step, "dist", TwoRanks([0.5, 16.0, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 4.0, 1e-9, 7.0, 0.0, 0.0])
    )
    share = share_with_gradient("w", torch.tensor([3.0]))
    state = state_of(share)
    state.spread_experts = {"w"}
    noise = state.stages.noise
    noise.begin(SampleParts(8, own=(2,), expert=(4,)))
    noise.weigh(None)
    noise.add(share.gradient, Columns(1, (1,), ("own",), experts=False))
    noise.add(2 * share.gradient, Columns(1, (1,), ("own",), experts=True))
    noise.end(every_micro_batch=False, ranks_of_part=1, ranks_of_experts=2)
    found = step._update(state, torch.tensor(1.0), None, lambda: StepReport(links=LinkFigures((), 0.5, 1 / 3)))
    assert [one.links for one in found.reports()] == [LinkFigures((), 1e-9, 7.0), LinkFigures((), 0.5, 1 / 3)]
    assert found.noise.tolist() == [2.0 + 9.0 / 0.25, 36.0 / 0.5, 1.0 + 1.0, 0.5, 4.0 + 9.0]
    assert (found.loss.item(), found.grad_norm.item(), found.stop.item(), found.writing.item()) == (1.5, 5.0, 0.0, 0.0)
    noise.begin(None)
    noise.weigh(0)
    noise.add(share.local, Columns(1, (1,), ("own",), experts=False))
    noise.end(every_micro_batch=False, ranks_of_part=1, ranks_of_experts=1)
    assert noise.sums.tolist() == [0.0] * 4, "the next step begins anew, and nothing of it is looked at"


def test_ranks_that_report_nothing_bring_no_figures(monkeypatch):
    monkeypatch.setattr(step, "dist", TwoRanks([0.5, 16.0, 0.0, 0.0, *[0.0] * 6]))
    found = step._update(
        state_of(share_with_gradient("w", torch.tensor([3.0]))), torch.tensor(1.0), None, lambda: StepReport()
    )
    assert found.reports() == found.on_host().reports() == []
