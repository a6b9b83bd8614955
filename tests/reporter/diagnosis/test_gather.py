"""The events of a run folder as evidence."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from lab.recorded import Recorded
from reporter.diagnosis.conftest import connection

from trainspec_cli.recipe.results.verdict import Look, LookOrder
from trainspec_cli.reporter.diagnosis.conclude import conclude
from trainspec_cli.reporter.diagnosis.gather import RunReader, read_run, shape_of
from trainspec_cli.run.folder.event_types.events import (
    HangEvent,
    LookEvent,
    RecoveryEvent,
    RetryEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    UsageEvent,
)
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunRecord, write_run_record
from trainspec_cli.run.recovery.watch import CHECKPOINT


def test_a_slow_rank_is_found_in_the_folder_alone(folder):
    run = folder()
    run.start()
    run.steps(1, 40)
    run.steps(41, 60, slow=3)
    (verdict,) = conclude(read_run(run.run).evidence())
    assert (verdict.cause, verdict.rank, verdict.until_step) == ("slow_device", 3, None)
    assert abs(verdict.since_step - 41) <= 2
    assert verdict.cost_s == pytest.approx(0.15, rel=0.05)


def test_the_plan_gives_the_shape(folder):
    run = folder(num_nodes=2, devices_per_node=4, replica_groups=2, layout={"pp": 2}, steps=70)
    shape = shape_of(run.run)
    assert (shape.ranks, shape.nodes, shape.total_steps) == (8, (0, 0, 0, 0, 1, 1, 1, 1), 70)
    assert shape.kinds == (0, 0, 1, 1, 0, 0, 1, 1)


def test_counters_of_a_window_are_spread_over_its_steps_and_readings_stand_at_its_end(folder):
    run = folder()
    run.start()
    run.steps(1, 6)
    run.counters(2, 4, steps=4, gc_s=0.4, rss_bytes=900, agreed_s=0.002)
    evidence = read_run(run.run).evidence()
    assert evidence.counter("gc_s")[:, 2] == pytest.approx([0.1] * 4 + [np.nan] * 2, nan_ok=True)
    assert evidence.counter("rss_bytes")[:, 2] == pytest.approx([np.nan] * 3 + [900] + [np.nan] * 2, nan_ok=True)
    assert evidence.counter("agreed_s")[0, 2] == 0.002
    assert np.isnan(evidence.counter("available_bytes")).all()
    assert np.isnan(evidence.counter("gc_s")[:, 0]).all()


def test_connections_are_matched_by_the_addresses_of_their_ends(folder):
    run = folder()
    run.start()
    run.steps(1, 4)
    run.counters(0, 4, steps=2, connections=(connection("a:1", "b:2"), connection("a:5", "c:6", resent=0)))
    run.counters(3, 4, steps=2, connections=(connection("b:2", "a:1", sent_bytes=10),))
    found = {one.ranks: one for one in read_run(run.run).evidence().connections}
    assert set(found) == {(0, 3), (3, 0), (0, 0)}
    assert found[0, 3].sent_bytes == pytest.approx([np.nan, np.nan, 2000, 2000], nan_ok=True)
    assert found[0, 3].resent[3] == 1.0
    assert found[0, 3].rtt_s[3] == 0.01


def test_a_connection_that_its_other_end_did_not_count_leads_to_the_node_of_its_address(folder):
    run = folder()
    run.start()
    run.steps(1, 4)
    run.counters(0, 4, steps=2, connections=(connection("a:1", "a:2"), connection("a:3", "x:4")))
    run.counters(2, 4, steps=2, connections=(connection("b:6", "b:7"),))
    run.counters(3, 4, steps=2, connections=(connection("b:5", "a:9", rtt_s=0.4),))
    found = {one.ranks: one for one in read_run(run.run).evidence().connections}
    assert set(found) == {(0, 0), (2, 2), (3, 0)}
    assert found[3, 0].rtt_s[3] == 0.4


def test_a_start_forgets_what_an_earlier_one_made_beyond_it(folder):
    run = folder()
    run.start()
    run.steps(1, 20)
    run.counters(0, 20, steps=10, gc_s=1.0)
    run.start(step=8)
    run.steps(9, 12)
    evidence = read_run(run.run).evidence()
    assert evidence.steps.tolist() == list(range(1, 13))
    assert np.isnan(evidence.counter("gc_s")).all()


def test_steps_that_not_all_ranks_have_written_wait(folder):
    run = folder()
    run.start()
    run.steps(1, 5)
    reader = RunReader(run.run, shape_of(run.run))
    reader.read()
    run.write(0, run.step(6))
    assert reader.read() == 1
    assert reader.evidence().steps.tolist() == [1, 2, 3, 4, 5]
    assert reader.step == 5


def test_old_steps_are_forgotten_while_a_run_is_followed(folder):
    run = folder()
    run.start()
    reader = RunReader(run.run, shape_of(run.run), remembered_steps=10)
    for first in range(1, 60, 5):
        run.steps(first, first + 4)
        reader.read()
    assert 10 <= len(reader.evidence().steps) <= 20


def test_a_long_history_is_read_from_near_its_end(folder):
    run = folder()
    run.start()
    run.steps(1, 300)
    reader = RunReader(run.run, shape_of(run.run), remembered_steps=20)
    assert 4 * 20 <= reader.read() < 4 * 100
    steps = reader.evidence().steps
    assert len(steps) >= 20 and steps[-1] == 300
    run.steps(301, 302)
    assert reader.read() == 8
    assert RunReader(run.run, shape_of(run.run)).read() == 4 * 303, "a diagnosis afterwards reads everything"


def test_a_stall_names_the_silent_rank_once_the_others_had_time_to_report(folder):
    run = folder()
    run.start()
    run.steps(1, 5)
    for rank in (0, 1, 3):
        run.stall(rank, 6)
    reader = RunReader(run.run, shape_of(run.run))
    reader.read()
    assert reader.evidence(time.time()).stalls == {}
    (verdict,) = conclude(reader.evidence(time.time() + 2))
    assert (verdict.cause, verdict.rank, verdict.since_step) == ("hang", 2, 6)
    assert any(line.endswith("gloo:all_reduce") for line in verdict.evidence)
    run.steps(6, 6)
    reader.read()
    assert reader.evidence(time.time() + 2).stalls == {}, "it came back"


def test_a_hang_that_ended_a_start_is_told_of_afterwards(folder, recorded: Recorded):
    run = folder()
    run.start()
    run.steps(1, 5)
    for rank in range(4):
        run.stall(rank, 6, waiting=rank != 1)
    hang = {"step": 6, "waited_s": 9.0, "deadline_s": 8.0, "host": "h", "waits_in": None, "collectives": {}}
    for rank in range(4):
        run.write(rank, HangEvent(waiting=rank != 1, stack="in sleep", **hang))
    run.start(step=5)
    run.steps(6, 9)
    (verdict,) = conclude(read_run(run.run).evidence())
    assert (verdict.cause, verdict.rank) == ("hang", 1)
    recorded(verdict.evidence[0])


@pytest.mark.parametrize(("hung", "named"), [(False, []), (True, ["hang"])])
def test_a_long_checkpoint_is_no_hang_before_the_steps_limit(folder, hung, named):
    """Rank 1 writes, and the others wait for it."""
    run = folder()
    run.start()
    run.steps(1, 9)
    about = {"step": 10, "waited_s": 9.0, "host": "h", "collectives": {}, "stack": "in save"}
    kind = partial(HangEvent, deadline_s=8.0) if hung else partial(StallEvent, usual_s=1.0)
    for rank in range(4):
        run.write(rank, kind(waiting=rank != 1, waits_in=CHECKPOINT if rank == 1 else "gloo:all_reduce", **about))
    found = conclude(read_run(run.run).evidence(time.time() + 9))
    assert [one.cause for one in found if one.cause == "hang"] == named


def recovery(step: int, change: str, group: int | None) -> RecoveryEvent:
    return RecoveryEvent(step=step, change=change, group=group, stall_s=1.0, lost_steps=1)


def test_steps_that_were_made_again_are_time_outs_that_came_back(folder):
    run = folder()
    run.start()
    run.steps(1, 40)
    for step in (20, 24):
        run.write(0, RetryEvent(step=step), recovery(step, "retried", None))
    verdict = conclude(read_run(run.run).evidence())[0]
    assert (verdict.cause, verdict.since_step, verdict.until_step) == ("network_timeouts", 20, 24)


def test_steps_that_were_made_again_without_a_lost_node_are_no_time_outs(folder):
    run = folder()
    run.start()
    run.steps(1, 40)
    run.write(0, RetryEvent(step=20), recovery(20, "left", 1))
    run.write(0, RetryEvent(step=30), recovery(30, "joined", 1))
    run.write(0, RetryEvent(step=41))  # whether a group has left shows when the step is made
    evidence = read_run(run.run).evidence()
    assert evidence.retried_steps == ()
    assert "network_timeouts" not in [verdict.cause for verdict in conclude(evidence)]


def test_steps_that_a_rank_has_looked_at_are_left_out(folder):
    run = folder()
    run.start()
    run.steps(1, 40)
    order = LookOrder(number=1, looker=2, cause="host_bound", rank=2)
    run.write(2, LookEvent(step=23, look=Look(order=order, first_step=21, last_step=23)))
    evidence = read_run(run.run).evidence()
    assert evidence.steps.tolist() == [*range(1, 21), *range(24, 41)]
    assert evidence.looks[0].order == order


def started_command(tmp_path, world_size: int = 2) -> tuple[RunDir, list[EventWriter]]:
    """A run of a command of the user's own whose ranks 0 and 1 have started, and the writers of their events."""
    run = RunDir(tmp_path / "own")
    run.root.mkdir()
    write_run_record(run, RunRecord(recipe="train.py", created_at=1.0, command=("python", "train.py")))
    about = {"device_name": "", "params": 0, "peak_flops": 0.0, "peak_source": "", "flops_per_token": 0.0}
    writers = [EventWriter(run.events(rank), rank) for rank in (0, 1)]
    for writer in writers:
        writer.write(StartEvent(step=0, world_size=world_size, unit="steps", **about))
    return run, writers


