import math

import pytest

from trainspec_cli.rundir.accounting import BUCKETS, account, goodput


def start(time, step=0):
    return {"type": "start", "time": time, "step": step}


def steps(first, last, begin, seconds=1.0, **parts):
    return [
        {"type": "step", "step": step, "time": begin + (i + 1) * seconds, "step_time_s": seconds, "time_s": parts}
        for i, step in enumerate(range(first, last + 1))
    ]


def mark(kind, time, **fields):
    return {"type": kind, "time": time, **fields}


def check(events, marks, wall_s, now=None, **expected):
    found = account(events, marks, now)
    assert {name: value for name, value in found.items() if value} == pytest.approx(expected)
    assert list(found) == list(BUCKETS)
    assert math.fsum(found.values()) == pytest.approx(wall_s)
    return found


def test_an_undisturbed_run():
    events = [
        start(104),
        *steps(1, 10, begin=104, data_wait=0.1, checkpoint=0.05),
        {"type": "eval", "time": 116, "seconds": 2.0},
        {"type": "checkpoint", "time": 117, "seconds": 1.0, "waited_s": 1.0},
        {"type": "end", "time": 117.5},
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
    assert goodput(found) == pytest.approx(8.5 / 18)


def test_a_failure_and_a_restart_by_the_supervisor():
    restart = {"type": "recovery", "change": "restart", "time": 22, "step": 8, "stall_s": None}
    events = [start(10), *steps(1, 8, begin=10), restart, start(30, step=5), *steps(6, 20, begin=30), mark("end", 45)]
    marks = [
        mark("launch", 7),
        mark("failure", 20),
        mark("ended", 21),
        mark("launch", 23),
        mark("ended", 45),
    ]
    check(events, marks, wall_s=38, start_up=3, productive=20, recomputed=3, detection=2, recovery=1 + 2 + 7)


def test_a_run_that_was_stopped_lies_idle_until_it_is_resumed():
    events = [start(2), *steps(1, 4, begin=2), mark("end", 6), start(102, step=4), *steps(5, 9, begin=102)]
    marks = [mark("launch", 0), mark("ended", 7), mark("launch", 100)]
    check(events, marks, wall_s=107, start_up=4, productive=9, other=1, idle=93)


def test_a_failed_run_that_a_person_resumes():
    events = [start(2), *steps(1, 4, begin=2), start(102, step=4), *steps(5, 9, begin=102)]
    marks = [mark("launch", 0), mark("failure", 7), mark("ended", 9), mark("launch", 100)]
    check(events, marks, wall_s=107, start_up=2, productive=9, detection=1, recovery=2 + 2, idle=91)


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


def test_a_story_that_another_group_goes_on_with_is_one_attempt():
    events = [start(2), *steps(1, 4, begin=2), start(7, step=4), *steps(5, 8, begin=7)]
    check(events, [mark("launch", 0), mark("ended", 11)], wall_s=11, start_up=2, productive=8, other=1)


def test_a_stall_inside_a_step_is_recovery():
    events = [start(0), *steps(1, 4, begin=0, seconds=2), {"type": "recovery", "time": 8, "stall_s": 1.5}]
    check(events, [mark("launch", 0)], wall_s=8, productive=6.5, recovery=1.5)


def test_a_run_that_is_still_going_counts_until_now():
    check([start(1), *steps(1, 3, begin=1)], [mark("launch", 0)], wall_s=6, now=6, start_up=1, productive=3, other=2)


def test_no_event_no_time():
    assert goodput(account([], [])) is None
