"""Plans of distant sites: the memory of a rank, and the exchange compared with published simulations."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from lab.made_up import CLUSTER
from rich.console import Console

from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec, SitesSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.reporter.plan.json import plan_as_json
from trainspec_cli.reporter.plan.page import render_plan_page
from trainspec_cli.reporter.plan.text import render_plan
from trainspec_cli.session.planning.plan import plan_recipe
from trainspec_cli.wings.sites.outlook import KEPT_BYTES, WANTED, SitesOutlook, outlook

VALUES, STEP_S = 100e9, 4.9
"""A model with 100B parameters at each of four sites; the step time is an assumption."""


INTERVALS = {1.0: (1200, 480), 2.0: (480, 240), 3.0: (480, 120), 5.0: (240, 72)}
"""The shortest intervals (through the meeting point, directly) by Gbit/s. Published: 95% at 1 to 5 Gbit/s with an
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


def test_a_recipe_that_waits_for_its_exchange_has_a_lower_utilisation() -> None:
    tight = SitesSpec(count=2, fragments=4, interval_steps=40, delay_steps=2, link_gbit_s=0.05)
    found = outlook(tight, 1e9, 0.5)
    assert found.wanted.utilisation < 0.5 < found.hidden[0].utilisation
    assert found.wanted.exchange_s == pytest.approx(2 * 0.05 + 0.515625e9 / 4 / 6.25e6)


def test_the_interval_and_the_format_reduce_the_bytes() -> None:
    found = outlook(SitesSpec(interval_steps=100, link_gbit_s=1.0), 1e9, 1.0)
    assert found.fewer_bytes == pytest.approx(100 * 8 / (2 * 0.515625))
    assert found.fewer_bytes > 400


ALONE = RunSpec(
    model=DecoderModel(4, 1024, 8, 8, 128, 4096, 8192),
    data=DataSpec(seq_len=2048, source="tokens"),
    optim=OptimSpec(lr=1e-4),
    batching=BatchingSpec(global_batch_size=32, micro_batch_size=2),
    train=TrainSection(max_steps=10),
    cluster=CLUSTER,
)


@pytest.mark.parametrize("compiled", [False, True], ids=["every tensor counted", "estimated"])
@pytest.mark.parametrize("family", ["decoder", "conv"])
def test_a_site_keeps_the_outer_optimizer_for_its_share_of_the_parameters(compiled: bool, family: str) -> None:
    model = models()["resnet_tiny"] if family == "conv" else ALONE.model
    layout = LayoutSpec(dp_shard=8, dp_replicate=1)
    alone = replace(ALONE, model=model, layout=layout, compile=compiled, recompute="none")
    site = replace(alone, resilience=ResilienceSpec(mode="sites"))
    (before,), (after,) = (plan_capacity(spec, None).candidates for spec in (alone, site))
    more = max(stage.optimizer_bytes for stage in after.memory) - max(stage.optimizer_bytes for stage in before.memory)
    assert more == pytest.approx(KEPT_BYTES * count_params(model) / 8, rel=0.02)
    assert after.peak_memory_bytes > before.peak_memory_bytes + more


def test_a_plan_has_a_section_for_the_exchange_if_the_links_are_known() -> None:
    recipe = ("recipe=llama3_8b", "cluster=h100", "resilience=sites")
    assert plan_recipe(recipe).sections == ()
    plan = plan_recipe([*recipe, "resilience.sites.link_gbit_s=1"])
    (section,) = plan.sections
    assert plan_as_json(plan)["sites"] == section.figures
    assert (section.figures["sites"], section.figures["link_gbit_per_s"]) == (2, 1.0)
    terminal = Console(file=StringIO(), width=200)
    terminal.print(render_plan(plan, verbose=True))
    page, text = render_plan_page(plan), terminal.file.getvalue()  # type: ignore[attr-defined]
    for shown in (section.title, section.about, section.text, *section.headings[1:], section.rows[0][-1]):
        assert shown in page and shown in text