def own_run(tmp_path, steps: int, grown_bytes: int, world_size: int = 2) -> RunDir:
    """A run of a user's command whose last step hangs; each step takes `grown_bytes` more memory."""
    run, writers = started_command(tmp_path, world_size)
    for rank, writer in enumerate(writers):
        for step in range(1, steps + 1):
            parts = {"other": 0.5 + rank * 0.4}
            writer.write(
                StepEvent(step=step, loss=None, grad_norm=None, steps=1, step_time_s=0.5, time_s=parts, skipped=False)
            )
            held = 2**30 + rank * step * grown_bytes
            writer.write(UsageEvent(step=step, cores=1.0, rss_bytes=held, swap_bytes=0, available_bytes=2**34))
        writer.close()
    return run


def test_a_leak_of_a_command_of_ones_own_is_told_and_nothing_that_nobody_measured(tmp_path):
    run = own_run(tmp_path, 80, 2**22)
    (verdict,) = conclude(read_run(run).evidence())
    assert (verdict.cause, verdict.rank) == ("memory_leak", 1)
    assert "tracemalloc" in verdict.advice


def test_a_hang_of_a_command_of_ones_own_is_told(tmp_path):
    run = own_run(tmp_path, 20, 0)
    hang = {"step": 21, "waited_s": 9.0, "host": "h", "waits_in": None, "collectives": {}, "deadline_s": 5.0}
    for rank, waiting in ((0, True), (1, False)):
        writer = EventWriter(run.events(rank), rank)
        writer.write(HangEvent(waiting=waiting, stack=f"stack of {rank}", **hang))
        writer.close()
    (verdict,) = conclude(read_run(run).evidence())
    assert (verdict.cause, verdict.rank) == ("hang", 1)
    assert "stack of 1" in verdict.evidence[-1] and "--hang-s" in verdict.advice


