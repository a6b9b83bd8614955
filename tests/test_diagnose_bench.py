"""The bench of `trainspec diagnose`: what it draws, how it judges, what it counts."""

from __future__ import annotations

import pytest
from bench.diagnose.cases import (
    HEALTHY,
    MECHANISMS,
    PAIRS,
    SAMPLES,
    TEN,
    Case,
    Injection,
    case_names,
    draw_case,
    is_held_out,
)
from bench.diagnose.injectors import INJECTORS
from bench.diagnose.judge import exhaustion_told, judge
from bench.diagnose.matrix import figures, misses, render_matrix
from bench.diagnose.recipe import arguments, write_documents

from trainspec_cli.recipe.keys.training import parse_faults
from trainspec_cli.session.recipe.load import load_for_planning

NAMES = (*MECHANISMS, HEALTHY, *("+".join(pair) for pair in PAIRS))


def case_of(*injections: Injection, nodes: int = 1, each: int = 4, stages: int = 1) -> Case:
    name = "+".join(injection.mechanism for injection in injections) or HEALTHY
    return Case(name, 0, 1, nodes, each, stages, 0.1, injections)


SLOW = Injection("quota", 20, 1.5, rank=2)
NARROW = Injection("rate", 20, 1.0, node=1)


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_within_bounds_and_the_same_again(name):
    for index in range(40):
        case = draw_case(name, index, seed=3)
        assert case == draw_case(name, index, seed=3)
        assert 2 <= case.ranks <= 8 and 1 <= case.nodes <= 3
        assert case.ranks % case.stages == 0
        for one in case.injections:
            about = MECHANISMS[one.mechanism]
            assert about.low <= one.strength <= about.high
            assert (one.step == 0) == about.from_start
            assert one.rank is None or one.rank < case.ranks
            assert (one.node is not None) == (about.place in ("node", "link"))
            assert one.node is None or (case.nodes > 1 and one.node < case.nodes)
            assert (one.rank is not None) == (about.place == "rank")


def test_places_steps_and_strengths_differ_from_case_to_case():
    drawn = [draw_case("quota", index, seed=3) for index in range(60)]
    injected = [case.injections[0] for case in drawn]
    assert {one.rank for one in injected} >= {0, 1, 2, 3}
    assert {case.nodes for case in drawn} == {1, 2, 3}
    assert len({one.step for one in injected}) > 8
    assert len({one.strength for one in injected}) == 60
    assert drawn != [draw_case("quota", index, seed=4) for index in range(60)]


def test_two_at_once_are_at_two_ranks():
    for index in range(30):
        first, second = draw_case("garbage+leak", index, seed=1).injections
        assert first.rank != second.rank


def test_every_mechanism_has_an_injector():
    assert set(INJECTORS) == set(MECHANISMS)


def test_a_third_is_held_out():
    assert sum(map(is_held_out, range(30))) == 10


def test_names_of_groups_and_of_what_is_unknown():
    assert case_names("ten") == TEN and len(TEN) == 10
    assert case_names("quota,healthy") == ("quota", "healthy")
    with pytest.raises(ValueError, match=r"no gremlins; .* quota"):
        case_names("quota,gremlins")


@pytest.mark.parametrize("name", ["rate", "lengths", "stage", "slow_disk+quota"])
def test_the_recipe_is_a_legal_one(name, tmp_path):
    case = draw_case(name, 0, seed=5)
    documents = tmp_path / "documents.jsonl"
    documents.write_text('{"text": "one"}\n')
    spec = load_for_planning([*arguments(case, documents), f"cluster.num_nodes={case.nodes}"]).spec
    assert spec.batching.global_batch_size == SAMPLES * case.ranks
    throttled = [fault for fault in parse_faults(spec.fault) if fault.kind == "throttle"]
    assert [fault.rank for fault in throttled] == list(range(case.ranks))
    assert all(fault.seconds * SAMPLES == pytest.approx(case.step_s) for fault in throttled)


def test_the_heavy_stage_is_the_one_injected(tmp_path):
    case = case_of(Injection("stage", 0, 1.0, stage=1), stages=2)
    assert "layout.stage_layers=[1,3]" in arguments(case, tmp_path)
    assert list(case.ranks_of_stage(1)) == [2, 3]


