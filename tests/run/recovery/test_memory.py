"""The settings that a run takes in turn where its memory runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import MACHINE, SPEC
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.run.recovery.memory import (
    OFFLOAD,
    RECOMPUTE,
    apply_reliefs,
    build_ladder,
    next_setting,
    rank_setting,
    with_reliefs,
)

SETTINGS = st.builds(MemorySetting, st.integers(1, 40), st.sampled_from(RECOMPUTE), st.sampled_from(OFFLOAD))


def setting(text: str) -> MemorySetting:
    """`4`, `1 selective`, `1 full optimizer`."""
    size, recompute, offload = (*text.split(), "none", "none")[:3] if " " in text else (text, "none", "none")
    return MemorySetting(int(size), recompute, offload)  # type: ignore[arg-type]


def settings(*texts: str) -> tuple[MemorySetting, ...]:
    return tuple(map(setting, texts))


@pytest.mark.parametrize(
    ("start", "rules", "ladder"),
    [
        ("8", {}, ("8", "4", "2", "1", "1 selective", "1 full", "1 full optimizer")),
        ("7", {"may_offload": False}, ("7", "4", "2", "1", "1 selective", "1 full")),
        ("1 selective", {}, ("1 selective", "1 full", "1 full optimizer")),
        ("2 full optimizer", {}, ("2 full optimizer", "1 full optimizer")),
        ("1 full optimizer", {}, ("1 full optimizer",)),
        ("8", {"keeps_micro_batches": True}, ("8", "8 selective", "8 full", "8 full optimizer")),
    ],
)
def test_the_ladder(start: str, rules: dict[str, bool], ladder: tuple[str, ...]) -> None:
    assert build_ladder(setting(start), **rules) == settings(*ladder)


def test_a_setting_that_is_predicted_to_take_no_less_is_left_out() -> None:
    """Without gradient accumulation in flight a smaller micro-batch may win nothing, as under GPipe."""
    needed = {"4": 10.0, "2": 10.0, "1": 9.0, "1 selective": 9.5, "1 full": 7.0, "1 full optimizer": 3.0}
    by_setting = {setting(text): needed_bytes for text, needed_bytes in needed.items()}
    ladder = build_ladder(setting("4"), needed_bytes=by_setting.__getitem__)
    assert ladder == settings("4", "1", "1 full", "1 full optimizer")


def test_a_setting_that_nobody_can_predict_is_kept() -> None:
    known = {setting("2"): 10.0, setting("1"): 8.0}
    ladder = build_ladder(setting("2"), needed_bytes=known.get)
    assert ladder == settings("2", "1", "1 selective", "1 full", "1 full optimizer")


LADDER = settings("4", "2", "1", "1 selective", "1 full")


@pytest.mark.parametrize(
    ("failed", "taken", "following"),
    [
        ("4", None, "2"),
        ("6", None, "4"),  # a fast rank's larger share: the plan's own micro-batch is less
        ("3", None, "2"),
        ("1", None, "1 selective"),
        ("1 full", None, None),
        ("4", "2", "1"),  # what was taken did not reach the workers: it is not taken again
        ("1", "4", "1 selective"),
    ],
)
def test_the_setting_after_a_shortage(failed: str, taken: str | None, following: str | None) -> None:
    found = next_setting(LADDER, setting(failed), setting(taken) if taken else None)
    assert found == (setting(following) if following else None)


@given(SETTINGS, SETTINGS, st.booleans())
def test_shortages_without_end_take_each_setting_once_and_end(
    start: MemorySetting, failed: MemorySetting, keeps: bool
) -> None:
    """Whatever the first failure was: the workers then run what was taken, and fail again."""
    ladder = build_ladder(start, keeps_micro_batches=keeps)
    assert list(ladder) == sorted(ladder, key=rank_setting)
    reliefs: list[Relief] = []
    while (taken := next_setting(ladder, failed)) is not None:
        reliefs.append(Relief(failed, taken))
        assert apply_reliefs(failed, reliefs) == taken
        failed = taken
    assert len({relief.taken for relief in reliefs}) == len(reliefs) <= len(ladder)


@given(SETTINGS, st.lists(st.builds(Relief, SETTINGS, SETTINGS), max_size=6))
def test_a_run_settles_whatever_its_folder_says(start: MemorySetting, reliefs: list[Relief]) -> None:
    assert rank_setting(apply_reliefs(start, reliefs)) >= rank_setting(start)


def test_a_setting_that_asks_for_less_than_what_failed_stays() -> None:
    relief = Relief(setting("8"), setting("4"))
    assert apply_reliefs(setting("6"), [relief]) == setting("6")
    assert apply_reliefs(setting("9"), [relief]) == setting("4")
    assert apply_reliefs(setting("8 full"), [relief]) == setting("8 full")


def test_a_plan_after_a_shortage_makes_the_same_batch_of_smaller_parts() -> None:
    before = replace(plan(SPEC, MACHINE), largest_micro_batch_size=16)
    assert (before.micro_batch_size, before.grad_accum_steps) == (8, 1)
    after = with_reliefs(before, [Relief(setting("8"), setting("3"))])
    assert (after.micro_batch_size, after.grad_accum_steps, after.largest_micro_batch_size) == (3, 3, 3)
    assert after.spec == before.spec
    assert with_reliefs(before, []) == before
    shared = with_reliefs(before, [Relief(setting("12"), setting("8"))])
    assert (shared.micro_batch_size, shared.largest_micro_batch_size) == (8, 8)


def test_a_setting_is_described_by_what_it_changes() -> None:
    assert setting("4").describe(setting("8")).startswith("micro-batches of 4 ")
    assert setting("1").describe(setting("2")).startswith("micro-batches of 1 ")
    assert setting("1 full").describe(setting("1 selective")) == "recompute=full"
    whole = setting("1 full").describe()
    assert all(value in whole for value in ("micro-batches of 1 ", "recompute=full", "offload=none"))
