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
    ("changes", "path", "message", "hint"),
    [
        (RAMP, f"{PATH}.stages", "is empty; a ramp needs at least one stage",
         f"set {PATH}.stages='[{{from_tokens: 1e9, global_batch_size: 16}}]'"),
        (stages((100, 16)), f"{PATH}.stages", "has 1 sizes, but `batching.schedule.kind` is constant",
         f"set {PATH}.kind=ramp, or ~{PATH}.stages"),
        (RAMP | stages((200, 16), (100, 32)), f"{PATH}.stages.1.from_tokens",
         "is 100, but the previous stage begins at 200", "order the stages by tokens"),
        (RAMP | stages((200, 16), (200, 32)), f"{PATH}.stages.1.from_tokens",
         "is 200, but the previous stage begins at 200", "201 or more"),
        (RAMP | stages((100, 4)), f"{PATH}.stages.0.global_batch_size",
         "is 4, but the steps before it have 8", "a ramp never shrinks the batch: set 8 or more"),
        (RAMP | stages((100, 32), (200, 24)), f"{PATH}.stages.1.global_batch_size",
         "is 24, but the steps before it have 32", "set 32 or more"),
        (RAMP | stages((0, 16)), f"{PATH}.stages.0.from_tokens",
         "is 0; expected a whole number of at least 1", f"set {PATH}.stages.0.from_tokens=1 or more"),
        (RAMP | stages((100, 16)) | {LARGEST: 64}, LARGEST, "kind` is ramp, which has no largest size",
         f"set {LARGEST}=null"),
        (SEESAW | {LARGEST: 4}, LARGEST, "is 4, but the run begins with 8", f"set {LARGEST}=12 or more"),
        (SEESAW | {LARGEST: 8}, f"{PATH}.growth", "gives no size between 8 and the largest, 8", ""),
        (SEESAW | {LARGEST: 11}, f"{PATH}.growth", "gives no size between 8 and the largest, 11",
         f"set {PATH}.growth=1.1, a larger {LARGEST}"),
        (SEESAW | {"optim.schedule.final_lr_ratio": 0.8}, f"{PATH}.growth",
         "gives no size between 8 and the largest, 10", ""),
        (SEESAW | {"optim.schedule.final_lr_ratio": 0}, LARGEST, "is null and the learning rate ends at 0",
         f"set {LARGEST}=64"),
        (SEESAW | {"optim.schedule.kind": "constant"}, "optim.schedule.kind", "but it does not",
         f"set optim.schedule.kind=cosine, or {PATH}.kind=constant"),
        (SEESAW | {"optim.schedule.final_lr_ratio": 1}, "optim.schedule.final_lr_ratio", "but it does not",
         "set optim.schedule.final_lr_ratio=0.1"),
        (SEESAW | {"optim.schedule.kind": "wsd", "optim.schedule.decay_fraction": 0},
         "optim.schedule.decay_fraction", "but it does not", "set optim.schedule.decay_fraction=0.2"),
        (SEESAW | {f"{PATH}.lr_rule": "none"}, f"{PATH}.lr_rule", "would fall as it does without seesaw",
         f"set {PATH}.lr_rule=optimizer"),
        (NOISE | {LARGEST: None}, LARGEST, "is null and the noise scale has no limit", f"set {LARGEST}=64"),
        (NOISE | {LARGEST: 7}, LARGEST, "is 7, but the run begins with 8", f"set {LARGEST}=12 or more"),
        (NOISE | {"cluster.devices_per_node": 1}, f"{PATH}.kind",
         "there is only 1", "set cluster.devices_per_node=2 or more"),
        (NOISE | {"layout.tp": 2}, f"{PATH}.kind", "but there is only 1", f"or {PATH}.kind=seesaw"),
        (NOISE | {f"{PATH}.growth": 1}, f"{PATH}.growth", "expected a number of at least 1.05 and at most 16",
         f"set {PATH}.growth=1.05 or more"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make_spec, changes, path: str, message: str, hint: str) -> None:
    (problem,) = check(make_spec(changes))
    assert (problem.path, message in problem.message, hint in problem.hint) == (path, True, True), problem


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
        (Layout(dp_shard=2, pp=2), 4, True, "ZeRO-3 sums a tied embedding's gradient separately on each of its stages"),
        (Layout(dp_shard=2, tp=2, cp=2, ep=2), 4, False, "the 2 ranks of ep hold parts of a sample's gradient"),
        (Layout(dp_shard=2, ep=2), 1, False, "all data-parallel ranks train the same experts together"),
        (Layout(dp_shard=2, ep=2, zero_stage=1), 4, False, "all data-parallel ranks train the same experts together"),
        (Layout(dp_shard=2, tp=2, ep=4), 1, False, "all data-parallel ranks train the same experts together"),
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
