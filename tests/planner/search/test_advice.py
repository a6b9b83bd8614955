"""What is said where nothing fits: each line is an override that makes a plan, typed as it stands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainspec_cli.planner.capacity import advise, plan_capacity
from trainspec_cli.planner.search.space import open_layout
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.session.recipe.load import load_for_planning

FOUR_4090 = ("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=1", "cluster.devices_per_node=4")
FOUR_4090 += ("cluster.accelerator=rtx_4090",)
NF4 = ["lora.rank=16", "lora.base=nf4"]
PINNED = ("layout.tp=1", "layout.pp=1", "layout.cp=1", "recompute=none")


def advice_for(arguments: Sequence[str]) -> list[str]:
    spec = load_for_planning(arguments).spec
    assert plan_capacity(spec).best is None
    return list(advise(spec))


def typed(line: str) -> list[str]:
    return line.partition(" fits at ")[0].split()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (FOUR_4090, [["offload=optimizer"], ["lora.rank=16"], ["cluster.num_nodes=2", "layout=auto"]]),
        (
            ("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=1", *PINNED, "batching.micro_batch_size=2"),
            [["recompute=full"], ["layout=auto", "recompute=auto"]],
        ),
        pytest.param(
            ("recipe=llama3_405b", "cluster=h100", "cluster.num_nodes=1"),
            [NF4, ["cluster.num_nodes=16"]],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["four 4090s", "a pinned layout", "far too large"],
)  # fmt: skip
def test_every_line_makes_the_run_fit_as_it_is_typed(arguments: tuple[str, ...], expected: list[list[str]]) -> None:
    lines = advice_for(arguments)
    for wanted in expected:
        assert any(typed(line)[: len(wanted)] == wanted for line in lines), (wanted, lines)
    for line in lines:
        keys = {word.partition("=")[0] for word in typed(line)}
        freed = [word for word in arguments if not ("layout" in keys and word.startswith("layout."))]
        kept = [word for word in freed if word.partition("=")[0] not in keys]
        assert plan_capacity(load_for_planning([*kept, *typed(line)]).spec).best is not None, line


def test_two_changes_are_named_where_neither_suffices() -> None:
    lines = advice_for((*FOUR_4090, *PINNED, "layout.dp_shard=1"))
    assert ["layout=auto", "recompute=auto", "lora.rank=16"] in map(typed, lines)
    assert ["layout=auto", "recompute=auto"] not in map(typed, lines)
    assert ["lora.rank=16"] not in map(typed, lines)


def test_adapters_are_not_suggested_to_what_takes_none() -> None:
    """Nor what the recipe asks for anyway."""
    arguments = ("recipe=mamba2_3b", "cluster=h100", "cluster.accelerator=rtx_4090", "cluster.num_nodes=1")
    arguments += ("cluster.devices_per_node=1",)
    assert not any("lora" in line for line in advice_for(arguments))
    offloaded = advice_for((*FOUR_4090, "offload=optimizer", *PINNED, "layout.dp_shard=1"))
    assert not any("offload" in line for line in offloaded)


def test_adapters_say_what_they_begin_with() -> None:
    (line,) = (line for line in advice_for(FOUR_4090) if line.startswith("lora"))
    assert line.endswith("training adapters of an `init.from`, not all weights")


@pytest.mark.slow
def test_a_base_in_four_bits_is_suggested_to_adapters_that_do_not_fit() -> None:
    lines = advice_for(("recipe=llama3_405b", "cluster=h100", "cluster.num_nodes=1", "lora.rank=8"))
    (line,) = (line for line in lines if "lora" in line)
    assert typed(line)[-1] == "lora.base=nf4" and "training adapters" not in line


def test_open_axes_keep_what_is_no_axis() -> None:
    spec = load_for_planning(["recipe=llama3_8b", "layout.etp=2", "layout.sequence_parallel=false"]).spec
    opened = open_layout(spec)
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage", "pipeline_schedule", "virtual_stages")
    assert [getattr(opened, axis) for axis in axes] == [AUTO] * 9
    assert isinstance(opened, LayoutSpec) and (opened.etp, opened.sequence_parallel) == (2, False)
