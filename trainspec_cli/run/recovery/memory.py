"""The changes that a run makes when it runs out of memory: a smaller micro-batch, then recomputation, then offloading.

The global batch, and with it the loss and the gradients, stay the same up to rounding, because only the number of
passes and the location of the optimizer state change. Settings are ordered by the memory that they leave free. Each
out-of-memory failure leads to a later setting, so a run uses each setting at most once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trainspec_cli.balance.batch.division import micro_batches_of
from trainspec_cli.recipe.keys.run import Offload, Recompute
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting, Relief

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer")


def rank_setting(setting: MemorySetting) -> tuple[int, int, int]:
    """Return a setting's position in the order of all settings; later settings need less memory."""
    return OFFLOAD.index(setting.offload), RECOMPUTE.index(setting.recompute), -setting.micro_batch_size


def build_ladder(
    start: MemorySetting,
    *,
    keeps_micro_batches: bool = False,
    may_offload: bool = True,
    needed_bytes: Callable[[MemorySetting], float | None] = lambda _: None,
) -> tuple[MemorySetting, ...]:
    """Return `start`, the plan's setting, followed by the settings to use one after another when memory runs out.

    `keeps_micro_batches`: the micro-batch size must not change, because the samples of a micro-batch share statistics
    (batch norm). `may_offload`: the optimizer state is not in host memory yet. `needed_bytes` predicts the memory that
    a setting needs (None if unknown). A setting that does not need less than the previous one is left out."""
    ladder = [start]
    least = needed_bytes(start)
    for setting in _below(start, keeps_micro_batches=keeps_micro_batches, may_offload=may_offload):
        needed = needed_bytes(setting)
        if needed is None or least is None or needed < least:
            ladder.append(setting)
            least = needed
    return tuple(ladder)


def _below(start: MemorySetting, *, keeps_micro_batches: bool, may_offload: bool) -> Iterator[MemorySetting]:
    """Yield settings that first halve the micro-batch down to one sample, then recompute, then offload."""
    setting = start
    while setting.micro_batch_size > 1 and not keeps_micro_batches:
        setting = replace(setting, micro_batch_size=math.ceil(setting.micro_batch_size / 2))
        yield setting
    for recompute in RECOMPUTE[RECOMPUTE.index(start.recompute) + 1 :]:
        setting = replace(setting, recompute=recompute)
        yield setting
    if may_offload and start.offload == "none":
        yield replace(setting, offload="optimizer")


def next_setting(
    ladder: Sequence[MemorySetting], failed: MemorySetting, taken: MemorySetting | None = None
) -> MemorySetting | None:
    """Return the next setting of `ladder` to use. It comes after both `failed` (the run ran out of memory with it) and
    `taken` (the setting used last). None if no setting is left."""
    last = max(rank_setting(setting) for setting in (failed, taken or failed))
    return next((setting for setting in ladder if rank_setting(setting) > last), None)


def apply_reliefs(setting: MemorySetting, reliefs: Sequence[Relief]) -> MemorySetting:
    """Return the setting that results from applying `reliefs` to `setting`. If the result needs at least as much memory
    as a failed setting, it is replaced by that setting's successor."""
    while True:
        asks_as_much = [
            relief.taken
            for relief in reliefs
            if _is_alike(relief.failed, setting) and setting.micro_batch_size >= relief.failed.micro_batch_size
        ]
        # Only a damaged file contains a relief without a new setting; it is skipped.
        found = [taken for taken in asks_as_much if rank_setting(taken) > rank_setting(setting)]
        if not found:
            return setting
        setting = max(found, key=rank_setting)


def with_reliefs(plan: Plan, reliefs: Sequence[Relief]) -> Plan:
    """Return `plan` with the setting that the out-of-memory failures so far have led to. After the first one, no rank
    may process larger micro-batches than the others."""
    setting = apply_reliefs(plan.memory_setting, reliefs)
    if setting == plan.memory_setting and not any(_is_alike(relief.failed, setting) for relief in reliefs):
        return plan
    return replace(with_setting(plan, setting), largest_micro_batch_size=setting.micro_batch_size)


def _is_alike(failed: MemorySetting, setting: MemorySetting) -> bool:
    return (failed.recompute, failed.offload) == (setting.recompute, setting.offload)


def with_setting(plan: Plan, setting: MemorySetting) -> Plan:
    samples = math.ceil(plan.spec.batching.global_batch_size / plan.replica_groups)
    return replace(
        plan,
        micro_batch_size=setting.micro_batch_size,
        grad_accum_steps=micro_batches_of(plan.layout, setting.micro_batch_size, samples),
        recompute=setting.recompute,
        offload=setting.offload,
    )
