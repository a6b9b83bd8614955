"""The outer update: its sign above all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.wings.sites.decisions.outer import carry_over, mix, outer_gradient, outer_step, site_weights

RATE, FACTOR = 0.7, 0.9
numbers = st.floats(-100, 100)


@given(shared=numbers, own=numbers)
def test_shared_weights_move_towards_what_a_site_has_learned(shared: float, own: float) -> None:
    moved, _ = outer_step(shared, 0.0, outer_gradient(shared, own), RATE, factor=0.0)
    assert abs(own - moved) <= 0.3 * abs(own - shared) + 1e-9, "with rate 0.7 three tenths of the way are left"


def test_rounds_with_the_same_site_come_to_its_weights() -> None:
    shared, momentum, own = 0.0, 0.0, 1.0
    for _ in range(200):
        shared, momentum = outer_step(shared, momentum, outer_gradient(shared, own), 0.1, 0.5)
    assert shared == pytest.approx(own, abs=1e-6)


def test_nesterov_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=RATE, momentum=FACTOR, nesterov=True)
    shared, momentum = parameter.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for gradient in ([0.5, 1.0], [-1.0, 0.25], [0.125, 0.0]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        sgd.step()
        shared, momentum = outer_step(shared, momentum, parameter.grad, RATE, FACTOR)
    assert torch.allclose(shared, parameter.detach(), rtol=1e-12)


@pytest.mark.parametrize("sent", [0.0, 3.0])
def test_what_a_site_has_not_sent_is_its_next_outer_gradient(sent: float) -> None:
    """It moved from 10 to 6 since the shared weights came, of which the wire took `sent`; then those of all moved."""
    before, own, shared = 10.0, 6.0, 8.5
    after = carry_over(own, sent, before, shared)
    assert outer_gradient(shared, after) == (before - own) - sent


def test_a_site_keeps_its_part_of_its_own_weights() -> None:
    assert mix(4.0, 8.0, keeps=0.25) == 7.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**4)), min_size=1, max_size=8))
def test_weights_of_sites_sum_to_one(work: list[tuple[int, int]]) -> None:
    weights = site_weights([tokens for tokens, _ in work], [steps for _, steps in work])
    assert sum(weights) == pytest.approx(1) and min(weights) >= 0


def test_sites_count_by_tokens_and_steps() -> None:
    assert site_weights([100, 100], [10, 10]) == (0.5, 0.5)
    assert site_weights([200, 100], [10, 10]) == (0.8, 0.2)
    assert site_weights([100, 100], [10, 20]) == pytest.approx((2 / 3, 1 / 3))
    assert site_weights([100, 0], [10, 0]) == (1.0, 0.0)
