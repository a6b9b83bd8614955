"""The assumptions that a forecast rests on, gathered from the specs: every input with the key that changes it, and its
source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainspec_cli.planner.memory.frameworks import DEFAULT_MEMORY, MemoryModel
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.forecast import Assumption
from trainspec_cli.spec.results.prediction import Candidate
from trainspec_cli.units import GIB

RESTART_KEYS = ("mtbf_device_hours", "detect_s", "swap_s", "start_s")
ELASTIC_KEYS = ("job_wide_fraction", "shrink_stall_s", "rejoin_stall_s", "heal_gb_per_s")
SITE_KEYS = ("pue", "carbon_g_per_kwh")
POWER_KEYS = ("busy", "waiting", "idle", "host")
OWNED_KEYS = ("device_price_usd", "useful_years", "utilisation", "operation_ratio")
MEMORY_KNOWN_WITHIN = 1.1
MEMORY_SOURCE = (
    "predicted, {reserve:.0%} added for the spread between like runs; {fragmentation:.0%} of the activations held idle"
    " by the allocator, {context:.1f} GiB for the device's context, {group:.2f} GiB for each communicator"
)
STORAGE_SOURCE = "a node, to checkpoint storage; BLOOM wrote 2.3 TB in 40 s from 48 nodes (stas00/ml-engineering)"


def gather_assumptions(spec: RunSpec, candidate: Candidate, step_time_known_within: float) -> tuple[Assumption, ...]:
    """Return the assumptions that `forecast_run` uses, in the order of time, energy, money."""
    cluster = spec.cluster
    step_time = Assumption(
        "step_time_s", candidate.step_time_s, step_time_known_within, "predicted; see trainspec backtest"
    )
    memory = Assumption("peak_memory_bytes", candidate.peak_memory_bytes, MEMORY_KNOWN_WITHIN, memory_source())
    storage = Assumption("cluster.storage_gb_per_s", cluster.storage_gb_per_s, source=STORAGE_SOURCE)
    elastic = ELASTIC_KEYS if candidate.layout.dp_replicate > 1 else ()
    spares = ("spare_nodes", "repair_s") if cluster.reliability.spare_nodes is not None else ()
    return (
        step_time,
        memory,
        storage,
        *_of("cluster.reliability", cluster.reliability, (*RESTART_KEYS, *spares, *elastic)),
        *_of_accelerator(spec, "tdp_w"),
        *_of("cluster.power", cluster.power, POWER_KEYS),
        *_of("cluster.site", cluster.site, SITE_KEYS),
        *_of_price(spec),
    )


def memory_source(constants: MemoryModel = DEFAULT_MEMORY) -> str:
    """Name what a peak counts besides the tensors."""
    return MEMORY_SOURCE.format(
        reserve=constants.reserve,
        fragmentation=constants.fragmentation,
        context=constants.context_bytes / GIB,
        group=constants.group_bytes / GIB,
    )


def _of(path: str, spec: Any, keys: Iterable[str]) -> list[Assumption]:
    return [
        Assumption(
            key=f"{path}.{key}",
            value=getattr(spec, key),
            known_within=spec.known_within.get(key, 1.0),
            source=spec.sources.get(key, ""),
            verified=key not in spec.unverified,
        )
        for key in keys
    ]


def _of_accelerator(spec: RunSpec, key: str, known_within: float = 1.0) -> list[Assumption]:
    accelerator = spec.cluster.accelerator
    if accelerator is None or not getattr(accelerator, key):
        return []
    sources = accelerator.sources or {}
    source = sources.get(key, sources.get("default", ""))
    return [Assumption(f"cluster.accelerator.{key}", getattr(accelerator, key), known_within, source)]


def _of_price(spec: RunSpec) -> list[Assumption]:
    cluster = spec.cluster
    if cluster.cost.owned:
        electricity = _of("cluster.site", cluster.site, ("electricity_usd_per_kwh",))
        return _of("cluster.cost", cluster.cost, OWNED_KEYS) + electricity
    if cluster.cost.price_usd_per_device_hour is not None:
        return _of("cluster.cost", cluster.cost, ("price_usd_per_device_hour",))
    within = cluster.cost.known_within.get("price_usd_per_device_hour", 1.0)
    return _of_accelerator(spec, "price_usd_per_hour", within)