@pytest.mark.parametrize(
    ("named", "late", "place"),
    [
        ((1,), 1, "broadcast, called at train.py:9"),
        ((0, 1), None, "all_reduce, called at train.py:9 and in broadcast, called at train.py:9"),
        ((2,), 2, "it has ended"),
    ],
)
def test_the_ranks_that_were_named_when_a_command_hung_are_named_afterwards(tmp_path, named, late, place):
    """Both wait in a library, in other exchanges; the second node numbers the step by its own ranks. A third rank has
    ended, where that is what was found."""
    run = own_run(tmp_path, 20, 0, world_size=3 if named == (2,) else 2)
    hang = {"waited_s": 9.0, "host": "h", "collectives": {}, "deadline_s": 5.0, "stack": "in wait"}
    for rank, step, called in ((0, 21, "all_reduce"), (1, 20, "broadcast")):
        writer = EventWriter(run.events(rank), rank)
        waits_in = f"{called}, called at train.py:9"
        writer.write(HangEvent(step=step, waiting=rank not in named, waits_in=waits_in, **hang))
        writer.close()
    (verdict,) = conclude(read_run(run).evidence())
    assert (verdict.cause, verdict.rank) == ("hang", late)
    assert any(place in sentence for sentence in verdict.evidence)


@pytest.mark.parametrize(
    ("slow", "after", "found"),
    [
        ((1,), 0.55, [("slow_steps", 1)]),
        ((0, 1), 0.55, [("slow_steps", None)]),
        ((0, 1), 0.08, []),
    ],
)
def test_steps_of_a_command_that_became_far_slower_are_found(tmp_path, slow, after, found):
    """From 20 to 1.8 steps per second since step 101; a change by 60% may be by design."""
    run, writers = started_command(tmp_path)
    for rank, writer in enumerate(writers):
        for step in range(1, 161):
            step_s = (after if step > 100 and rank in slow else 0.05) * (1 + 0.05 * (step % 3))
            made = {"loss": None, "grad_norm": None, "steps": 1, "skipped": False}
            writer.write(StepEvent(step=step, step_time_s=step_s, time_s={"other": step_s}, **made))
        writer.close()
    verdicts = conclude(read_run(run).evidence())
    assert [(one.cause, one.rank) for one in verdicts] == found
    for one in verdicts:
        assert (one.until_step, one.advice != "") == (None, True)
        assert abs(one.since_step - 101) <= 2
        assert one.cost_s == pytest.approx(after - 0.05, rel=0.15)
