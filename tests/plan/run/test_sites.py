"""Plans of far-apart sites, beside published simulations."""

from __future__ import annotations

import pytest

from trainspec_cli.plan.run.sites import WANTED, outlook
from trainspec_cli.recipe.keys.resilience import SitesSpec
from trainspec_cli.recipe.results.sites import SitesOutlook

VALUES, STEP_S = 100e9, 4.9
"""A model of 100B on each of four sites; the step is an assumption."""


INTERVALS = {1.0: (1200, 480), 2.0: (480, 240), 3.0: (480, 120), 5.0: (240, 72)}
"""By Gbit/s, the shortest intervals through the meeting point and directly. Published: 95% at 1 to 5 Gbit/s, with an
interval of 100 steps."""


@pytest.mark.parametrize("gbit_s", list(INTERVALS))
def test_four_sites_of_a_100b_model_train_95_percent_of_the_time(gbit_s: float) -> None:
    found = [four_sites(gbit_s, listen) for listen in (None, "b.example:29501")]
    shortest = [next(one for one in each.hidden if one.format == "int4") for each in found]
    assert all(one.utilisation >= WANTED for one in shortest)
    assert tuple(one.interval_steps for one in shortest) == INTERVALS[gbit_s]
    assert found[0].data_parallel_utilisation == found[1].data_parallel_utilisation < 0.02
    through, direct = found
    assert through.direct_exchange_s == direct.direct_exchange_s == direct.wanted.exchange_s
    assert direct.fewer_bytes == pytest.approx(2 * through.fewer_bytes)


def four_sites(gbit_s: float, listen: str | None) -> SitesOutlook:
    sites = SitesSpec(count=4, fragments=24, interval_steps=120, delay_steps=5, link_gbit_s=gbit_s, listen=listen)
    return outlook(sites, VALUES, STEP_S)


def test_a_recipe_whose_exchange_is_waited_for_says_so() -> None:
    tight = SitesSpec(count=2, fragments=4, interval_steps=40, delay_steps=2, link_gbit_s=0.05)
    found = outlook(tight, 1e9, 0.5)
    assert found.wanted.utilisation < 0.5 < found.hidden[0].utilisation
    assert found.wanted.exchange_s == pytest.approx(2 * 0.05 + 0.515625e9 / 4 / 6.25e6)


def test_bytes_are_fewer_by_the_interval_and_the_format() -> None:
    found = outlook(SitesSpec(interval_steps=100, link_gbit_s=1.0), 1e9, 1.0)
    assert found.fewer_bytes == pytest.approx(100 * 8 / (2 * 0.515625))
    assert found.fewer_bytes > 400
