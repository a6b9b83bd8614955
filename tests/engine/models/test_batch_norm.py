"""Batch norm against torch's own in one process, and over ranks (threads here) against one."""

from __future__ import annotations

import pytest
import torch
from engine.parallel.ranks import FakePeers, Ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainspec_cli.engine.models.layers import BatchNorm, forget_statistics, update_statistics

CHANNELS = 5


def make_norm(dtype: torch.dtype = torch.float32) -> BatchNorm:
    norm = BatchNorm(CHANNELS)
    generator = torch.Generator().manual_seed(1)
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    nn.init.normal_(norm.bias, generator=generator)
    norm.running_mean.zero_()
    norm.running_variance.fill_(1.0)
    norm.weight.data, norm.bias.data = norm.weight.data.to(dtype), norm.bias.data.to(dtype)
    return norm


def torchs(norm: BatchNorm) -> nn.BatchNorm2d:
    own = nn.BatchNorm2d(CHANNELS)
    own.weight.data.copy_(norm.weight.data)
    own.bias.data.copy_(norm.bias.data)
    return own


def draw(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a mean far from 0, and gradients of the output."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, CHANNELS, 4, 6, generator=generator) * 3 + 7
    return x, torch.randn(x.shape, generator=generator)


def pass_through(norm, x, gradient):
    x = x.clone().requires_grad_()
    out = norm(x)
    out.backward(gradient.to(out.dtype))
    if isinstance(norm, BatchNorm):
        update_statistics([norm])
    return out.detach(), x.grad, norm.weight.grad, norm.bias.grad


def test_one_process_is_torchs_batch_norm():
    x, gradient = draw()
    norm = make_norm()
    own = torchs(norm)
    for got, wanted in zip(pass_through(norm, x, gradient), pass_through(own, x, gradient), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(norm.running_mean, own.running_mean, rtol=1e-6)
    assert torch.allclose(norm.running_variance, own.running_var, rtol=1e-5)
    assert torch.allclose(norm.eval()(x), own.eval()(x), atol=1e-5)


def test_bf16_takes_its_statistics_in_fp32():
    x, gradient = draw()
    rounded = [part.float() for part in pass_through(make_norm(torch.bfloat16), x.bfloat16(), gradient)]
    exact = pass_through(make_norm(), x.bfloat16().float(), gradient)
    for got, wanted in zip(rounded, exact, strict=True):
        assert (got - wanted).norm() <= 0.01 * wanted.norm()
    norm = make_norm(torch.bfloat16)
    pass_through(norm, x.bfloat16(), gradient)
    assert norm.running_mean == pytest.approx(0.1 * x.bfloat16().float().mean(dim=(0, 2, 3)), rel=1e-5)


def test_a_forward_that_is_repeated_counts_once():
    x, gradient = draw()
    plain, again = make_norm(), make_norm()
    plain(x).backward(gradient)
    checkpoint(again, x, use_reentrant=False).backward(gradient)
    update_statistics([plain, again])
    assert torch.equal(plain.running_mean, again.running_mean)
    assert torch.equal(plain.weight.grad, again.weight.grad)


def test_statistics_that_are_not_finite_are_not_kept():
    x, gradient = draw()
    x[0, 0, 0, 0] = torch.inf
    norm = make_norm()
    pass_through(norm, x, gradient)
    assert norm.running_mean.isfinite().all() and norm.running_mean[0] == 0 and norm.running_mean[1] != 0


@pytest.mark.parametrize("split", [(4, 4), (7, 1), (8, 0), (0, 8), (3, 0, 5)], ids=str)
def test_ranks_are_one_however_their_samples_are_divided(split: tuple[int, ...]) -> None:
    ranks = Ranks(len(split))

    def of_rank(rank: int) -> list[torch.Tensor]:
        norm = make_norm()
        norm.sum_over_ranks = FakePeers(ranks, rank).sum_
        x, gradient = (whole.split(split)[rank] for whole in draw())
        return [*pass_through(norm, x, gradient), norm.running_mean, norm.running_variance]

    norm = make_norm()
    wanted = pass_through(norm, *draw())
    outs, dxs, dweights, dbiases, means, variances = zip(*ranks.run(of_rank), strict=True)
    found = (torch.cat(outs), torch.cat(dxs), sum(dweights), sum(dbiases))
    for got, expected in zip(found, wanted, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
    for mean, variance in zip(means, variances, strict=True):
        assert torch.allclose(mean, norm.running_mean, rtol=1e-6)
        assert torch.allclose(variance, norm.running_variance, rtol=1e-6)


def test_a_micro_batch_that_is_empty_on_every_rank_changes_nothing() -> None:
    norm = make_norm()
    out, to_x, to_weight, to_bias = pass_through(norm, *draw(0))
    assert tuple(out.shape) == tuple(to_x.shape) == (0, CHANNELS, 4, 6)
    assert not to_weight.any() and not to_bias.any()
    assert torch.equal(norm.running_mean, make_norm().running_mean)
    assert torch.equal(norm.running_variance, make_norm().running_variance)


def test_several_norms_and_micro_batches_are_updated_at_once() -> None:
    x, gradient = draw()
    micro_batches = [[(x[:3], gradient[:3]), (x[:2], gradient[:2])], [(x[3:], gradient[3:]), (x[5:], gradient[5:])]]
    alone = [make_norm(), make_norm()]
    together = [make_norm(), make_norm()]
    together[1](x).sum().backward()
    forget_statistics(together)
    for of_norms in micro_batches:
        for number, both in enumerate(of_norms):
            pass_through(alone[number], *both)
            together[number](both[0]).backward(both[1])
    update_statistics(together)
    for norm, wanted in zip(together, alone, strict=True):
        assert torch.equal(norm.running_mean, wanted.running_mean)
        assert torch.equal(norm.running_variance, wanted.running_variance)
