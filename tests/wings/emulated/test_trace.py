"""What one sees of a rehearsal: its trace, its page and its JSON agree with the reported times and memory."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.wings.emulated import timeline
from trainspec_cli.wings.emulated.page import render_rehearsal_page
from trainspec_cli.wings.emulated.planned import Rehearsal, plan_to_rehearse, rehearse_ranks
from trainspec_cli.wings.emulated.timeline import keep_longest
from trainspec_cli.wings.emulated.trace import trace_rehearsal, without_slices

TINY = ["recipe=tiny", "cluster=h100", "cluster.num_nodes=1", "cluster.devices_per_node=4", "layout.tp=2"]
TINY += ["layout.dp_shard=2", "batching.micro_batch_size=8", "batching.global_batch_size=32"]


@pytest.fixture(scope="module")
def done() -> Rehearsal:
    planned = plan_to_rehearse(TINY, None)
    return rehearse_ranks(planned, [3], 1, lambda _: None)


def seconds(slices: list[dict[str, Any]]) -> float:
    return sum(one["dur"] for one in slices) / 1e6


@pytest.mark.slow
def test_a_trace_adds_up_to_the_reported_times_and_memory(done: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, because the rehearsal takes seconds, and workers of pytest would each repeat it."""
    (rank,) = done.ranks
    found = rank.rehearsed
    drawn, number, left_out = trace_rehearsal(done)
    trace: Any = json.loads(json_text(drawn))
    events = trace["traceEvents"]
    assert {one["pid"] for one in events} == {3}
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert list(threads.values())[:2] == ["parts of the step", "compute stream"]
    assert {"exchanges, tp", "exchanges, shard"} <= set(threads.values())

    # Every stream runs one thing at a time.
    of_thread = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            of_thread[threads[one["tid"]]].append(one)
    for slices in of_thread.values():
        slices.sort(key=lambda one: one["ts"])
        ends = [round(one["ts"] + one["dur"], 3) for one in slices]
        assert all(end <= later["ts"] for end, later in zip(ends, slices[1:], strict=False))
    assert sum(map(len, of_thread.values())) == number + len(of_thread["parts of the step"])
    assert left_out == 0

    # Work and waits of the compute stream are the reported parts of the step.
    compute = of_thread["compute stream"]
    waits = [one for one in compute if one["name"] == "wait"]
    work = [one for one in compute if one["name"] != "wait"]
    reported = dict(found.time_s)
    exposed_s = reported.pop("exposed_comm")
    assert done.micro_batches == found.timeline.micro_batches, "nothing is extrapolated"
    assert seconds(waits) == pytest.approx(exposed_s, rel=1e-3) and exposed_s > 0
    assert seconds(work) == pytest.approx(sum(reported.values()), rel=1e-3)
    passes = ("forward", "backward")
    in_passes = [one for one in work if one["args"]["part"].startswith(passes)]
    assert seconds(in_passes) == pytest.approx(sum(reported[name] for name in passes), rel=1e-3)
    assert {one["args"]["for"] for one in waits} >= {"exchanges, tp", "exchanges, shard"}
    assert any("models/" in one["name"] and "mm, (" in one["args"]["longest"] for one in work)

    # An arrow leads from the end of an exchange to the end of the wait for it.
    by_number = defaultdict(dict)
    for one in events:
        if one["ph"] in "sf":
            by_number[one["id"]][one["ph"]] = one
    assert len(by_number) == len(waits)
    for ends in by_number.values():
        source = of_thread[threads[ends["s"]["tid"]]]
        assert any(one["ts"] < ends["s"]["ts"] < one["ts"] + one["dur"] for one in source)
        assert threads[ends["f"]["tid"]] == "compute stream"

    memory = [one["args"]["bytes"] for one in events if one["name"] == "allocated bytes"]
    held = [one["args"]["bytes"] for one in events if one["name"] == "reserved bytes"]
    assert max(memory) == found.peak_bytes
    assert max(memory) <= max(held) <= found.reserved_bytes
    (marker,) = [one for one in events if one["ph"] == "i"]
    assert marker["ts"] / 1e6 == pytest.approx(found.timeline.peak[0], abs=1e-9)
    assert found.peak.part in marker["name"]

    plain = to_plain(without_slices(done))["ranks"][0]["rehearsed"]["timeline"]
    assert plain["slices"] == []
    assert [part["part"] for part in plain["parts"]] == [one["name"] for one in of_thread["parts of the step"]]
    assert max(size for _, size in plain["allocated"]) == found.peak_bytes

    page = render_rehearsal_page(done, "tiny")
    for text in (found.peak.part, found.peak.largest[0].origin, "planned", "exposed communication", "rank 3"):
        assert text in page
    assert 'class="dot c-heldout"' in page
    assert page.count("<polyline") == 3

    monkeypatch.setattr(timeline, "MOST_SLICES", 50)
    kept = keep_longest(found.timeline.slices)
    lengths_s = sorted(one.end_s - one.begin_s for one in found.timeline.slices)
    assert [one for one in found.timeline.slices if one in kept] == kept
    assert sorted(one.end_s - one.begin_s for one in kept) == lengths_s[-50:]
