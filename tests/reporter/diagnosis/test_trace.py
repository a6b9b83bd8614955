"""Traces: ranks of nodes whose clocks differ, side by side."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.gather import shape_of
from trainspec_cli.reporter.diagnosis.trace import clock_offsets, trace_run
from trainspec_cli.run.folder.event_types.events import PARTS


def test_offsets_are_measured_from_the_ends_of_common_exchanges():
    """Node 1 is 0.3 s ahead; its second rank often waits for a processor before it can look at the clock."""
    left = [
        {step: (step + 0.0, 0.004) for step in range(1, 40)},
        {step: (step + 0.3 + 0.001 * (step % 3), 0.002) for step in range(1, 40, 2)},
        {step: (step + 0.35, 0.002) for step in range(1, 40)},
    ]
    first, second = clock_offsets([0, 1, 1], left)
    assert (first.offset_s, first.error_s) == (0.0, 0.0)
    assert second.offset_s == pytest.approx(0.3, abs=0.03)
    assert abs(second.offset_s - 0.3) <= second.error_s + 0.05 / 2
    (_, unknown) = clock_offsets([0, 1], [{1: (1.0, 0.1)}, {2: (2.0, 0.1)}])
    assert (unknown.error_s, unknown.exchanges) == (None, 0)


def test_a_trace_holds_the_parts_of_each_rank_s_steps_on_the_first_node_s_clock(folder, monkeypatch):
    run = folder()
    run.start()
    for node, at in ((0, 1000.0), (1, 1007.0)):
        monkeypatch.setattr("trainspec_cli.run.folder.events.time.time", lambda at=at: at)
        for rank in (2 * node, 2 * node + 1):
            run.write(rank, run.step(1))
            run.counters(rank, 1, left_at=at - 0.1, agreed_s=0.002)
            run.stall(rank, 2)
    verdict = RunVerdict(cause="slow_device", rank=3, since_step=1, evidence=("why",))
    trace = trace_run(run.run, shape_of(run.run), [verdict])
    events = trace["traceEvents"]
    steps = [event for event in events if event["name"] == "step 1"]
    assert [event["tid"] for event in steps] == [0, 1, 2, 3]
    assert [event["ts"] for event in steps] == pytest.approx([steps[0]["ts"]] * 4)
    parts = [event for event in events if event["ph"] == "X" and event["tid"] == 3 and event["name"] in PARTS]
    assert sum(event["dur"] for event in parts) == pytest.approx(steps[3]["dur"])
    assert parts[1]["ts"] == pytest.approx(parts[0]["ts"] + parts[0]["dur"])
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"node 0", "rank 3"} <= names and any("+7e+03 ms, within 2 ms" in name for name in names)
    (mark,) = [event for event in events if event["name"] == "slow_device"]
    assert (mark["pid"], mark["tid"], mark["args"]["evidence"]) == (1, 3, ["why"])
    assert sum(event["name"] == "stall" for event in events) == 4
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
