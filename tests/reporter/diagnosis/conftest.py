"""Run folders as the ranks of a run would leave them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.run.folder.event_types.events import (
    ConnectionCounts,
    CountersEvent,
    Event,
    StallEvent,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

PARTS_S = {"data_wait": 0.0, "forward": 0.1, "backward": 0.2, "exposed_comm": 0.05, "optimizer": 0.01, "other": 0.01}


class Folder:
    """A run of two nodes with two ranks each, unless `plan` says otherwise."""

    def __init__(self, root: Path, **plan: Any):
        self.run = RunDir(root)
        self.ranks = 4
        write_json(
            self.run.plan_json,
            {"num_nodes": 2, "devices_per_node": 2, "layout": {"pp": 1}, "spec": {"train": {"max_steps": 90}}, **plan},
        )

    def write(self, rank: int, *events: Event) -> None:
        writer = EventWriter(self.run.events(rank), rank)
        for event in events:
            writer.write(event)
        writer.close()

    def start(self, step: int = 0) -> None:
        about: dict[str, Any] = {"world_size": 4, "device_name": "a chip", "params": 1, "peak_flops": 1.0}
        for rank in range(self.ranks):
            self.write(rank, StartEvent(step=step, peak_source="measured", flops_per_token=1.0, **about))

    def steps(self, first: int, last: int, slow: int | None = None) -> None:
        """Let all ranks make steps; one of them takes half as long again, and the others wait for it."""
        for rank in range(self.ranks):
            of_rank = [self.step(step, is_slow=rank == slow, waits=slow is not None) for step in range(first, last + 1)]
            self.write(rank, *of_rank)

    @staticmethod
    def step(step: int, *, is_slow: bool = False, waits: bool = False) -> StepEvent:
        jitter_s = 0.001 * (step % 3)
        longer_s = 0.15 * is_slow
        parts_s = {
            **PARTS_S,
            "backward": PARTS_S["backward"] + jitter_s + longer_s,
            "exposed_comm": 0.05 + 0.15 * waits - longer_s,
        }
        return StepEvent(
            step=step,
            loss=1.0,
            grad_norm=1.0,
            tokens=1,
            step_time_s=sum(parts_s.values()),
            time_s=parts_s,
            queued_s=0.0,
            skipped=False,
        )

    def counters(self, rank: int, step: int, steps: int = 1, **changes: Any) -> None:
        zeros: dict[str, Any] = dict.fromkeys(
            ("cpu_s", "queued_s", "throttled_s", "steal_s", "memory_stall_s", "gc_s", "agreed_s", "left_at"), 0.0
        )
        zeros |= dict.fromkeys(
            ("major_faults", "gc_runs", "compiles", "allocator_retries", "rss_bytes", "swap_bytes"), 0
        )
        about = {**zeros, "wall_s": 0.4, "own_s": 0.3, "tokens": 8, "attended": 64, "connections": (), **changes}
        self.write(rank, CountersEvent(step=step, steps=steps, **about))

    def stall(self, rank: int, step: int, *, waiting: bool = True) -> None:
        waits_in = "gloo:all_reduce" if waiting else None
        about: dict[str, Any] = {"collectives": {}, "stack": "in read", "host": "h"}
        self.write(rank, StallEvent(step=step, waited_s=4.0, usual_s=1.0, waiting=waiting, waits_in=waits_in, **about))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Folder]:
    def make(**plan: Any) -> Folder:
        return Folder(tmp_path / "run", **plan)

    return make


def connection(local: str, peer: str, **changes: Any) -> ConnectionCounts:
    about: dict[str, Any] = {
        "sent_bytes": 4000,
        "segments": 40,
        "resent": 2,
        "timeouts": 0,
        "busy_s": 0.1,
        "rtt_s": 0.01,
    }
    return ConnectionCounts(local=local, peer=peer, **(about | changes))
