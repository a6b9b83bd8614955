import json
import math
import subprocess
import sys

import pytest
from trainspec_cli.rundir.throughput import measure_throughput

from trainspec_cli.rundir.events import EventWriter, read_events


def test_events_are_read_back_in_order(tmp_path):
    writer = EventWriter(tmp_path / "events" / "rank00003.jsonl", rank=3)
    writer.write("step", step=1, loss=2.5)
    writer.write("warning", step=1, message="naïve — ünïcode")
    writer.close()
    events = list(read_events(tmp_path / "events" / "rank00003.jsonl"))
    assert [(e["type"], e["rank"]) for e in events] == [("step", 3), ("warning", 3)]
    assert events[1]["message"] == "naïve — ünïcode"


def test_a_killed_writer_loses_no_whole_line(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    script = f"""
import os, pathlib
from trainspec_cli.rundir.events import EventWriter
writer = EventWriter(pathlib.Path({str(path)!r}), 0)
for step in range(100):
    writer.write("step", step=step)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert [event["step"] for event in read_events(path)] == list(range(100))


def test_half_a_line_is_passed_over_and_closed_by_the_next_writer(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    path.write_bytes(json.dumps({"type": "step", "step": 1}).encode() + b'\n{"type": "st')
    assert [event["step"] for event in read_events(path)] == [1]
    writer = EventWriter(path, 0)
    writer.write("step", step=2)
    writer.close()
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_throughput_leaves_out_the_first_steps_and_counts_model_flops():
    slow_then_steady = [{"tokens": 100, "step_time_s": s} for s in (9.0, 1.0, 1.0, 0.5, 0.5)]
    got = measure_throughput(slow_then_steady, flops_per_token=10.0, peak_flops=500.0, world_size=2)
    assert (got.tokens_per_s, got.steps, got.left_out) == (200.0, 2, 3)
    assert got.mfu == 200.0 * 10.0 / (2 * 500.0)


def test_throughput_of_a_short_run_leaves_out_nothing():
    got = measure_throughput([{"tokens": 10, "step_time_s": 2.0}], flops_per_token=1.0, peak_flops=1.0, world_size=1)
    assert (got.tokens_per_s, got.left_out) == (5.0, 0)


def test_what_is_not_finite_is_null_in_an_event(tmp_path):
    writer = EventWriter(tmp_path / "e.jsonl", 0)
    writer.write("step", loss=math.nan, sets={"a": {"loss": math.inf}})
    writer.close()
    (event,) = (
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "e.jsonl").read_text().splitlines()
    )
    assert (event["loss"], event["sets"]) == (None, {"a": {"loss": None}})


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    victim = tmp_path / "thesis"
    victim.write_text("words")
    (tmp_path / "rank00000.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        EventWriter(tmp_path / "rank00000.jsonl", 0)
    assert victim.read_text() == "words"
