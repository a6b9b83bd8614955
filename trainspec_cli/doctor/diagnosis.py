"""Nodes side by side: the slowest, those that are not fit, the links between them, and the diagnosis of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.spec.results.doctor import Check, Diagnosis, NodeReport, Status
from trainspec_cli.spec.results.tools import AllReduceRate, LinksResult, PairRate, PingRate, SpeedResult
from trainspec_cli.units import format_bytes, format_si

SPEEDS = {"matmul_flops": ("matrix products", "FLOP/s"), "memory_bytes_per_s": ("memory", "B/s")}
"""Figures of `SpeedResult` that nodes are compared by -> their names and units."""
FAR_BELOW = 0.6
"""A node with less than this part of the others' median speed is refused: every step waits for the slowest."""
BELOW = 0.85
"""A node with less than this part of it is warned of."""
SLOW_LINK = 0.5
"""A pair of nodes with less than this part of the usual rate is warned of."""
CLOCK_APART_S = 1.0
"""A report is on its way for less than this."""


def diagnose(reports: Sequence[NodeReport], links: LinksResult | None) -> Diagnosis:
    comparisons = compare(reports)
    between = (*map(_compared, comparisons), *filter(None, map(_clock, reports)), *judge_links(links))
    hosts = tuple(replace(report, checks=(*report.checks, *_speeds(report.speed))) for report in reports)
    found = {check.status for report in hosts for check in report.checks} | {check.status for check in between}
    worst: tuple[Status, ...] = ("fail", "warn")
    return Diagnosis(
        status=next((status for status in worst if status in found), "ok"),
        hosts=hosts,
        between=between,
        slowest=comparisons[0].host if comparisons else None,
        links=links,
    )


def _speeds(speed: SpeedResult | None) -> Iterator[Check]:
    for figure, (name, unit) in SPEEDS.items() if speed else ():
        yield Check(name, "ok", format_si(getattr(speed, figure), unit))


def _clock(report: NodeReport) -> Check | None:
    """Compare a node's clock with the first node's, which noted when the report came."""
    apart_s = 0.0 if report.heard_at is None else report.time - report.heard_at
    if abs(apart_s) < CLOCK_APART_S:
        return None
    found = f"{report.host} is {abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} the first node"
    return Check("clock", "warn", found, "let chrony or systemd-timesyncd keep it")


# Speeds


@dataclass(frozen=True)
class Comparison:
    """The slowest node by one figure."""

    host: str
    figure: str
    ratio: float
    """Its speed over the median of the others."""

    @property
    def sentence(self) -> str:
        return f"{self.host} is slowest at {SPEEDS[self.figure][0]}: {self.ratio:.0%} of what the others do"


def compare(reports: Sequence[NodeReport]) -> list[Comparison]:
    """Return the slowest node by each figure, the worst first; empty for one node."""
    found = []
    for figure in SPEEDS:
        speeds = [(float(getattr(report.speed, figure)), report.host) for report in reports if report.speed]
        if len(speeds) > 1:
            (slowest, host), *others = sorted(speeds)
            found.append(Comparison(host, figure, slowest / median(speed for speed, _ in others)))
    return sorted(found, key=lambda comparison: comparison.ratio)


def _compared(comparison: Comparison) -> Check:
    advice = f"see what else runs on {comparison.host}; its cooling, power limit and clocks"
    if comparison.ratio >= BELOW:
        return Check("slowest", "ok", comparison.sentence)
    return Check("slowest", "fail" if comparison.ratio < FAR_BELOW else "warn", comparison.sentence, advice)


def refuse_unfit(reports: Sequence[NodeReport]) -> None:
    """Raises MachineError with every node that fails a check or falls far below the others."""
    problems = [_failed(report.host, check) for report in reports for check in report.checks if check.status == "fail"]
    problems += [_too_slow(comparison) for comparison in compare(reports) if comparison.ratio < FAR_BELOW]
    if problems:
        raise MachineError(problems)


def _failed(host: str, check: Check) -> Problem:
    message = f"{host} is not fit: {check.name}: {check.found}"
    hint = f"{check.advice}; or start all the same with run.preflight=false"
    return Problem("unfit_host", message, hint=hint, environment=True)


def _too_slow(comparison: Comparison) -> Problem:
    hint = (
        f"see what else runs there (trainspec doctor), leave it out (cluster.slurm.exclude={comparison.host}), "
        "or start all the same with run.preflight=false"
    )
    message = f"{comparison.sentence}, and every step would wait for it"
    return Problem("slow_host", message, hint=hint, environment=True)


# Links


def judge_links(links: LinksResult | None) -> list[Check]:
    """Return the all-reduce's rates, each pair's, and the nodes that reach no other at the usual rate."""
    if links is None:
        return []
    checks = []
    for rate in links.all_reduce:
        found = f"{format_bytes(rate.bytes)} in {_milliseconds(rate)}, {format_si(rate.bus_bytes_per_s, 'B/s')}"
        checks.append(Check("all-reduce", "ok", found))
    return [*checks, *_pairs(links.pairs)]


def _pairs(pairs: Sequence[PairRate]) -> Iterator[Check]:
    """Judge against the median of the nodes' own best: one bad cable slows all pairs of its node, the half of them or
    more where nodes are few, and no other node's best."""
    best = _best_rates(pairs)
    usual = median(best.values()) if best else 0.0
    for pair in pairs:
        yield _pair(pair, pair.bytes_per_s / usual)
    for host, rate in best.items():
        if rate < SLOW_LINK * usual:
            found = f"{host} reaches nobody at more than {format_si(rate, 'B/s')}, {rate / usual:.0%} of the usual"
            yield Check("slow link", "warn", found, f"check {host}'s cable and port, and what else uses its link")


def _best_rates(pairs: Sequence[PairRate]) -> dict[str, float]:
    """Return the rate of each node with its fastest peer."""
    best: dict[str, float] = {}
    for pair in pairs:
        for host in pair.hosts:
            best[host] = max(best.get(host, 0.0), pair.bytes_per_s)
    return best


def _pair(pair: PairRate, ratio: float) -> Check:
    smallest = pair.sizes[0]
    brief = f"{format_bytes(smallest.bytes)} in {_milliseconds(smallest)}"
    found = f"{' - '.join(pair.hosts)}: {format_si(pair.bytes_per_s, 'B/s')}, {brief}"
    if ratio >= SLOW_LINK:
        return Check("pair", "ok", found)
    return Check("pair", "warn", f"{found}: {ratio:.0%} of the usual", "check the cables and ports of both")


def _milliseconds(rate: AllReduceRate | PingRate) -> str:
    return f"{rate.seconds * 1e3:.2f} ms"
