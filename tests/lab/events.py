"""Events as workers write them, with round figures where a test does not care."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.tables import MemorySetting
from trainspec_cli.run.folder.event_types.events import (
    AchievedEvent,
    DirectiveEvent,
    Event,
    MemoryEvent,
    NodesAchievedEvent,
    NodesEvent,
    RetryEvent,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.events import EventWriter

DIRECTIVE = DirectiveEvent(
    step=4,
    number=1,
    applied=True,
    counts=(9, 5),
    micro_batch_size=16,
    micro_batches=1,
    reason="rank 1 is slow",
    before_s=2.0,
    expected_s=1.5,
)
ACHIEVED = AchievedEvent(step=9, number=1, before_s=2.0, expected_s=1.5, achieved_s=1.6)
MEMORY = MemoryEvent(
    step=3,
    layout="dp_shard=2",
    failed=MemorySetting(8, "none", "none"),
    taken=MemorySetting(4, "none", "none"),
    restarts=True,
    reason="rank 1 (h): memory ran out",
)

LEFT_OUT = NodesEvent(
    step=120,
    number=1,
    applied=True,
    node=3,
    host="node3",
    num_nodes=3,
    layout=Layout(dp_replicate=3),
    pace=4.1,
    before_s=2.1,
    expected_s=1.3,
    cost_s=30.0,
)
LEFT_OUT_ACHIEVED = NodesAchievedEvent(step=130, number=1, achieved_s=1.4, restart_s=31.0)


def write_event(path: Path, event: Event, rank: int = 0) -> None:
    writer = EventWriter(path, rank)
    writer.write(event)
    writer.close()


def started(step: int = 0) -> StartEvent:
    about = {"world_size": 2, "device_name": "a chip", "params": 1, "peak_flops": 1.0, "peak_source": "measured"}
    return StartEvent(step=step, flops_per_token=1.0, **about)  # type: ignore[arg-type]


def stepped(step: int = 1) -> StepEvent:
    return StepEvent(step=step, loss=1.0, grad_norm=1.0, tokens=1, step_time_s=1.0, time_s={}, skipped=False)


def retried(step: int = 1) -> RetryEvent:
    return RetryEvent(step=step)
