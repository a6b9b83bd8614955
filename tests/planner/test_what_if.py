"""What one thing changed makes of a step, on GPUs of the catalogue and by a made-up probe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner.test_this_machine import BLOCK, GPU_SPEC, H100S, MACHINE, OUTSIDE, RAW, as_told, linear, made

from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import gpu_parts_s, setup_of
from trainspec_cli.planner.what_if import BUBBLE, CALLS, MEMORY, SOONER, WIDER, look_ahead
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import Curve, MatmulCurves
from trainspec_cli.reporter.diagnosis.conclude import COMPUTING, EXCHANGES, FASTER, WAITING, Outlook

SIZES = tuple(sorted(size * params for params in (BLOCK, OUTSIDE) for size in (2.0, 4.0)))
"""Of exchanges in bf16 and fp32."""
EXCHANGE = Curve((1.0, *SIZES), (1.0, 5.0, 6.0, 8.0, 9.0))
SLOW_LINKS = as_told(replace(RAW, all_reduce=EXCHANGE, all_gather=EXCHANGE, reduce_scatter=EXCHANGE))


def factors(outlook: Outlook, change: str) -> dict[str, float]:
    return dict(next(one.factors for one in outlook.changes if one.change == change))


def other_layout(outlook: Outlook) -> str | None:
    return next((one.change for one in outlook.changes if one.change.startswith("another layout")), None)


def on_gpus(planned: Plan) -> Outlook:
    return look_ahead(planned, H100S, None)


@pytest.mark.parametrize("layout", [LayoutSpec(), LayoutSpec(dp_shard=2)])
def test_wider_and_sooner_links_divide_a_probed_exchange_between_them(layout: LayoutSpec) -> None:
    outlook = look_ahead(made(layout=layout), MACHINE, SLOW_LINKS)
    assert outlook.is_known
    wider, sooner = (factors(outlook, change) for change in (WIDER, SOONER))
    assert set(wider) == set(sooner) == {"exposed_comm"}
    assert 0.5 < wider["exposed_comm"] < 1.0
    assert (1 - wider["exposed_comm"]) + (1 - sooner["exposed_comm"]) == pytest.approx(0.5), "each halves its own part"


def test_an_exchange_that_was_probed_as_faster_than_the_empty_one_can_be_planned() -> None:
    """Other programs may hold up the shortest exchanges of a probe more than the longer ones."""
    disturbed = Curve(EXCHANGE.sizes, (9.0, 3.0, 2.0, 4.0, 5.0))
    probe = as_told(replace(RAW, all_reduce=disturbed, all_gather=disturbed, reduce_scatter=disturbed))
    outlook = look_ahead(made(), MACHINE, probe)
    assert 0.0 < factors(outlook, SOONER)["exposed_comm"] <= 1.0
    assert factors(outlook, WIDER)["exposed_comm"] == pytest.approx(1.0), "their bytes take no time"


def test_a_faster_processor_halves_the_passes_and_the_waiting_for_them() -> None:
    outlook = look_ahead(made(), MACHINE, as_told(RAW))
    assert factors(outlook, FASTER) == dict.fromkeys(("forward", "backward", "optimizer", WAITING), 0.5)


def test_passes_are_divided_into_products_memory_and_calls() -> None:
    calls = 2 * 2 * 2 + 2.0  # forward and backward of two micro-batches, and the optimizer
    shares = look_ahead(made(), MACHINE, as_told(RAW)).shares
    assert shares[CALLS] == pytest.approx(1.0, rel=1e-3)
    products = as_told(replace(RAW, matmul=MatmulCurves(linear(1e-3), linear(1e-3), linear(1e-3))))
    shares = look_ahead(made(), MACHINE, products).shares
    assert shares[COMPUTING] > 0.9
    update = as_told(replace(RAW, optimizer=linear(calls / made().params)))
    shares = look_ahead(made(), MACHINE, update).shares
    assert shares[MEMORY] == pytest.approx(0.5, rel=1e-2)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_fastest_layout_by_the_probe_is_named_as_a_recipe_has_it() -> None:
    sharded = made(layout=LayoutSpec(dp_shard=2))
    gathers = as_told(replace(RAW, all_gather=linear(1.0), reduce_scatter=linear(1.0)))
    found = other_layout(look_ahead(sharded, MACHINE, gathers))
    assert found is not None
    assert {"layout.dp_replicate=2", "layout.dp_shard=1"} <= set(found.replace(",", " ").split())
    assert other_layout(look_ahead(made(), MACHINE, gathers)) is None, "it is in force"


def test_a_layout_that_does_not_fit_is_not_named() -> None:
    sharded = made(layout=LayoutSpec(dp_shard=2))
    gathers = as_told(replace(RAW, all_gather=linear(1.0), reduce_scatter=linear(1.0)))
    assert other_layout(look_ahead(sharded, replace(MACHINE, memory_bytes=1), gathers)) is None


def test_on_gpus_each_change_is_planned() -> None:
    planned = plan(replace(GPU_SPEC, compile=True), H100S)
    outlook = on_gpus(planned)
    before = gpu_parts_s(setup_of(planned, H100S), efficiency_of(planned.spec.cluster))

    def saved(change: str) -> float:
        return sum(before[part] * (1 - factor) for part, factor in factors(outlook, change).items() if part in before)

    assert 0 < saved(FASTER) < 0.5 * sum(before.values()), "the host and the links are no faster"
    assert saved(WIDER) > saved(FASTER) > saved(SOONER) > 0
    assert sum(outlook.shares.values()) == pytest.approx(1.0)
    assert outlook.exposed == pytest.approx({EXCHANGES: 1.0, BUBBLE: 0.0})
    assert before["exposed_comm"] > 0.45 * sum(before.values()), "the exchanges take most of this step"


def test_the_first_choice_of_the_search_is_another_layout_until_it_is_in_force() -> None:
    slow = replace(GPU_SPEC, layout=LayoutSpec(tp=8), batching=replace(GPU_SPEC.batching, micro_batch_size=1))
    outlook = on_gpus(plan(slow, H100S))
    found = other_layout(outlook)
    assert found is not None
    assert on_gpus(plan(slow, H100S)) == outlook
    keys = dict(key.split("=") for key in found.removeprefix("another layout: ").split())
    sizes = {key.removeprefix("layout."): build_value(value) for key, value in keys.items() if "layout." in key}
    assert sizes["tp"] != 8
    chosen = replace(slow, layout=LayoutSpec(**sizes))
    assert other_layout(on_gpus(plan(chosen, H100S))) is None


def build_value(text: str) -> Any:
    return int(text) if text.isdigit() else text


def test_replica_groups_keep_their_layout() -> None:
    elastic = replace(
        GPU_SPEC,
        layout=LayoutSpec(dp_replicate=2),
        resilience=ResilienceSpec(mode="elastic", replica_groups=2),
        cluster=ClusterSpec(num_nodes=2),
    )
    assert other_layout(on_gpus(plan(elastic, H100S))) is None


@pytest.mark.parametrize(
    ("planned", "why"),
    [
        (made(), "no probe"),
        (made(layout=LayoutSpec(tp=2)), "this kind of run"),
        (replace(made(), device="cuda"), "no accelerator like"),
    ],
)
def test_what_the_planner_does_not_know_is_said(planned: Plan, why: str) -> None:
    outlook = look_ahead(planned, MACHINE, None)
    assert not outlook.is_known
    assert outlook.changes == ()
    assert why in outlook.basis
