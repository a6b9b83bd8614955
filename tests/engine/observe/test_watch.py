import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainspec_cli.engine.observe.watch import StepWatch, describe
from trainspec_cli.rundir.event_types import HangEvent
from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir

WORKER = Path(__file__).parent / "hanging_worker.py"


def test_a_sleeping_rank_is_named_with_its_stack_and_the_collective_the_other_waits_in(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), tmp_path],
            env=os.environ | {"TORCH_FR_BUFFER_SIZE": "50"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert ranks[0].wait(timeout=120) == 5
    ranks[1].kill()
    run_dir = RunDir(tmp_path)
    told = json.loads(run_dir.error(0).read_text())
    assert told["step"] == 8
    assert "rank 1 is late: it is in no collective; the others wait in gloo:all_reduce of 3x5" in told["message"]
    assert "in oversleep" in told["traceback"]
    assert "all_reduce" in told["traceback"]
    assert [event["type"] for event in read_events(run_dir.events(1))] == ["hang"]
    assert "most recent call first" in ranks[0].communicate()[1], "faulthandler's own words, in the log"
    ranks[1].communicate()


class Listening:
    """A journal that keeps what is written."""

    def __init__(self):
        self.events = []

    def write(self, event):
        self.events.append(event)


@pytest.mark.usefixtures("one_process")
def test_steps_in_time_and_what_lies_between_them_are_no_hang(tmp_path):
    journal = Listening()
    watch = StepWatch(RunDir(tmp_path), journal, floor_s=3.0)
    watch.start()
    for step in range(1, 8):
        time.sleep(0.02)
        watch.beat(step)
    with watch.between_steps():
        time.sleep(3.5)
    watch.beat(8)
    time.sleep(0.3)
    watch.close()
    watch.join()
    assert journal.events == []


def report(waiting, collectives):
    about = {"step": 4, "waited_s": 10.0, "deadline_s": 5.0, "host": "h", "stack": "here"}
    return HangEvent(waiting=waiting, collectives=collectives, waits_in="gloo:x", **about)


def test_the_rank_behind_in_its_collectives_is_late():
    reports = {0: report(True, {"world": 7}), 1: report(True, {"world": 6}), 2: report(True, {"world": 7})}
    message, stacks = describe(reports, 3, step=4, waited_s=10.0, deadline_s=5.0)
    assert message.startswith("step 4 hung: 10.0 s, and 5.0 s are allowed; rank 1 is late: it has entered fewer")
    assert stacks.count("was at") == 3
