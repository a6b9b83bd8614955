"""Changes of a run: the step, what changed, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.events import LEFT_OUT, LEFT_OUT_ACHIEVED, MEMORY

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
    reason="data-parallel rank 2 computes a sample in 44 ms (median: 24 ms)",
    before_s=0.5,
    expected_s=0.31,
)
REASON = "data-parallel rank 2 computes a sample in 44 ms (median: 24 ms)"


def test_a_directive() -> None:
    shown = f"step 30: shares are now 9, 9, 5, 9 of 32: {REASON}; 38% less compute time is expected"
    assert describe_event(DIRECTIVE) == shown
    achieved = AchievedEvent(step=37, number=1, before_s=0.4, expected_s=0.31, achieved_s=0.3)
    assert describe_directive(DIRECTIVE, achieved).line == f"{shown}, 25% achieved"
    assert describe_event(achieved) == ""
    advice = replace(DIRECTIVE, applied=False, group=1)
    assert describe_event(advice).startswith(
        "step 30: group 1: advice: scheduler=auto would make shares 9, 9, 5, 9 of 32: data-parallel"
    )


def test_of_advice_on_shares_the_newest_counts():
    shares = [replace(DIRECTIVE, applied=False, step=step, group=group) for step, group in ((1, 0), (2, 1), (3, 0))]
    listed = [shares[0], DIRECTIVE, *shares[1:], replace(shares[0], kind="layout")]
    assert without_old_advice(listed) == listed[1:]
    even = replace(shares[2], counts=(8, 8, 8, 8))
    assert without_old_advice([*listed[:-2], even]) == [DIRECTIVE, shares[1]]
    assert "would make" not in describe_directive(even).line
    assert "would make" not in describe_directive(replace(even, counts=(4, 3, 3))).line
    assert describe_directive(replace(even, applied=True)).line.startswith("step 3: group 0: shares are now 8 each")


def test_the_size_of_buckets_with_what_the_others_would_cost() -> None:
    tries = (BucketTry(0, 0.009), BucketTry(2**22, 0.003))
    found = BucketsEvent(step=12, layout="dp_shard=2", bucket_bytes=2**22, tries=tries)
    shown = "gradients are reduced in buckets of 4.00 MiB: a step waits 3 ms for them (block by block 9 ms)"
    assert describe_event(found) == f"step 12: {shown}"
    kept = replace(found, bucket_bytes=0, group=1)
    shown = "gradients are reduced block by block: a step waits 9 ms for them (in buckets of 4.00 MiB 3 ms)"
    assert describe_event(kept) == f"step 12: group 1: {shown}"


def test_a_shortage_of_memory() -> None:
    shown = "micro-batches of 4 samples from here on"
    assert describe_event(MEMORY) == f"step 3: {shown} (after a restart, no step lost): {MEMORY.reason}"
    killed = replace(MEMORY, lost_steps=2, was_killed=True, group=1, taken=MemorySetting(8, "full", "none"))
    assert describe_event(killed).startswith("step 3: group 1: recompute=full from here on (after a restart, 2 steps")
    assert "(in place, no step lost)" in describe_event(replace(MEMORY, restarts=False))


def test_a_node_that_is_left_out() -> None:
    pace = "its ranks take 4.1 times as long as usual to compute; a step took 2.1 s and is expected to take 1.3 s"
    assert describe_left_out(LEFT_OUT).line == describe_event(LEFT_OUT) == f"step 120: node 3 is dropped: {pace}"
    spare, restart = replace(LEFT_OUT, spare=4), "it now takes 1.4 s (the restart took 31.0 s)"
    shown = f"step 120: node 3 is dropped, node 4 takes its place: {pace}; {restart}"
    assert describe_left_out(spare, LEFT_OUT_ACHIEVED).line == shown
    lost = replace(LEFT_OUT, reason="lost", spare=4, pace=ABSENT, before_s=ABSENT, expected_s=ABSENT)
    assert describe_left_out(lost).line.startswith("step 120: node 3 was lost, node 4 takes its place: 3 nodes")
    assert "again" in describe_left_out(replace(lost, reason="returned")).line
    advice = describe_left_out(replace(LEFT_OUT, applied=False)).line
    assert advice == f"step 120: advice: scheduler=auto would drop node 3: {pace}"


def test_a_directive_whose_times_are_damaged() -> None:
    assert describe_event(replace(DIRECTIVE, before_s=0.0)).endswith("; ? less compute time is expected")


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


def test_a_change_of_layout_says_what_it_was_and_took() -> None:
    took = "1.00 MiB moved in 310 ms, with at most 3.00 MiB of the state in any process during the change"
    layouts = "pp=2 dp_shard=2 zero_stage=1, and was dp_shard=4 zero_stage=3"
    assert describe_event(RELAYOUT) == f"step 30: the layout is now {layouts}: the recipe plans it; {took}"
    gained = replace(RELAYOUT, before_s=1.0, expected_s=0.8)
    assert describe_event(gained).endswith(f"{took}; 20% shorter steps are expected")
    achieved = AchievedEvent(step=60, number=1, before_s=1.0, expected_s=0.8, achieved_s=0.9)
    assert describe_directive(gained, achieved).line.endswith("20% shorter steps are expected, 10% achieved")
    advice = replace(gained, applied=False, pause_s=ABSENT, reason="advice: rank 3 is slow")
    assert describe_event(advice) == (
        "step 30: the layout is dp_shard=4 zero_stage=3; advice: scheduler=auto would change this to pp=2 dp_shard=2 "
        "zero_stage=1: rank 3 is slow; 20% shorter steps are expected"
    )
    failed = replace(RELAYOUT, applied=False, pause_s=ABSENT, reason="the layout is unchanged: no memory")
    shown = "the layout is dp_shard=4 zero_stage=3 and could not be changed to pp=2 dp_shard=2 zero_stage=1"
    assert describe_event(failed) == f"step 30: {shown}: the layout is unchanged: no memory"


def test_moved_layers_say_how_they_were_cut() -> None:
    before, after = (Layout(pp=2, stage_layers=layers) for layers in (None, (3, 1)))
    moved = replace(RELAYOUT, kind="layers", before=before, layout=after)
    assert describe_event(moved).startswith("step 30: the stages' layers are now 3, 1, and were even: ")


def test_what_and_why_stand_apart() -> None:
    why = f"{REASON}; 38% less compute time is expected"
    assert describe_directive(DIRECTIVE) == RunChange(30, "shares are now 9, 9, 5, 9 of 32", why)
    lost = RunChange(41, "group 1 left", "1.26 s, 2 steps lost")
    assert describe_recovery(Recovery("left", 1, 41, 1.257, 2)) == lost


def test_changes_that_no_run_writes_have_a_line_all_the_same() -> None:
    """A stranger's run folder may hold them."""
    assert describe_recovery(Recovery("<b>", None, 4, None, None)).line == "step 4: <b>"
    nowhere = replace(RELAYOUT, before=ABSENT, layout=ABSENT, applied=False)
    assert describe_event(nowhere).startswith("step 30: the layout is ? and could not be changed to ?: ")
    assert describe_event(BucketsEvent(step=1, layout="", bucket_bytes=0, tries=())).endswith(
        ": a step waits ? for them"
    )
