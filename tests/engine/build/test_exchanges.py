"""One list has all exchanges of a step: the engine makes no others, and the planner counts no others."""

from __future__ import annotations

import pytest
from lab.drawing import slow_after

from trainspec_cli.engine.build.exchanges import STEP_EXCHANGES
from trainspec_cli.engine.tools.trace import trace_rank
from trainspec_cli.planner.blueprint import draw_blueprint
from trainspec_cli.planner.hardware.cluster import Fabric
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.setup import Setup
from trainspec_cli.recipe.keys.cluster import FabricSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.wings.certify.cases import Case, build_plan

PLANNED_AS = {
    ("cp", "all_gather"): {("cp", "send")},  # a ring of keys and values moves what gathering them does
    ("dp", "all_reduce"): {("dp_replicate", "all_reduce")},
    ("dp", "reduce_scatter"): {("dp_shard", "reduce_scatter")},
    ("dp", "all_gather"): {("dp_shard", "all_gather")},
}
"""Exchanges that the planner counts by another name; `dp` are all ranks that hold the same part of the model."""
LAYOUTS = (
    Layout(tp=8, pp=4, dp_shard=8, zero_stage=1),
    Layout(dp_shard=4, cp=2, dp_replicate=2),
    Layout(dp_replicate=8),
)


def is_listed(axis: str, operation: str) -> bool:
    return operation in STEP_EXCHANGES.get(axis, ())


@pytest.mark.parametrize(
    ("family", "layout"),
    slow_after(
        1,
        [
            ("dense", Layout(tp=2, dp_shard=2)),
            ("tied", Layout(pp=2)),
            ("moe", Layout(cp=2)),
            ("dense", Layout(cp=2, context_method="ulysses")),
            ("dense", Layout(pp=2, dp_replicate=2)),
            ("moe", Layout(dp_shard=4, ep=2)),
        ],
    ),
    ids=str,
)
def test_the_engine_exchanges_only_what_is_listed(family: str, layout: Layout) -> None:
    plan = build_plan(Case(family, layout, micro_batch_size=1), "cpu")
    found = [kind.split() for kind in trace_rank(plan, 0).comm_bytes]
    assert found
    # torch keeps one group for the same ranks: an axis of all ranks carries what ends the step as well.
    everybody = "dp_shard" if layout.dp_shard == layout.world_size else None
    others = [
        [axis, of] for axis, of in found if not is_listed(axis, of) and not (axis == everybody and is_listed("all", of))
    ]
    assert others == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_the_planner_counts_only_what_is_listed(layout: Layout) -> None:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    model = DecoderModel(32, 4096, 32, 8, 128, 14336, 128256)
    fabric = Fabric(chip, layout.world_size, 8, 8, 450.0, 400.0)
    setup = Setup(model, layout, fabric, seq_len=8192, micro_batch_size=1.0, grad_accum=16)
    planned = {(one.axis, one.operation) for one in draw_blueprint(setup, FabricSpec(), Efficiency()).exchanges}
    assert planned
    made = set().union(*(PLANNED_AS.get(one, {one}) for one in planned))
    assert [one for one in sorted(made) if not is_listed(*one)] == []
