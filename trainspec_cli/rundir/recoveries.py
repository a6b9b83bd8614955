"""What each failure of a run cost, read from its story."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def read_recoveries(events: Iterable[Event]) -> list[Event]:
    """-> [{kind, group, step, stall_s, lost_steps}]. A restart's stall lasts from the failure to the first new work."""
    recoveries: list[Event] = []
    open_restart: tuple[Event, float] | None = None
    last_time = 0.0
    for event in events:
        if event["type"] == "recovery":
            fields = {name: event[name] for name in ("group", "step", "stall_s", "lost_steps")}
            recoveries.append({"kind": event["change"], **fields})
            open_restart = (recoveries[-1], last_time) if event["change"] == "restart" else open_restart
        elif event["type"] == "step":
            if open_restart is not None:
                recovery, failed_at = open_restart
                recovery["stall_s"] = event["time"] - event["step_time_s"] - failed_at
                open_restart = None
            last_time = event["time"]
    return recoveries
