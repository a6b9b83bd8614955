"""What PyTorch's allocator for CUDA was asked, in the form that the planner's model of it takes.

Events in order: a positive number allocates so many bytes; -n frees what the n-th allocation took, from 1. `replay`
makes `policy.caching_allocator` do the same, whose peak of reserved bytes is held against the device's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainspec_cli.planner.memory.caching_allocator import CachingAllocator, MemoryBlock

MOST_EVENTS = 400_000


def start_recording(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_EVENTS)


def stop_recording(device: torch.device) -> list[int]:
    """Return the events since `start_recording`; none where the device's module keeps no history."""
    if device.type != "cuda":
        return []
    snapshot = torch.cuda.memory._snapshot(device)
    torch.cuda.memory._record_memory_history(enabled=None)
    return events_of(snapshot["device_traces"][device.index])


def events_of(trace: Iterable[dict[str, Any]]) -> list[int]:
    """Turn torch's history into events. What was allocated before it began, and is freed in it, is left out."""
    events: list[int] = []
    numbers: dict[int, int] = {}
    count = 0
    for entry in trace:
        if entry["action"] == "alloc" and entry["size"] > 0:
            count += 1
            numbers[entry["addr"]] = count
            events.append(int(entry["size"]))
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            events.append(-numbers.pop(entry["addr"]))
    return events


def replay(events: Sequence[int]) -> dict[str, int]:
    """Return the peaks of the planner's model of the allocator."""
    allocator, blocks = CachingAllocator(), list[MemoryBlock]()
    for event in events:
        if event > 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.free(blocks[-event - 1])
    return {
        "events": len(events),
        "allocated_bytes": allocator.peak_allocated_bytes,
        "reserved_bytes": allocator.peak_reserved_bytes,
    }


def keep(file: Path, item: str, events: Sequence[int]) -> None:
    """Add a line to a gzip file of JSON lines, which may be read while others are added."""
    if events:
        with gzip.open(file, "at", encoding="utf-8") as stream:
            stream.write(json.dumps({"item": item, "events": list(events)}, separators=(",", ":")) + "\n")
