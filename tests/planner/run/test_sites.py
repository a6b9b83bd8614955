"""Plans of far-apart sites, beside published simulations."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.run.sites import WANTED, outlook
from trainspec_cli.spec.recipe.resilience import SitesSpec

VALUES, STEP_S = 100e9, 4.9
"""A model of 100B on each of four sites; the step is an assumption."""


@pytest.mark.parametrize("gbit_s", [2.0, 3.0, 5.0])
def test_four_sites_of_a_100b_model_train_95_percent_of_the_time(gbit_s: float) -> None:
    sites = SitesSpec(count=4, fragments=24, interval_steps=120, delay_steps=5, link_gbit_s=gbit_s)
    found = outlook(sites, VALUES, STEP_S)
    shortest = next(one for one in found.hidden if one.format == "int4")
    assert shortest.utilisation >= WANTED
    assert found.data_parallel_utilisation < 0.02
    # published: 95% at 1 to 5 Gbit/s. Here all pass one meeting point, which asks for longer intervals.
    assert shortest.interval_steps <= 720


def test_a_recipe_whose_exchange_is_waited_for_says_so() -> None:
    tight = SitesSpec(count=2, fragments=4, interval_steps=40, delay_steps=2, link_gbit_s=0.05)
    found = outlook(tight, 1e9, 0.5)
    assert found.wanted.utilisation < 0.5 < found.hidden[0].utilisation
    assert found.wanted.exchange_s == pytest.approx(2 * 0.05 + 2 * 0.515625e9 / 4 / 6.25e6)


def test_bytes_are_fewer_by_the_interval_and_the_format() -> None:
    found = outlook(SitesSpec(interval_steps=100, link_gbit_s=1.0), 1e9, 1.0)
    assert found.fewer_bytes == pytest.approx(100 * 8 / (2 * 0.515625))
    assert found.fewer_bytes > 400
