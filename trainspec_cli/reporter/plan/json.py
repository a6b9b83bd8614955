"""A plan as one JSON object with the schema `trainspec.plan/1`, and a sweep as one with the schema
`trainspec.plan-sweep/1`."""

from __future__ import annotations

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.json_text import finite_or_none
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.forecast import Goodput, Interval, RunForecast
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.reporter.plan.labels import PlanReport, SweepReport

SCHEMA = "trainspec.plan/1"
SWEEP_SCHEMA = "trainspec.plan-sweep/1"


def plan_as_json(plan: PlanReport) -> JsonObject:
    """Return a plan as JSON. If no layout fits, `best` and `run` are null, and `advice` names changes that would make
    one fit."""
    spec = plan.spec
    capacity = plan.capacity
    cluster = plan.spec.cluster
    sizes = {pool.devices_per_node for pool in cluster.pools} or {plan.capacity.world_size // cluster.num_nodes}
    pools: list[JsonValue] = [
        {
            "name": pool.name,
            "accelerator": pool.accelerator.name,
            "num_nodes": pool.num_nodes,
            "devices_per_node": pool.devices_per_node,
        }
        for pool in cluster.pools
    ]
    about: JsonObject = {"pools": pools} if pools else {}
    content: JsonObject = {
        "schema": SCHEMA,
        "model": {
            "name": spec.model.name,
            "family": spec.model.family,
            "params": capacity.params,
            "adapter_params": capacity.adapter_params,
            "active_params": capacity.active_params,
            "flops_per_token": capacity.flops_per_token,
        },
        "cluster": (
            about
            | {
                "name": cluster.name,
                "accelerator": plan.device,
                "num_nodes": cluster.num_nodes,
                "devices_per_node": sizes.pop() if len(sizes) == 1 else None,
                "world_size": plan.capacity.world_size,
                "site": cluster.site.name,
            }
        ),
        "batching": {"global_batch_size": spec.batching.global_batch_size, "seq_len": spec.data.seq_len},
        "best": _candidate(plan.best) if plan.best else None,
        "fastest": _candidate(capacity.fastest) if capacity.fastest else None,
        "usual": _candidate(capacity.usual) if capacity.usual else None,
        "safest": _candidate(capacity.safest) if capacity.safest else None,
        "candidates": [_candidate(candidate) for candidate in capacity.candidates],
        "considered": capacity.considered,
        "rejected": {**plan.rejected},
        "advice": [*capacity.advice],
        "assumptions": [*capacity.assumptions],
        "defaults": [*plan.defaults],
        "profile": plan.profile or None,
        "run": _run(plan.run) if plan.run else None,
    }
    if plan.trace:
        content["trace"] = plan.trace.as_json()
    parts = {
        "blueprint": plan.blueprint,
        "planes": plan.planes,
        "simulation": plan.simulation,
        "pools": plan.pools,
    }
    content |= {name: to_plain(part) for name, part in parts.items() if part}
    return content | {section.key: section.figures for section in plan.sections}


def sweep_as_json(sweep: SweepReport) -> JsonObject:
    return {
        "schema": SWEEP_SCHEMA,
        "key": sweep.key,
        "points": [
            {"value": point.value, "values": {**point.values}, "plan": plan_as_json(point.plan)}
            for point in sweep.points
        ],
    }


def _candidate(candidate: Candidate) -> JsonObject:
    plain = to_plain(candidate)
    if not candidate.pools:
        plain.pop("pools")
    # Omit the schedule if there is no pipeline, and sequence parallelism if tp is 1, because they have no effect then.
    layout = to_plain(candidate.layout)
    silent = [*("pipeline_schedule", "virtual_stages", "stage_layers")] if candidate.layout.pp == 1 else []
    silent += ["sequence_parallel"] if candidate.layout.tp == 1 else []
    return {
        **plain,
        "layout": {key: value for key, value in layout.items() if key not in silent},
        # The stage that uses the most memory determines whether a layout fits, so it gets the key `memory`.
        "memory": to_plain(candidate.fullest_memory),
        "memory_by_stage": plain["memory"],
        "fits": candidate.fits,
    }


def _run(run: RunForecast) -> JsonObject:
    """Return the forecast as JSON: expected values under their names, and 90% bounds under `intervals`."""
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
        "energy_parts_joules": {**run.energy_parts_joules},
        "cost_parts_usd": {**run.cost_parts_usd},
        "assumptions": [to_plain(assumption) for assumption in run.assumptions],
        "notes": [*run.notes],
    }


def _goodput(goodput: Goodput) -> JsonObject:
    return to_plain(goodput) | {
        "goodput": goodput.goodput.value,
        "interval": _bounds(goodput.goodput),
        "optimal_interval_s": finite_or_none(goodput.optimal_interval_s),
    }


def _bounds(interval: Interval | None) -> JsonValue:
    return [interval.low, interval.high] if interval else None
