"""Match the newest collectives of all ranks: which rank is missing, which one called another collective, and where.

The records come from the flight recorder that torch keeps for gloo and NCCL, or from the emulated device's own record.
NCCL never compares what the ranks call. If one rank calls something else, all of them wait forever, or sum the wrong
tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainspec_cli.core.printable import list_ranks
from trainspec_cli.recipe.results.verdict import Collective

NEWEST = 8
"""Number of collectives to report for each process group."""
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "coalesced")
"""Kinds whose tensors may differ in size between ranks, by the beginning of their names."""


def read_recorder(dump: Mapping[str, Any], is_library: Callable[[str], bool] = lambda _: False) -> list[Collective]:
    """Return the newest collectives in a dump of torch's flight recorder (`_dump_fr_trace`, `_dump_nccl_trace`, or
    their JSON variants without frames), oldest first. `is_library`: whether a file is not the user's own code, and
    therefore not the line to show."""
    found = []
    counts = Counter[str]()
    entries = [entry for entry in dump.get("entries", ()) if not entry.get("is_p2p")]
    for entry in sorted(entries, key=lambda entry: -entry["time_created_ns"]):
        group = "/".join(str(name) for name in entry["process_group"] if name != "undefined")
        counts[group] += 1
        if counts[group] > NEWEST:
            continue
        found.append(
            Collective(
                group=group,
                number=entry["collective_seq_id"],
                kind=entry["profiling_name"],
                sizes=tuple(map(tuple, entry["input_sizes"])),
                dtypes=tuple(entry.get("input_dtypes", ())),
                done=bool(entry.get("retired")) or entry["state"] == "completed",
                line=_line(entry.get("frames", ()), is_library),
            )
        )
    return found[::-1]


def _line(frames: Sequence[Mapping[str, Any]], is_library: Callable[[str], bool]) -> str:
    """Return the innermost line outside of libraries; frames are listed innermost first."""
    frame = next((one for one in frames if not is_library(one["filename"])), frames[0] if frames else None)
    return f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}" if frame else ""


def with_line(collectives: Sequence[Collective], line: str) -> list[Collective]:
    """Add the main thread's line to the only collective that has not ended. Until gloo has finished a collective, the
    host waits at the line that called it."""
    unfinished = [one for one in collectives if not one.done]
    alone = unfinished[0] if len(unfinished) == 1 and not unfinished[0].line else None
    return [replace(one, line=line) if one is alone else one for one in collectives]


@dataclass(frozen=True)
class Mismatch:
    ranks: tuple[int, ...]
    """The ranks that called another collective than most; none if no call is more frequent than the others."""
    why: str


def find_mismatch(called: Mapping[int, Iterable[Collective]]) -> Mismatch | None:
    """Return the first collective for which the ranks called different ones, if it has not ended on all ranks.

    Only ranks whose records still contain the number are compared."""
    by_number: defaultdict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, collectives in sorted(called.items()):
        for one in collectives:
            by_number[one.group, one.number][rank] = one
    for (group, number), calls in sorted(by_number.items()):
        alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, one in calls.items():
            alike[_agreed(one)].append(rank)
        # A call that has ended everywhere worked, whatever the recorder writes about it.
        if len(alike) < 2 or all(one.done for one in calls.values()):
            continue
        most = sorted(alike.values(), key=len, reverse=True)
        odd = () if len(most[0]) == len(most[1]) else tuple(sorted(rank for few in most[1:] for rank in few))
        said = "; ".join(f"{list_ranks(ranks)} called {calls[ranks[0]].text}" for ranks in reversed(most))
        return Mismatch(odd, f"the ranks called different collectives as number {number} of group {group}: {said}")
    return None


def _agreed(one: Collective) -> tuple[object, ...]:
    """Return the properties that must be the same on all ranks. Shapes may differ if the numbers of values are equal,
    because only these travel."""
    kind = one.kind.rpartition(":")[2].lstrip("_")
    if kind.startswith(UNEVEN):
        return (kind,)
    return kind, one.dtypes, tuple(map(_values, one.sizes))


def _values(size: tuple[int, ...]) -> int:
    values = 1
    for length in size:
        values *= length
    return values


def find_missing(called: Mapping[int, Iterable[Collective]], ranks: Iterable[int]) -> Collective | None:
    """Return the collective that others wait in and that none of `ranks` has called; None if there is none, or if it is
    unknown because the ranks have not called anything in its group."""
    missing = set(ranks)
    newest: dict[str, int] = {}
    for rank in missing & called.keys():
        for one in called[rank]:
            newest[one.group] = max(newest.get(one.group, 0), one.number)
    waited_for = [
        one
        for rank, collectives in sorted(called.items())
        for one in collectives
        if rank not in missing and not one.done and one.number > newest.get(one.group, one.number)
    ]
    # The host waits for the device, so a collective of the device is the one to name.
    return min(waited_for, key=lambda one: one.kind.startswith("gloo:"), default=None)
