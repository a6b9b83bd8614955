import json
import math
import random

import pytest

from trainspec_cli.recipe.records import ABSENT, to_plain
from trainspec_cli.run.folder.accounting import (
    Recovery,
    WallTime,
    account,
    account_run,
    measure_throughput,
    read_recoveries,
)
from trainspec_cli.run.folder.event_types.events import (
    EVENT_TYPES,
    CheckpointEvent,
    EndEvent,
    EvalEvent,
    RecoveryEvent,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.paths import RunDir


def start(time, step=0):
    chip = {"device_name": "a chip", "peak_flops": 1e9, "peak_source": "measured"}
    return StartEvent(time=time, step=step, world_size=1, params=1, flops_per_token=1.0, **chip)


def one_step(step, time, seconds=1.0, tokens=10, **parts):
    figures = {"loss": 1.0, "grad_norm": 1.0, "skipped": False, "samples": 1}
    return StepEvent(step=step, time=time, step_time_s=seconds, time_s=parts, tokens=tokens, **figures)


def steps(first, last, begin, seconds=1.0, **parts):
    numbers = range(first, last + 1)
    return [one_step(step, begin + (i + 1) * seconds, seconds, **parts) for i, step in enumerate(numbers)]


def restart(time, step, lost_steps=0):
    return RecoveryEvent(time=time, step=step, change="restart", group=None, stall_s=None, lost_steps=lost_steps)


def end(time):
    return EndEvent(time=time, step=1, status="done")


def mark(kind, time):
    return EVENT_TYPES[kind](time=time)


def check(events, marks, wall_s, now=None, **expected):
    found = account(events, marks, now)
    by_bucket = to_plain(found)
    assert {name: value for name, value in by_bucket.items() if value} == pytest.approx(expected)
    assert found.total_s == math.fsum(by_bucket.values()) == pytest.approx(wall_s)
    return found


def test_an_undisturbed_run():
    events = [
        start(104),
        *steps(1, 10, begin=104, data_wait=0.1, checkpoint=0.05),
        EvalEvent(time=116, step=10, heldout_loss=1.0, seconds=2.0),
        CheckpointEvent(time=117, step=10, path="p", bytes=1, seconds=1.0, waited_s=1.0),
        end(117.5),
    ]
    found = check(
        events,
        [mark("launch", 100), mark("ended", 118)],
        wall_s=18,
        start_up=4,
        productive=8.5,
        data_wait=1,
        checkpoint=1.5,
        evaluation=2,
        other=1,
    )
    assert found.goodput == pytest.approx(8.5 / 18)


def test_a_failure_and_a_restart_by_the_supervisor():
    failed = [start(10), *steps(1, 8, begin=10), restart(22, step=8)]
    events = [*failed, start(30, step=5), *steps(6, 20, begin=30), end(45)]
    marks = [
        mark("launch", 7),
        mark("failure", 20),
        mark("ended", 21),
        mark("launch", 23),
        mark("ended", 45),
    ]
    check(events, marks, wall_s=38, start_up=3, productive=20, recomputed=3, detection=2, recovery=1 + 2 + 7)


def test_a_run_that_was_stopped_lies_idle_until_it_is_resumed():
    events = [start(2), *steps(1, 4, begin=2), end(6), start(102, step=4), *steps(5, 9, begin=102)]
    marks = [mark("launch", 0), mark("ended", 7), mark("launch", 100)]
    check(events, marks, wall_s=107, start_up=4, productive=9, other=1, idle=93)


def test_a_failed_run_that_a_person_resumes():
    events = [start(2), *steps(1, 4, begin=2), start(102, step=4), *steps(5, 9, begin=102)]
    marks = [mark("launch", 0), mark("failure", 7), mark("ended", 9), mark("launch", 100)]
    check(events, marks, wall_s=107, start_up=2, productive=9, detection=1, recovery=2 + 2, idle=91)


def test_a_resume_that_never_began_is_start_up_and_not_a_failure_noticed_late():
    """Two pauses, and a launch between them that its workers refused: each second counts once."""
    events = [start(2), *steps(1, 4, begin=2), end(6), start(202, step=4), *steps(5, 9, begin=202)]
    marks = [mark("launch", 0), mark("ended", 7), mark("launch", 100), mark("failure", 105), mark("ended", 106)]
    marks.append(mark("launch", 200))
    expected = {"start_up": 2 + 5 + 2, "productive": 9, "recovery": 1, "other": 1, "idle": 93 + 94}
    check(events, marks, wall_s=207, **expected)


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_are_a_partition_of_the_time(seed):
    """Whatever follows upon what: no part is negative, and the parts sum to the time from the first launch on."""
    draw = random.Random(seed)
    events, marks, now, step = [], [mark("launch", 0.0)], 0.0, 0
    for _ in range(draw.randrange(1, 6)):
        if draw.random() < 0.8:  # its workers begin
            now += draw.random() * 9
            step = draw.randrange(step + 1)
            events.append(start(now, step=step))
            for _ in range(draw.randrange(4)):
                now, step = now + 1.0, step + 1
                seconds = draw.choice([0.3, 1.0, 1.4])
                events.append(one_step(step, now, seconds, data_wait=0.1, checkpoint=0.1))
            if draw.random() < 0.3:
                events.append(EvalEvent(time=now, step=step, heldout_loss=1.0, seconds=draw.choice([0.5, 30.0])))
            if draw.random() < 0.5:
                events.append(end(now))
        for kind in ("failure", "ended"):
            if draw.random() < 0.6:
                now += draw.random() * 9
                marks.append(mark(kind, now))
        if draw.random() < 0.4 and events:
            events.append(restart(now, step=step))
        now += draw.random() * 100
        marks.append(mark("launch", now))
    events.append(start(now + 1, step=step))
    events.append(one_step(step + 1, now + 2))
    found = to_plain(account(events, marks))
    assert min(found.values()) >= -1e-9
    first_launch = max(one.time for one in marks if one.type == "launch" and one.time <= events[0].time)
    assert sum(found.values()) == pytest.approx(now + 2 - first_launch)


def test_a_supervisor_that_was_killed_too_leaves_no_marks():
    events = [start(2), *steps(1, 4, begin=2), start(102, step=2), *steps(3, 9, begin=102)]
    check(
        events,
        [mark("launch", 0), mark("launch", 100)],
        wall_s=109,
        start_up=2,
        productive=9,
        recomputed=2,
        idle=94,
        recovery=2,
    )


def test_a_log_that_another_group_goes_on_with_is_one_attempt():
    events = [start(2), *steps(1, 4, begin=2), start(7, step=4), *steps(5, 8, begin=7)]
    check(events, [mark("launch", 0), mark("ended", 11)], wall_s=11, start_up=2, productive=8, other=1)


def test_a_stall_inside_a_step_is_recovery():
    retried = RecoveryEvent(time=8, step=4, change="retried", group=None, stall_s=1.5, lost_steps=1)
    events = [start(0), *steps(1, 4, begin=0, seconds=2), retried]
    check(events, [mark("launch", 0)], wall_s=8, productive=6.5, recovery=1.5)


def test_a_stall_is_taken_from_its_step_and_not_from_the_time_that_nothing_accounts_for():
    retried = RecoveryEvent(time=8, step=4, change="retried", group=None, stall_s=1.5, lost_steps=1)
    events = [start(0), *steps(1, 4, begin=0, seconds=2), retried, end(11)]
    check(events, [mark("launch", 0)], wall_s=11, productive=6.5, recovery=1.5, other=3)


def test_a_run_that_is_still_going_counts_until_now():
    check([start(1), *steps(1, 3, begin=1)], [mark("launch", 0)], wall_s=6, now=6, start_up=1, productive=3, other=2)


def test_no_event_no_time():
    assert account([], []).goodput is None


def test_throughput_leaves_out_the_first_steps_and_counts_model_flops():
    slow_then_steady = [one_step(1, 0.0, s, tokens=100) for s in (9.0, 1.0, 1.0, 0.5, 0.5)]
    got = measure_throughput(slow_then_steady, flops_per_token=10.0, peak_flops=500.0, world_size=2)
    assert (got.tokens_per_s, got.steps, got.left_out) == (200.0, 2, 3)
    assert got.mfu == 200.0 * 10.0 / (2 * 500.0)


def test_throughput_of_a_short_run_leaves_out_nothing():
    got = measure_throughput([one_step(1, 0.0, 2.0)], flops_per_token=1.0, peak_flops=1.0, world_size=1)
    assert (got.tokens_per_s, got.left_out) == (5.0, 0)


def test_images_are_counted_in_samples():
    got = measure_throughput([one_step(1, 0.0, 2.0, tokens=ABSENT)], flops_per_token=1.0, peak_flops=1.0, world_size=1)
    assert got.tokens_per_s == 0.5


def test_the_log_has_the_cost_of_a_group_that_left():
    left = RecoveryEvent(time=3.0, step=2, change="left", group=1, stall_s=1.2, lost_steps=1)
    assert read_recoveries([one_step(1, 1.0), left, one_step(2, 3.0)]) == [Recovery("left", 1, 2, 1.2, 1)]


def test_a_restart_stalls_from_the_last_step_to_the_first_new_one():
    events = [one_step(7, 100.0), restart(101.0, step=7, lost_steps=3), one_step(5, 121.0), one_step(6, 122.0)]
    assert read_recoveries(events) == [Recovery("restart", None, 7, 20.0, 3)]


def test_a_restart_before_the_first_step_stalls_from_the_start() -> None:
    events = [start(100.0), restart(101.0, step=0, lost_steps=0), start(110.0), one_step(1, 121.0)]
    assert read_recoveries(events) == [Recovery("restart", None, 0, 20.0, 0)]


def test_clocks_that_differ_by_their_jitter_take_from_the_steps_and_make_no_negative_time():
    """The steps say 4.2 s, and 4 s passed."""
    check(
        [start(0), *steps(1, 4, begin=0, seconds=1.0)[:3], one_step(4, 4.0, 1.2)], [mark("launch", 0)], 4, productive=4
    )


def test_two_failures_and_the_second_attempt_is_lost_in_part():
    """The first attempt loses what the third made again too: 6 to 8 count once."""
    events = [
        *(start(0), *steps(1, 8, begin=0), restart(10, step=8)),
        *(start(12, step=5), *steps(6, 9, begin=12), restart(18, step=9)),
        *(start(20, step=4), *steps(5, 10, begin=20), end(27)),
    ]
    marks = [mark("launch", 0), *(mark("failure", 9), mark("ended", 9.5), mark("launch", 11))]
    marks += [*(mark("failure", 17), mark("ended", 17.5), mark("launch", 19)), mark("ended", 28)]
    check(
        events,
        marks,
        wall_s=28,
        productive=4 + 6,
        recomputed=4 + 4,
        detection=1 + 1,
        recovery=(0.5 + 1.5 + 1) + (0.5 + 1.5 + 1),
        other=2,
    )


def test_a_checkpoint_that_was_written_beside_the_steps_held_nothing_up():
    events = [
        start(0),
        *steps(1, 2, begin=0),
        CheckpointEvent(time=2, step=2, path="p", bytes=1, seconds=0.5, written_s=9.0, waited_s=ABSENT),
        *steps(3, 4, begin=2),
        CheckpointEvent(time=5, step=4, path="p", bytes=1, seconds=0.5, written_s=9.0, waited_s=0.75),
    ]
    check(events, [mark("launch", 0)], wall_s=5, productive=4, checkpoint=0.75, other=0.25)


def test_a_replica_group_that_takes_the_log_over_begins_no_new_attempt():
    """Its `start` follows no launch of the supervisor's."""
    events = [start(2), *steps(1, 4, begin=2), start(6.5, step=4), *steps(5, 8, begin=7), end(11)]
    check(events, [mark("launch", 1)], wall_s=10, start_up=1, productive=8, other=1)


def test_without_marks_every_start_is_an_attempt():
    events = [start(2), *steps(1, 4, begin=2), end(6), start(16, step=4), *steps(5, 8, begin=16)]
    check(events, [], wall_s=18, productive=8, idle=10)


def test_a_run_that_ended_does_not_count_until_now():
    events = [start(0), *steps(1, 3, begin=0), end(3)]
    check(events, [mark("launch", 0), mark("ended", 4)], wall_s=4, now=100, productive=3, other=1)
    check(events, [mark("launch", 0)], wall_s=3, now=2, productive=3)


def test_a_run_folder_is_accounted_for_by_its_first_rank_and_its_supervisor(tmp_path):
    run = RunDir(tmp_path)
    run.events_folder.mkdir()
    written = {
        run.events(0): [start(2), *steps(1, 4, begin=2), end(6)],
        run.events(1): [start(2), *steps(1, 9, begin=2)],
        run.supervisor_events: [mark("launch", 0), mark("ended", 7)],
    }
    for path, events in written.items():
        path.write_text("".join(json.dumps({"rank": 0, **to_plain(event)}) + "\n" for event in events))
    found = account_run(run, now=1000)
    assert found == WallTime(productive=4, start_up=2, other=1)
    assert found.goodput == 4 / 7


def test_a_stall_is_counted_once_and_until_the_first_new_step_began():
    events = [
        one_step(7, 100.0),
        restart(101.0, step=7),
        RecoveryEvent(time=110.0, step=7, change="joined", group=1, stall_s=0.5, lost_steps=None),
        one_step(5, 121.0, seconds=4.0),
        one_step(6, 122.0),
        restart(123.0, step=6, lost_steps=1),
    ]
    assert read_recoveries(events) == [
        Recovery("restart", None, 7, 17.0, 0),
        Recovery("joined", 1, 7, 0.5, None),
        Recovery("restart", None, 6, None, 1),
    ]


@pytest.mark.parametrize(("made", "over", "left_out"), [(3, 3, 0), (4, 1, 3), (5, 2, 3)])
def test_the_first_three_steps_count_only_where_no_others_were_made(made, over, left_out):
    got = measure_throughput(steps(1, made, begin=0), flops_per_token=1.0, peak_flops=0.0, world_size=1)
    assert (got.steps, got.left_out, got.mfu) == (over, left_out, 0.0)
    assert measure_throughput([], flops_per_token=1.0, peak_flops=1.0, world_size=1).tokens_per_s == 0.0
