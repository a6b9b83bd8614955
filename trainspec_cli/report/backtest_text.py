"""A backtest as tables for the terminal, from its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]


def render_backtest(data: Json) -> str:
    """Errors over all rows, by source, model and chip; sweeps; refusals and what was assumed."""
    summary = data["summary"]
    blocks = [_headline(summary)]
    for column, title in (("by_source", "source"), ("by_model", "model"), ("by_gpu", "chip")):
        if summary[column]:
            blocks.append(_errors(title, summary[column]))
    if summary["sweeps"]:
        blocks.append(_sweeps(summary["sweeps"]))
    if summary["refused"]:
        reasons = [f"  {count:5d}  {reason}" for reason, count in summary["refused_by_reason"].items()]
        blocks.append("\n".join(["refused", *reasons]))
    assumed = _assumed(data["rows"])
    if assumed:
        blocks.append("\n".join(["assumed, where the row is silent", *assumed]))
    return "\n\n".join(blocks)


def _headline(summary: Json) -> str:
    lines = [f"{summary['rows']} rows, {summary['predicted']} predicted, {summary['refused']} refused"]
    if summary["step_time_mape"] is not None:
        lines.append(
            f"step time: mean error {summary['step_time_mape']:.1%}, median {summary['step_time_median_ape']:.1%}, "
            f"bias {summary['bias']:+.1%}, over {summary['judged']} measured rows"
        )
    if summary["memory_mape"] is not None:
        worst = summary["memory_worst_under"]
        lines.append(f"memory: mean error {summary['memory_mape']:.1%}, furthest under {worst:+.1%}")
    return "\n".join(lines)


def _errors(title: str, groups: Mapping[str, Json]) -> str:
    width = max(len(title), *(min(len(name), 40) for name in groups))
    lines = [f"{title:{width}}   rows   mean  median    bias"]
    for name, group in groups.items():
        figures = f"{group['mape']:7.1%} {group['median_ape']:7.1%} {group['bias']:+7.1%}"
        lines.append(f"{name[:40]:{width}}  {group['rows']:5d} {figures}")
    return "\n".join(lines)


def _sweeps(sweeps: Iterable[Json]) -> str:
    found = list(sweeps)
    near = sum(sweep["loss"] <= 0.05 for sweep in found)
    lines = [f"sweeps of layouts: the one predicted fastest is within 5% of the fastest in {near} of {len(found)}"]
    for sweep in sorted(found, key=lambda item: -item["loss"])[:5]:
        lines.append(f"  {sweep['loss']:6.1%} slower: {sweep['model']} on {sweep['gpu']}, {sweep['layouts']} layouts")
    return "\n".join(lines)


def _assumed(rows: Iterable[Json]) -> list[str]:
    counts: dict[str, int] = {}
    for row in rows:
        for what in row["assumed"]:
            counts[what] = counts.get(what, 0) + 1
    return [f"  {count:5d}  {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1])]
