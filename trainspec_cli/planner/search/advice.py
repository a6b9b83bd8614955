"""Advice for a run that does not fit: overrides that make it fit, each tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.planner.capacity import find_best, search_of
from trainspec_cli.planner.hardware.cluster import describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import Fabric
from trainspec_cli.planner.search.space import open_layout
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.recipe.rules.check import check

TRIED = 16
"""Layouts that are counted tensor by tensor, for one that is to fit."""
MORE_NODES = (2, 4, 8, 16, 32, 64)
RANK = 16
"""The rank of the adapters that are suggested."""

Change = tuple[str, Callable[[RunSpec], RunSpec]]
"""(the override to type, what it makes of a recipe)"""

OPEN: Change = (
    "layout=auto recompute=auto",
    lambda spec: replace(spec, layout=open_layout(spec), recompute=AUTO),
)
OFFLOADED: Change = ("offload=optimizer", lambda spec: replace(spec, offload="optimizer"))
ADAPTERS: Change = (f"lora.rank={RANK}", lambda spec: replace(spec, lora=replace(spec.lora, rank=RANK)))
BESIDE_NF4: Change = (
    f"lora.rank={RANK} lora.base=nf4",
    lambda spec: spec if spec.lora.rank else replace(spec, lora=replace(spec.lora, rank=RANK, base="nf4")),
)
QUANTISED: Change = (
    "lora.base=nf4",
    lambda spec: replace(spec, lora=replace(spec.lora, base="nf4")) if spec.lora.rank else spec,
)
ADAPTERS_NOTE = "training adapters of an `init.from`, not all weights"
SINGLE: tuple[Change, ...] = (
    ("recompute=full", lambda spec: spec if spec.recompute == AUTO else replace(spec, recompute="full")),
    ("batching.micro_batch_size=1", lambda spec: _with_smallest_micro_batch(spec)),
    OPEN,
    OFFLOADED,
    ADAPTERS,
)
TOGETHER = ((OPEN, OFFLOADED), (OPEN, ADAPTERS))
"""Tried where neither of the two suffices."""
IN_4_BITS = ((BESIDE_NF4,), (QUANTISED,), (OPEN, BESIDE_NF4), (OPEN, QUANTISED))
"""Tried where adapters beside a base in full do not fit."""


def advise(spec: RunSpec, machine: Machine | None = None) -> Iterator[str]:
    """Yield the changes with which the run fits, those that change least first, and the smallest number of nodes."""
    fabric = describe_fabric(spec.cluster, machine)
    eff = efficiency_of(spec.cluster)
    fitting: set[str] = set()
    with_adapters = False
    for changes in (*((change,) for change in SINGLE), *TOGETHER, *IN_4_BITS):
        if fitting & {words for words, _ in changes} or (changes in IN_4_BITS and with_adapters):
            continue
        changed = spec
        for _, apply in changes:
            changed = apply(changed)
        found = _find_fastest(changed, spec, fabric, eff)
        if found:
            fitting |= {changes[0][0]} if len(changes) == 1 else set()
            has_adapters = bool({ADAPTERS, BESIDE_NF4} & set(changes))
            with_adapters |= has_adapters or QUANTISED in changes
            note = f", {ADAPTERS_NOTE}" if has_adapters else ""
            yield _describe(" ".join(words for words, _ in changes), found) + note
    words, apply = OPEN
    for factor in MORE_NODES:  # the fewest more nodes that help: others would help too
        nodes = spec.cluster.num_nodes * factor
        larger = replace(spec, cluster=replace(spec.cluster, num_nodes=nodes))
        fabric_of_all = replace(fabric, num_devices=fabric.num_devices * factor)
        if found := _find_fastest(apply(larger), spec, fabric_of_all, eff):
            yield _describe(f"cluster.num_nodes={nodes} {words}", found)
            break


def _find_fastest(changed: RunSpec, spec: RunSpec, fabric: Fabric, eff: Efficiency) -> Candidate | None:
    """Return the best layout of a changed recipe that fits; None where none does, where the change is none, and where
    the recipe is refused with it."""
    if changed == spec or len(check(changed)) > len(check(spec)):
        return None
    return find_best(search_of(changed, fabric, eff), changed, eff, TRIED)


def _describe(words: str, found: Candidate) -> str:
    peak = format_bytes(found.peak_memory_bytes)
    chance = f"{min(found.fit_probability, 0.99):.0%}"
    return f"{words} fits at {chance}, with {peak} a device and {format_duration(found.step_time_s)} a step"


def _with_smallest_micro_batch(spec: RunSpec) -> RunSpec:
    if spec.batching.micro_batch_size in (1, AUTO):
        return spec
    return replace(spec, batching=replace(spec.batching, micro_batch_size=1))
