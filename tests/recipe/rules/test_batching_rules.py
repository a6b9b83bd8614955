"""What a batch that changes over the run must agree with, told with the key it concerns and what to type."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from lab.problems import assert_problems

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import RampStage
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.rules.check import check, check_engine
from trainspec_cli.recipe.rules.run import largest_size, measurable_noise, noise_hindrance

PATH = "batching.schedule"
LARGEST = f"{PATH}.max_global_batch_size"
RAMP: dict[str, Any] = {f"{PATH}.kind": "ramp"}
SEESAW: dict[str, Any] = {f"{PATH}.kind": "seesaw"}
NOISE: dict[str, Any] = {f"{PATH}.kind": "noise", LARGEST: 64}


def stages(*pairs: tuple[int, int]) -> dict[str, Any]:
    made = [{"from_tokens": tokens, "global_batch_size": size} for tokens, size in pairs]
    return {f"{PATH}.stages": made}


@pytest.mark.parametrize(
    "changes",
    [
        RAMP | stages((100, 16), (200, 16), (300, 64)),
        SEESAW,
        SEESAW | {LARGEST: 12},
        SEESAW | {"optim.schedule.final_lr_ratio": 0, LARGEST: 64},
        SEESAW | {"optim.schedule.kind": "wsd"},
        NOISE,
        NOISE | {"cluster.devices_per_node": "auto"},
    ],
)
def test_sound_schedules(make_spec, changes: dict[str, Any]) -> None:
    assert check(make_spec(changes)) == []


@pytest.mark.parametrize(
    ("changes", "code", "path", "parts"),
    [
        (RAMP, "missing_value", f"{PATH}.stages", [f"{PATH}.stages='[{{from_tokens: 1e9, global_batch_size: 16}}]'"]),
        (stages((100, 16)), "unsupported", f"{PATH}.stages",
         [" 1 ", "is constant", f"{PATH}.kind=ramp, or ~{PATH}.stages"]),
        (RAMP | stages((200, 16), (100, 32)), "out_of_range", f"{PATH}.stages.1.from_tokens", [" 100,", " 200"]),
        (RAMP | stages((200, 16), (200, 32)), "out_of_range", f"{PATH}.stages.1.from_tokens", [" 200,", "201 or more"]),
        (RAMP | stages((100, 4)), "out_of_range", f"{PATH}.stages.0.global_batch_size", [" 4,", "have 8", "8 or more"]),
        (RAMP | stages((100, 32), (200, 24)), "out_of_range", f"{PATH}.stages.1.global_batch_size",
         [" 24,", "have 32", "set 32 or more"]),
        (RAMP | stages((0, 16)), "out_of_range", f"{PATH}.stages.0.from_tokens",
         [" 0;", f"set {PATH}.stages.0.from_tokens=1 or more"]),
        (RAMP | stages((100, 16)) | {LARGEST: 64}, "unsupported", LARGEST, ["kind` is ramp", f"set {LARGEST}=null"]),
        (SEESAW | {LARGEST: 4}, "out_of_range", LARGEST, [" 4,", "begins with 8", f"set {LARGEST}=12 or more"]),
        (SEESAW | {LARGEST: 8}, "out_of_range", f"{PATH}.growth", ["between 8 ", ", 8"]),
        (SEESAW | {LARGEST: 11}, "out_of_range", f"{PATH}.growth",
         ["between 8 ", ", 11", f"set {PATH}.growth=1.1, a larger {LARGEST}"]),
        (SEESAW | {"optim.schedule.final_lr_ratio": 0.8}, "out_of_range", f"{PATH}.growth", ["between 8 ", ", 10"]),
        (SEESAW | {"optim.schedule.final_lr_ratio": 0}, "missing_value", LARGEST, ["ends at 0", f"set {LARGEST}=64"]),
        (SEESAW | {"optim.schedule.kind": "constant"}, "unsupported", "optim.schedule.kind",
         [f"set optim.schedule.kind=cosine, or {PATH}.kind=constant"]),
        (SEESAW | {"optim.schedule.final_lr_ratio": 1}, "unsupported", "optim.schedule.final_lr_ratio",
         ["set optim.schedule.final_lr_ratio=0.1"]),
        (SEESAW | {"optim.schedule.kind": "wsd", "optim.schedule.decay_fraction": 0}, "unsupported",
         "optim.schedule.decay_fraction", ["set optim.schedule.decay_fraction=0.2"]),
        (SEESAW | {f"{PATH}.lr_rule": "none"}, "unsupported", f"{PATH}.lr_rule",
         ["without seesaw", f"set {PATH}.lr_rule=optimizer"]),
        (NOISE | {LARGEST: None}, "missing_value", LARGEST, ["noise scale", f"set {LARGEST}=64"]),
        (NOISE | {LARGEST: 7}, "out_of_range", LARGEST, [" 7,", "begins with 8", f"set {LARGEST}=12 or more"]),
        (NOISE | {"cluster.devices_per_node": 1}, "unsupported", f"{PATH}.kind",
         ["there is only 1", "set cluster.devices_per_node=2 or more"]),
        (NOISE | {"layout.tp": 2}, "unsupported", f"{PATH}.kind", ["there is only 1", f"or {PATH}.kind=seesaw"]),
        (NOISE | {f"{PATH}.growth": 1}, "out_of_range", f"{PATH}.growth",
         ["1.05 and at most 16", f"set {PATH}.growth=1.05 or more"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make_spec, changes, code: str, path: str, parts: list[str]) -> None:
    assert_problems(check(make_spec(changes)), (code, path, *parts))


def test_every_stage_that_is_wrong_is_named(make_spec) -> None:
    problems = check(make_spec(RAMP | stages((300, 4), (200, 3), (100, 2))))
    assert [problem.path.removeprefix(f"{PATH}.stages.") for problem in problems] == [
        "0.global_batch_size",
        "1.from_tokens",
        "1.global_batch_size",
        "2.from_tokens",
        "2.global_batch_size",
    ]


def test_a_stage_is_read_with_its_types(data) -> None:
    data["batching"]["schedule"] = {"kind": "ramp", "stages": [{"from_tokens": 252e6, "global_batch_size": 16}]}
    spec, problems = build(RunSpec, data)
    assert problems == []
    assert spec is not None
    assert spec.batching.schedule.stages == (RampStage(252_000_000, 16),)


def test_a_stage_with_a_wrong_key_or_type_is_named(data) -> None:
    data["batching"]["schedule"] = {"stages": [{"from_tokens": "1e9", "batch_size": 16}]}
    _, problems = build(RunSpec, data)
    assert [(problem.code, problem.path) for problem in problems] == [
        ("unknown_key", f"{PATH}.stages.0.batch_size"),
        ("wrong_type", f"{PATH}.stages.0.from_tokens"),
        ("missing_value", f"{PATH}.stages.0.global_batch_size"),
    ]


def test_the_largest_size_is_what_the_lowest_rate_asks_for_or_the_bound(make_spec) -> None:
    assert largest_size(make_spec(SEESAW)) == 80
    assert largest_size(make_spec(SEESAW | {LARGEST: 40})) == 40
    assert largest_size(make_spec(SEESAW | {"optim.schedule.final_lr_ratio": 0, LARGEST: None})) == math.inf
    assert largest_size(make_spec(NOISE)) == 64


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"cluster.devices_per_node": 1}, ["unsupported"]),
        ({"cluster.devices_per_node": 2, "layout.pp": 2}, ["unsupported"]),
        ({"cluster.num_nodes": 4, "cluster.devices_per_node": 4, "layout.pp": 2}, []),
        ({"cluster.devices_per_node": "auto"}, []),
        ({"cluster.devices_per_node": 2, "layout.tp": "auto"}, []),
    ],
)
def test_noise_needs_two_data_parallel_ranks_where_their_number_is_known(make_spec, changes, codes) -> None:
    assert [problem.code for problem in check(make_spec(NOISE | changes))] == codes


@pytest.mark.parametrize(
    ("layout", "micro_batches", "tied", "why"),
    [
        (Layout(), 4, False, "there is only 1"),
        (Layout(tp=2, pp=2), 4, False, "there is only 1"),
        (Layout(dp_shard=2, pp=2), 4, True, "tied embedding"),
        (Layout(dp_shard=2, tp=2, cp=2, ep=2), 4, False, "2 ranks of ep"),
        (Layout(dp_shard=2, ep=2), 1, False, "same experts"),
        (Layout(dp_shard=2, ep=2, zero_stage=1), 4, False, "same experts"),
        (Layout(dp_shard=2, tp=2, ep=4), 1, False, "same experts"),
        (Layout(dp_shard=2, ep=2), 2, False, ""),
        (Layout(dp_shard=4, ep=2), 1, False, ""),
        (Layout(dp_replicate=2, dp_shard=2, ep=2), 1, False, ""),
        (Layout(dp_shard=2, tp=2, ep=2), 1, False, ""),
        (Layout(dp_shard=2, tp=2, cp=2), 1, False, ""),
        (Layout(dp_shard=2, pp=2, zero_stage=1), 1, True, ""),
        (Layout(dp_shard=2, pp=2), 1, False, ""),
        (Layout(dp_shard=2), 1, True, ""),
        (Layout(dp_replicate=2), 1, False, ""),
    ],
)  # fmt: skip
def test_noise_that_nobody_can_measure_is_refused_with_the_reason(
    make_spec, layout: Layout, micro_batches: int, tied: bool, why: str
) -> None:
    spec = make_spec(NOISE)
    spec = replace(spec, model=replace(spec.model, tied_embeddings=tied))
    problems = list(measurable_noise(spec, layout, 1, micro_batches))
    assert list(measurable_noise(make_spec(SEESAW), layout, 1, micro_batches)) == []
    if not why:
        assert problems == []
        return
    remedies = ("layout=ddp cluster.devices_per_node=2", f"{PATH}.kind=seesaw")
    assert_problems(problems, ("unsupported", f"{PATH}.kind", "is noise", f"({layout.describe()})", why, *remedies))


def test_replica_groups_measure_the_noise_and_follow_none(make_spec) -> None:
    problems = measurable_noise(make_spec(NOISE), Layout(dp_shard=2), 3, 1)
    remedies = ("resilience=restart", f"{PATH}.kind=seesaw")
    assert_problems(problems, ("unsupported", f"{PATH}.kind", "replica group (of 3)", *remedies))
    assert noise_hindrance(make_spec(NOISE).model, Layout(), 2, 1) == "", "between groups of one rank each"


@pytest.mark.parametrize("schedule", [RAMP | stages((100, 16)), SEESAW, NOISE])
def test_every_schedule_is_trained(make_spec, schedule: dict[str, Any]) -> None:
    assert check_engine(make_spec(schedule | {"layout.tp": 1})) == []
