"""Changes of a run: the step, what changed, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.events import LEFT_OUT, LEFT_OUT_ACHIEVED, MEMORY
from lab.recorded import Recorded

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.tables import MemorySetting
from trainspec_cli.reporter.changes import (
    RunChange,
    describe_directive,
    describe_left_out,
    describe_recovery,
    summarise_counts,
    without_old_advice,
)
from trainspec_cli.reporter.text import describe_event
from trainspec_cli.run.folder.accounting import Recovery
from trainspec_cli.run.folder.event_types.events import AchievedEvent, BucketsEvent, BucketTry, DirectiveEvent

DIRECTIVE = DirectiveEvent(
    step=30,
    number=1,
    applied=True,
    counts=(9, 9, 5, 9),
    micro_batch_size=16,
    micro_batches=1,
    reason="rank 2 is slow",
    before_s=0.5,
    expected_s=0.31,
)


def test_a_directive(recorded: Recorded) -> None:
    achieved = AchievedEvent(step=37, number=1, before_s=0.4, expected_s=0.31, achieved_s=0.3)
    assert describe_event(achieved) == ""
    advice = replace(DIRECTIVE, applied=False, group=1)
    recorded(describe_event(DIRECTIVE), describe_directive(DIRECTIVE, achieved).line, describe_event(advice))


def test_of_advice_on_shares_the_newest_counts(recorded: Recorded):
    shares = [replace(DIRECTIVE, applied=False, step=step, group=group) for step, group in ((1, 0), (2, 1), (3, 0))]
    listed = [shares[0], DIRECTIVE, *shares[1:], replace(shares[0], kind="layout")]
    assert without_old_advice(listed) == listed[1:]
    even = replace(shares[2], counts=(8, 8, 8, 8))
    assert without_old_advice([*listed[:-2], even]) == [DIRECTIVE, shares[1]]
    evens = (even, replace(even, counts=(4, 3, 3)), replace(even, applied=True))
    recorded(*(describe_directive(one).line for one in evens))


def test_the_size_of_buckets_with_what_the_others_would_cost(recorded: Recorded) -> None:
    tries = (BucketTry(0, 0.009), BucketTry(2**22, 0.003))
    found = BucketsEvent(step=12, layout="dp_shard=2", bucket_bytes=2**22, tries=tries)
    recorded(describe_event(found), describe_event(replace(found, bucket_bytes=0, group=1)))


def test_a_shortage_of_memory(recorded: Recorded) -> None:
    killed = replace(MEMORY, lost_steps=2, was_killed=True, group=1, taken=MemorySetting(8, "full", "none"))
    recorded(*map(describe_event, (MEMORY, killed, replace(MEMORY, restarts=False))))


def test_a_node_that_is_left_out(recorded: Recorded) -> None:
    assert describe_left_out(LEFT_OUT).line == describe_event(LEFT_OUT)
    replaced = describe_left_out(replace(LEFT_OUT, spare=4), LEFT_OUT_ACHIEVED)
    advice = describe_left_out(replace(LEFT_OUT, applied=False))
    lost = replace(LEFT_OUT, reason="lost", spare=4, pace=ABSENT, before_s=ABSENT, expected_s=ABSENT)
    others = [replace(lost, reason=reason, spare=ABSENT) for reason in ("unfit", "returned")]
    recorded(describe_event(LEFT_OUT), replaced.line, advice.line, *map(describe_event, (lost, *others)))


def test_a_directive_whose_times_are_damaged(recorded: Recorded) -> None:
    recorded(describe_event(replace(DIRECTIVE, before_s=0.0)))


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ((8, 8, 8, 8), "8 each"),
        ((5, 9), "5, 9 of 14"),
        ((9,) * 8 + (4,), "4 to 9 of 76"),
        ((1500,) * 9 + (400,), "400 to 1,500 of 13,900"),
    ],
)
def test_shares(counts: tuple[int, ...], shown: str) -> None:
    assert summarise_counts(counts) == shown


RELAYOUT = replace(
    DIRECTIVE,
    kind="layout",
    reason="the recipe plans it",
    before_s=0.0,
    expected_s=0.0,
    before=Layout(dp_shard=4),
    layout=Layout(pp=2, dp_shard=2, zero_stage=1),
    pause_s=0.31,
    moved_bytes=2**20,
    peak_bytes=3 * 2**20,
)


def test_a_change_of_layout_says_what_it_was_and_took(recorded: Recorded) -> None:
    gained = replace(RELAYOUT, before_s=1.0, expected_s=0.8)
    achieved = AchievedEvent(step=60, number=1, before_s=1.0, expected_s=0.8, achieved_s=0.9)
    advice = replace(gained, applied=False, pause_s=ABSENT, reason="advice: rank 3 is slow")
    failed = replace(RELAYOUT, applied=False, pause_s=ABSENT, reason="the layout is unchanged: no memory")
    recorded(
        describe_event(RELAYOUT),
        describe_event(gained),
        describe_directive(gained, achieved).line,
        describe_event(advice),
        describe_event(failed),
    )


def test_moved_layers_say_how_they_were_cut(recorded: Recorded) -> None:
    before, after = (Layout(pp=2, stage_layers=layers) for layers in (None, (3, 1)))
    moved = replace(RELAYOUT, kind="layers", before=before, layout=after)
    recorded(describe_event(moved))


def test_what_and_why_stand_apart() -> None:
    change = describe_directive(DIRECTIVE)
    assert (change.step, change.line) == (30, f"step 30: {change.what}: {change.why}")
    assert change.what.endswith("9, 9, 5, 9 of 32") and change.why.startswith(f"{DIRECTIVE.reason}; 38% ")
    lost = RunChange(41, "group 1 left", "1.26 s, 2 steps lost")
    assert describe_recovery(Recovery("left", 1, 41, 1.257, 2)) == lost


def test_changes_that_no_run_writes_have_a_line_all_the_same(recorded: Recorded) -> None:
    """A stranger's run folder may hold them."""
    assert describe_recovery(Recovery("<b>", None, 4, None, None)).line == "step 4: <b>"
    nowhere = replace(RELAYOUT, before=ABSENT, layout=ABSENT, applied=False)
    recorded(*map(describe_event, (nowhere, BucketsEvent(step=1, layout="", bucket_bytes=0, tries=()))))