def test_documents_are_of_very_uneven_lengths(tmp_path):
    write_documents(tmp_path / "documents.jsonl", seed=1)
    words = [line.count("word") for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    long = sum(count for count in words if count > 100)
    assert 0.4 < long / sum(words) < 0.9


def test_cause_and_place_must_both_be_right():
    case = case_of(SLOW)
    right = {"cause": "slow_device", "rank": 2, "since_step": 23}
    assert judge(case, [right], 21).exact
    assert judge(case, [right], 21).since_error == 2
    elsewhere = judge(case, [{**right, "rank": 1}], 21)
    assert (elsewhere.exact, elsewhere.right_cause, elsewhere.extra) == (False, True, 1)
    other = judge(case, [{**right, "cause": "slow_loader"}, right], 21)
    assert (other.cause, other.exact, other.right_cause, other.extra) == ("slow_loader", False, False, 1)
    silent = judge(case, [], 21)
    assert (silent.cause, silent.exact) == ("(none)", False)


def test_what_was_over_before_the_injection_is_counted_apart():
    past = {"cause": "narrow_link", "link": [0, 1], "since_step": 9, "until_step": 12}
    judged = judge(case_of(SLOW), [past, {"cause": "slow_device", "rank": 2, "until_step": None}], 21)
    assert (judged.exact, judged.extra, judged.earlier) == (True, 0, 1)
    assert judge(case_of(SLOW), [{**past, "until_step": 21}], 21).extra == 1


def test_as_planned_and_noise_beside_the_right_verdict_are_no_extra():
    verdicts = [{"cause": "slow_device", "rank": 2}, {"cause": "noise"}, {"cause": "as_planned"}]
    judged = judge(case_of(SLOW), verdicts, 21)
    assert (judged.exact, judged.extra) == (True, 0)


def test_of_two_causes_both_must_be_named():
    case = case_of(SLOW, NARROW, nodes=2, each=2)
    device, link = {"cause": "slow_device", "rank": 2}, {"cause": "narrow_link", "link": [1, 2]}
    assert judge(case, [link, device], 21).exact
    assert not judge(case, [link], 21).exact
    assert not judge(case, [device, {"cause": "lossy_link", "link": [1, 2]}], 21).exact


@pytest.mark.parametrize(
    ("place", "right"),
    [
        ({"link": [1, 2]}, True),
        ({"link": "rank 2 - rank 5"}, True),
        ({"link": "node1-node2"}, True),
        ({"node": 1}, True),
        ({"node": "node2"}, True),
        ({"link": [0, 4]}, False),
        ({"link": "node1-node3"}, False),
        ({"node": 0}, False),
        ({}, False),
    ],
)
def test_a_link_of_three_nodes_must_lead_to_the_one_injected(place, right):
    case = case_of(NARROW, nodes=3, each=2)
    assert judge(case, [{"cause": "narrow_link", **place}], 21).exact is right


def test_two_nodes_have_one_link():
    case = case_of(NARROW, nodes=2, each=2)
    assert judge(case, [{"cause": "narrow_link", "node": 0}], 21).exact
    assert not judge(case, [{"cause": "narrow_link", "rank": 2}], 21).exact


def test_a_healthy_run_is_as_planned_and_nothing_else():
    assert judge(case_of(), [{"cause": "as_planned"}], 1).exact
    alarm = judge(case_of(), [{"cause": "as_planned"}, {"cause": "noise"}], 1)
    assert (alarm.exact, alarm.cause) == (False, "noise")


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ({"rank": 2, "advice": "memory runs out at step 1,240 or so, since step 30"}, 1240),
        ({"rank": 2, "exhausted_step": 900}, 900),
        ({"rank": 2, "evidence": "since step 30"}, None),
        ({"rank": 1, "exhausted_step": 900}, None),
    ],
)
def test_the_step_at_which_memory_runs_out(verdict, told):
    case = case_of(Injection("leak", 20, 1e7, rank=2))
    assert exhaustion_told(case, [{"cause": "memory_leak", **verdict}], 60) == told


@pytest.mark.parametrize(("told", "near"), [(1190, 1), (810, 1), (1210, 0), (None, 0)])
def test_the_steps_that_are_left_may_be_a_fifth_off(told, near):
    case = case_of(Injection("leak", 20, 1e7, rank=2))
    result = {**result_of(case), "asked_at": 0, "exhausted_at": 1000, "exhaustion_told": told}
    assert f"leaks: {near} of 1 told" in "\n".join(figures([result]))


def result_of(
    case: Case, *verdicts: dict[str, object], named_after: int | None = None, after_s: float = 0.2
) -> dict[str, object]:
    judged = judge(case, verdicts, 21)
    told = {"named_after": named_after, "verdicts": list(verdicts), "before_s": 0.1, "after_s": after_s}
    return {"key": case.key, "case": case.to_plain(), **vars(judged), **told}


RESULTS = [
    result_of(case_of(SLOW), {"cause": "slow_device", "rank": 2, "since_step": 22}, named_after=3),
    result_of(case_of(SLOW), {"cause": "slow_device", "rank": 1}),
    result_of(case_of(SLOW), {"cause": "stolen_cores", "rank": 2}, after_s=0.11),
    result_of(case_of(), {"cause": "noise"}),
]


def test_the_matrix_counts_what_was_named_first():
    assert render_matrix(RESULTS).splitlines() == [
        "| injected | cause | cases | slow_device | stolen_cores | noise | exact |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| quota | slow_device | 3 | 2 | 1 |  | 33% |",
        "| healthy | as_planned | 1 |  |  | 1 | 0% |",
    ]


def test_figures_and_misses():
    said = "\n".join(figures(RESULTS))
    for fact in ("1 of 3 (33.3%)", "15%: 1 of 3,", "1 of 2 are exact", "runs: 1, alarms 1,", "median 3, at most 3,"):
        assert fact in said
    assert "of 4 cases: 2 " in said and " 0 on steps before" in said
    missed = list(misses(RESULTS))
    assert len(missed) == 3
    assert missed[0].startswith(
        "quota/1/0 (1 x 4 ranks, 1 stages; mechanism quota, step 20, strength 1.5, rank 2): [{'cause': 'slow_device'"
    )
