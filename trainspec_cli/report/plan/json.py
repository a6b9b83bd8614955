"""A capacity plan as one JSON object, schema `trainspec.plan/1`: the terminal and the page are drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import finite_or_none
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.forecast import Goodput, Interval, RunForecast
from trainspec_cli.spec.results.prediction import Candidate, CapacityPlan, MemoryBreakdown

SCHEMA = "trainspec.plan/1"
SWEEP_SCHEMA = "trainspec.plan-sweep/1"


def plan_as_json(spec: RunSpec, plan: CapacityPlan, run: RunForecast | None) -> dict[str, Any]:
    """`best` and `run` are null when no layout fits; then `advice` says what would."""
    return {
        "schema": SCHEMA,
        "model": _model(spec, plan),
        "cluster": _cluster(spec, plan),
        "batching": {"global_batch_size": spec.batching.global_batch_size, "seq_len": spec.data.seq_len},
        "best": _candidate(plan.best) if plan.best else None,
        "candidates": [_candidate(candidate) for candidate in plan.candidates],
        "considered": plan.considered,
        "rejected": dict(sorted(plan.rejected.items(), key=lambda item: -item[1])),
        "advice": list(plan.advice),
        "assumptions": list(plan.assumptions),
        "run": _run(run) if run else None,
    }


def sweep_as_json(keys: Sequence[str], points: Sequence[tuple[Sequence[str], dict[str, Any]]]) -> dict[str, Any]:
    """One plan for each combination of the swept keys' values."""
    return {
        "schema": SWEEP_SCHEMA,
        "key": ", ".join(keys),
        "points": [
            {"value": ", ".join(values), "values": dict(zip(keys, values, strict=True)), "plan": plan}
            for values, plan in points
        ],
    }


def _model(spec: RunSpec, plan: CapacityPlan) -> dict[str, Any]:
    return {
        "name": spec.model.name,
        "family": spec.model.family,
        "params": plan.params,
        "active_params": plan.active_params,
        "flops_per_token": plan.flops_per_token,
    }


def _cluster(spec: RunSpec, plan: CapacityPlan) -> dict[str, Any]:
    cluster = spec.cluster
    return {
        "name": cluster.name,
        "accelerator": cluster.accelerator.name if cluster.accelerator else cluster.device,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": plan.world_size // cluster.num_nodes,
        "world_size": plan.world_size,
        "site": cluster.site.name,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    heaviest = max(candidate.memory, key=lambda stage: stage.total_bytes, default=MemoryBreakdown())
    plain = to_plain(candidate)
    return {
        **plain,
        "layout": _layout(candidate.layout),
        "memory": to_plain(heaviest),
        "memory_by_stage": plain["memory"],
        "fits": candidate.fits,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    """Describe a layout, without a schedule where there is no pipeline, and sequence parallelism where tp is 1."""
    described = to_plain(layout)
    if layout.pp == 1:
        for key in ("pipeline_schedule", "virtual_stages", "stage_layers"):
            described.pop(key, None)
    if layout.tp == 1:
        described.pop("sequence_parallel", None)
    return described


def _run(run: RunForecast) -> dict[str, Any]:
    """Expected values under their plain names; their bounds, nine in ten, under `intervals`."""
    intervals = {
        "wall_time_s": run.wall_time_s,
        "goodput": run.goodput.goodput,
        "energy_joules": run.energy_joules,
        "carbon_kg": run.carbon_kg,
        "cost_usd": run.cost_usd,
    }
    return {
        "steps": run.steps,
        "tokens": run.tokens,
        "batches": [to_plain(batch) for batch in run.batches],
        **{name: interval.value if interval else None for name, interval in intervals.items()},
        "intervals": {name: _bounds(interval) for name, interval in intervals.items()},
        "recovery": _goodput(run.goodput),
        "alternatives": [_goodput(other) for other in run.alternatives],
        "energy_parts_joules": run.energy_parts_joules,
        "cost_parts_usd": run.cost_parts_usd,
        "assumptions": [to_plain(assumption) for assumption in run.assumptions],
        "notes": list(run.notes),
    }


def _goodput(goodput: Goodput) -> dict[str, Any]:
    best_s = finite_or_none(goodput.optimal_interval_s)
    own = {"goodput": goodput.goodput.value, "interval": _bounds(goodput.goodput), "optimal_interval_s": best_s}
    return to_plain(goodput) | own


def _bounds(interval: Interval | None) -> list[float] | None:
    return [interval.low, interval.high] if interval else None
