"""Print the goodput that others published beside the simulation of their run, fed with the rates that they give.

`python tests/bench/published_goodput.py`
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from trainspec_cli.planner.run.goodput import SimulatedJob, simulate_many
from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery.reliability import daly_interval_s, job_mtbf_s

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/data/measured/goodput.yaml"
RELIABILITY = ROOT / "conf/reliability/llama3_h100.yaml"
DAY_S = 86_400.0
SEEDS = 40
WITHIN = 0.02
"""Points between what is simulated and what was published that count as agreement."""
DURATIONS = ("detect_s", "swap_s", "start_s")
DEFAULT_CHECKPOINT_S = 10.0
"""How long a checkpoint holds training up, and is read again, where a source says neither."""


@dataclass(frozen=True)
class PublishedRun:
    """A run that was published, and what the simulation makes of it."""

    name: str
    published: float
    is_bound: bool
    """The source says that it was at least this."""
    simulated: float
    low: float
    high: float
    """Bounds that hold nine times in ten, over what the source leaves open."""
    left_open: tuple[str, ...]
    """What the source does not say, and the planner's own assumptions stand for."""

    @property
    def difference(self) -> float:
        """Simulated less published, in parts of one; a bound that is kept is no difference."""
        off = self.simulated - self.published
        return min(0.0, off) if self.is_bound else off

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= WITHIN


def compare_runs() -> list[PublishedRun]:
    return [_compare(entry) for entry in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]


def _compare(entry: Mapping[str, Any]) -> PublishedRun:
    cluster = _cluster_of(entry)
    outcomes = simulate_many(_job_of(entry, cluster), cluster, ResilienceSpec(mode="restart"), SEEDS)
    other = sum(entry.get("also_lost_hours", {}).values()) / 24 / entry["days"]
    kept = [outcome.goodput * (1 - other) for outcome in outcomes]
    published, is_bound = _published(entry)
    return PublishedRun(
        name=entry["name"],
        published=published,
        is_bound=is_bound,
        simulated=statistics.median(kept),
        low=kept[round(0.05 * (SEEDS - 1))],
        high=kept[round(0.95 * (SEEDS - 1))],
        left_open=_left_open(entry),
    )


def _published(entry: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the published goodput, and whether it is a lower bound; from dates and steps where it is not said."""
    if progress := entry.get("progress"):
        days = (_day(progress["to_date"]) - _day(progress["from_date"])).days
        return (progress["to_step"] - progress["from_step"]) * progress["step_s"] / (days * DAY_S), False
    said = entry["goodput"]
    return (said["at_least"], True) if "at_least" in said else (said["value"], False)


def _day(value: Any) -> date:
    return value if isinstance(value, date) else date.fromisoformat(value)


def _cluster_of(entry: Mapping[str, Any]) -> ReliabilitySpec:
    """Return the planner's own rates, with those that the source gives in their place, known exactly."""
    assumed = yaml.safe_load(RELIABILITY.read_text(encoding="utf-8"))
    cluster = ReliabilitySpec(**{**assumed, "unverified": tuple(assumed["unverified"])})
    given: dict[str, float] = {key: entry[key] for key in DURATIONS if key in entry}
    if "failures" in entry:
        given["mtbf_device_hours"] = entry["devices"] * entry["days"] * 24 / entry["failures"]
    within = {key: factor for key, factor in cluster.known_within.items() if key not in given}
    # These clusters had other nodes to replace a failed one.
    return replace(cluster, **given, known_within=within, spare_nodes=1, repair_s=0.0)


def _job_of(entry: Mapping[str, Any], cluster: ReliabilitySpec) -> SimulatedJob:
    blocked_s = entry.get("checkpoint_s", DEFAULT_CHECKPOINT_S)
    best_s = daly_interval_s(blocked_s, job_mtbf_s(cluster, entry["devices"]))
    return SimulatedJob(
        work_s=entry["days"] * DAY_S * _published(entry)[0],
        step_time_s=1.0,
        devices=entry["devices"],
        replica_groups=1,
        interval_s=entry.get("checkpoint_every_s", best_s),
        blocked_s=blocked_s,
        written_s=blocked_s,
        state_bytes_per_device=0.0,
        load_s=entry.get("load_s", blocked_s),
    )


def _left_open(entry: Mapping[str, Any]) -> tuple[str, ...]:
    names = {"failures": "failures", "detect_s": "detection", "start_s": "restart", "checkpoint_s": "checkpoints"}
    return tuple(name for key, name in names.items() if key not in entry)


def main() -> None:
    print(f"{'run':<14}{'published':>10}{'simulated':>11}{'nine in ten':>18}{'apart':>8}  not in the source")
    for run in compare_runs():
        said = f"{'>' if run.is_bound else ''}{run.published:.1%}"
        bounds = f"{run.low:.1%} to {run.high:.1%}"
        off = f"{100 * run.difference:+.1f}"
        print(f"{run.name:<14}{said:>10}{run.simulated:>11.1%}{bounds:>18}{off:>8}  {', '.join(run.left_open) or '-'}")


if __name__ == "__main__":
    main()
