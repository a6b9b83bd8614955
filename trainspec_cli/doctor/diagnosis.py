"""What the doctor says of a job's hosts, put together: their reports, their links, the slowest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainspec_cli.doctor.checks import Check
from trainspec_cli.doctor.judge import BELOW, FAR_BELOW, SPEEDS, Comparison, compare
from trainspec_cli.doctor.links import judge_links
from trainspec_cli.units import format_si

CLOCK_APART_S = 1.0
"""A report is on its way for less than this."""


def diagnose(reports: Sequence[dict[str, Any]], links: Mapping[str, Any] | None) -> dict[str, Any]:
    """As JSON holds it; `status` is the worst that was found."""
    comparisons = compare(reports)
    between = [*map(_compared, comparisons), *filter(None, map(_clock, reports)), *judge_links(links)]
    hosts = [{**report, "checks": [*report["checks"], *map(asdict, _speeds(report["speed"]))]} for report in reports]
    found = [check["status"] for host in hosts for check in host["checks"]] + [check.status for check in between]
    return {
        "status": next((status for status in ("fail", "warn") if status in found), "ok"),
        "hosts": hosts,
        "between": [asdict(check) for check in between],
        "slowest": comparisons[0].host if comparisons else None,
        "links": links,
    }


def _speeds(speed: Mapping[str, Any]) -> list[Check]:
    units = {"matmul_flops": "FLOP/s", "memory_bytes_per_s": "B/s"}
    known = [figure for figure in SPEEDS if figure in speed]
    return [Check(SPEEDS[figure], "ok", format_si(speed[figure], units[figure])) for figure in known]


def _compared(comparison: Comparison) -> Check:
    advice = f"see what else runs on {comparison.host}; its cooling, power limit and clocks"
    if comparison.ratio >= BELOW:
        return Check("slowest", "ok", comparison.words)
    return Check("slowest", "fail" if comparison.ratio < FAR_BELOW else "warn", comparison.words, advice)


def _clock(report: Mapping[str, Any]) -> Check | None:
    """Against the first host's, which noted when the report came."""
    apart_s = report["time"] - report.get("heard_at", report["time"])
    if abs(apart_s) < CLOCK_APART_S:
        return None
    found = f"{report['host']} is {abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} the first host"
    return Check("clock", "warn", found, "let chrony or systemd-timesyncd keep it")
