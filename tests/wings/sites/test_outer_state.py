"""The shared weights on a rank, and its encoded outer gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.shares import Share
from trainspec_cli.wings.sites.engine.outer_state import OuterState
from trainspec_cli.wings.sites.outlook import KEPT_BYTES

RATE, FACTOR = 0.7, 0.9
NAMES = ("embed.weight", "blocks.0.ffn.up.weight", "blocks.1.ffn.up.weight", "norm.weight")
BOTH = (0, 1)


def state_of(
    codec: str = "int4", lr: float = 1.0, momentum: float = 0.0, values: int = 200, keep: float | None = None
) -> OuterState:
    torch.manual_seed(0)
    shares = [Share(name, nn.Parameter(torch.randn(values))) for name in NAMES]
    state = OuterState(shares, 2, GRADIENT_CODECS[codec], lr, momentum, keep)
    state.begin()
    return state


def learn(state: OuterState, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for one in state.shares:
            one.share.local.add_(torch.randn(one.values), alpha=0.1)


def test_nesterov_is_that_of_torch() -> None:
    state = state_of("bf16", RATE, FACTOR, values=2)
    one = state.shares[0]
    parameter = nn.Parameter(one.shared.clone())
    sgd = torch.optim.SGD([parameter], lr=RATE, momentum=FACTOR, nesterov=True)
    for number, gradient in enumerate(([0.5, 1.0], [-1.0, 0.25], [0.125, 0.0]), 1):
        parameter.grad = torch.tensor(gradient)
        sgd.step()
        one.share.local.data.copy_(one.shared - parameter.grad)
        state.apply(BOTH, [state.encode(number, BOTH)], (1.0,), own=0)
        assert torch.allclose(one.shared, parameter.detach(), atol=1e-6)


def test_a_site_keeps_as_many_bytes_per_parameter_as_plans_assume() -> None:
    kept = [tensor for one in state_of().shares for tensor in (one.shared, one.momentum)]
    assert sum(tensor.nbytes for tensor in kept) == KEPT_BYTES * 200 * len(NAMES)


def test_fragments_have_every_second_layer_and_the_ends_of_the_model() -> None:
    assert [one.fragment for one in state_of().shares] == [0, 0, 1, 1]


@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
def test_shared_weights_get_the_mean_of_what_two_sites_have_learned(codec: str) -> None:
    sites = [state_of(codec), state_of(codec)]
    for seed, site in enumerate(sites):
        learn(site, seed)
    begun = {one.share.name: one.shared.clone() for one in sites[0].shares}
    wanted = [(a.share.local + b.share.local) / 2 for a, b in zip(*(site.shares for site in sites), strict=True)]
    sent = [site.encode(1, BOTH) for site in sites]
    for site in sites:
        site.apply(BOTH, sent, (0.5, 0.5), own=sites.index(site))
    for one, other, mean in zip(sites[0].shares, sites[1].shares, wanted, strict=True):
        assert torch.equal(one.shared, other.shared)
        assert torch.linalg.norm(one.shared - mean) < 0.2 * torch.linalg.norm(mean - begun[one.share.name])


def test_the_loss_of_encoding_comes_with_the_next_outer_gradient() -> None:
    """After a few rounds the shared weights equal a site's own, which stay constant, though each is sent in 4 bits."""
    site = state_of()
    learn(site, 1)
    aim = [one.share.local.detach().clone() for one in site.shares]
    for number in range(1, 8):
        site.apply(BOTH, [site.encode(number, BOTH)], (1.0,), own=0)
    for one, wanted in zip(site.shares, aim, strict=True):
        assert torch.allclose(one.shared, wanted, atol=1e-5)
        assert torch.allclose(one.share.local, wanted, atol=1e-5)


def test_what_is_learned_while_a_gradient_is_in_flight_stays() -> None:
    """With two sites, only the second one's gradient moves the first one's weights."""
    site, other = state_of("bf16"), state_of("bf16")
    learn(other, 2)
    learn(site, 1)
    mine, theirs = ([(one.share.local - one.shared).detach() for one in state.shares] for state in (site, other))
    sent = [site.encode(1, BOTH), other.encode(1, BOTH)]
    learn(site, 3)
    own = [one.share.local.detach().clone() for one in site.shares]
    site.apply(BOTH, sent, (0.5, 0.5), own=0)
    for one, before, gained, had in zip(site.shares, own, theirs, mine, strict=True):
        assert torch.allclose(one.share.local, before + (gained - had) / 2, atol=0.003)


def test_a_site_keeps_part_of_its_weights_or_all_of_them_if_they_were_not_merged() -> None:
    merged, late, other = state_of("bf16", keep=0.25), state_of("bf16", keep=0.25), state_of("bf16")
    for seed, state in enumerate((merged, late, other)):
        learn(state, seed)
    before = [[(one.share.local.clone(), one.shared.clone()) for one in state.shares] for state in (merged, late)]
    sent = [merged.encode(1, BOTH), other.encode(1, BOTH)]
    merged.apply(BOTH, sent, (0.5, 0.5), own=0)
    late.apply(BOTH, sent, (0.5, 0.5), own=None)
    for one, (own, _) in zip(merged.shares, before[0], strict=True):
        assert torch.allclose(one.share.local, own * 0.25 + one.shared * 0.75)
    for one, (own, shared) in zip(late.shares, before[1], strict=True):
        assert torch.allclose(one.share.local, own + one.shared - shared)


def test_work_that_was_not_merged_comes_with_the_next_outer_gradient() -> None:
    site, other = state_of("int8"), state_of("int8")
    learn(site, 1)
    moved = [one.shared - one.share.local for one in site.shares]
    site.encode(1, BOTH)
    site.apply(BOTH, [other.encode(1, BOTH)], (1.0,), own=None)
    for one, gradient in zip(site.shares, moved, strict=True):
        assert torch.allclose(one.shared - one.share.local, gradient, atol=1e-6)


def test_outer_gradients_are_sent_in_few_bits() -> None:
    site = state_of(values=64 * 64)
    learn(site, 1)
    assert len(site.encode(1, BOTH)) < 0.53 * 4 * 64 * 64


def test_a_gradient_of_another_length_is_refused() -> None:
    site = state_of()
    with pytest.raises(ValueError, match="bytes"):
        site.apply((0,), [b"123"], (1.0,), own=0)


def test_a_digest_changes_with_any_bit() -> None:
    site = state_of()
    before = site.digest
    site.shares[2].momentum[7] = 1e-30
    assert site.digest != before


def test_shared_weights_can_replace_a_sites_own_for_a_while() -> None:
    site = state_of()
    learn(site, 1)
    own = site.shares[0].share.local.detach().clone()
    with site.as_weights():
        assert torch.equal(site.shares[0].share.local, site.shares[0].shared)
    assert torch.equal(site.shares[0].share.local, own)


def test_a_checkpoint_restores_the_outer_gradient_in_flight() -> None:
    site, again = state_of(), state_of()
    learn(site, 1)
    site.count(64)
    sent = site.encode(3, (1,))
    for name, kept in site.saved("rank").items():
        again.saved("rank")[name].copy_(kept)
    assert (again.sent_round, again.sent, again.sent_work) == (3, sent, (64, 1))
