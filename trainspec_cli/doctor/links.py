"""What the processes of a job reach of one another: which pair of hosts is slow, and whose cable it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from trainspec_cli.doctor.checks import Check
from trainspec_cli.units import format_bytes, format_si

SLOW_LINK = 0.5
"""A pair of hosts with less than this part of the usual rate is warned of."""

Pair = Mapping[str, Any]


def judge_links(links: Mapping[str, Any] | None) -> list[Check]:
    """`links`: what the engine's links module has measured; None for a single process."""
    if links is None:
        return []
    return [*map(_all_reduce, links["all_reduce"]), *_pairs(links["pairs"])]


def _all_reduce(row: Mapping[str, float]) -> Check:
    rate = format_si(row["bus_bytes_per_s"], "B/s")
    return Check("all-reduce", "ok", f"{format_bytes(int(row['bytes']))} in {_milliseconds(row)}, {rate}")


def _pairs(pairs: Sequence[Pair]) -> Iterator[Check]:
    """Against the median of the hosts' own best: one bad cable slows all pairs of its host, the half of them or more
    where hosts are few, and no other host's best."""
    best = _best_rates(pairs)
    usual = median(best.values()) if best else 0.0
    for pair in pairs:
        yield _pair(pair, pair["bytes_per_s"] / usual)
    for host, rate in best.items():
        if rate < SLOW_LINK * usual:
            found = f"{host} reaches nobody at more than {format_si(rate, 'B/s')}, {rate / usual:.0%} of the usual"
            yield Check("slow link", "warn", found, f"look at {host}'s cable and port, and what else uses its link")


def _best_rates(pairs: Sequence[Pair]) -> dict[str, float]:
    """Of each host with its fastest peer."""
    best: dict[str, float] = {}
    for pair in pairs:
        for host in pair["hosts"]:
            best[host] = max(best.get(host, 0.0), pair["bytes_per_s"])
    return best


def _pair(pair: Pair, ratio: float) -> Check:
    smallest = pair["sizes"][0]
    brief = f"{format_bytes(int(smallest['bytes']))} in {_milliseconds(smallest)}"
    found = f"{' - '.join(pair['hosts'])}: {format_si(pair['bytes_per_s'], 'B/s')}, {brief}"
    if ratio >= SLOW_LINK:
        return Check("pair", "ok", found)
    return Check("pair", "warn", f"{found}: {ratio:.0%} of the usual", "look at the cables and ports of both")


def _milliseconds(row: Mapping[str, float]) -> str:
    return f"{row['seconds'] * 1e3:.2f} ms"
