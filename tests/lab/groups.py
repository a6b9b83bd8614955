"""What a run of replica groups tells of itself, and whether it kept its promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir


def run_events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events(0)) if event["type"] == kind]


def own_events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    """Of the first process of every group."""
    files = sorted(run.events_folder.glob("group*/rank00000.jsonl"))
    return [event for file in files for event in read_events(file) if event["type"] == kind]


def losses(run: RunDir) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run_events(run, "step")}


def changes(run: RunDir) -> list[tuple[str, int | None]]:
    return [(event["change"], event["group"]) for event in run_events(run, "recovery")]


def count_samples(run: RunDir) -> Counter[int]:
    """How often each position was taken in a step that counted."""
    portions = {(event["step"], *event["took"]) for event in own_events(run, "step")}
    return Counter(position for _, start, samples in portions for position in range(start, start + samples))


def check_nothing_was_lost(run: RunDir, *, may_lack_notes: bool = False) -> None:
    """Every sample of the steps that counted was taken once, and the groups end with the same weights.

    `may_lack_notes`: a group that is killed at any moment may have had no time to note the last step it took part in.
    """
    steps = run_events(run, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    taken = count_samples(run)
    unnoted = set(range(sum(event["samples"] for event in steps))) - set(taken)
    assert unnoted <= (_taken_before_a_loss(run) if may_lack_notes else set())
    assert set(taken.values()) == {1}
    assert len({event["weights_sha256"] for event in own_events(run, "end")}) == 1


def _taken_before_a_loss(run: RunDir) -> set[int]:
    """Positions of the last step with each group that left."""
    last = {event["step"] - 1 for event in run_events(run, "recovery") if event["change"] == "left"}
    positions: set[int] = set()
    begin = 0
    for event in run_events(run, "step"):
        if event["step"] in last:
            positions.update(range(begin, begin + event["samples"]))
        begin += event["samples"]
    return positions
