"""Enumerate the layouts that a recipe leaves open and its framework can run, and count the rejected ones by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from trainspec_cli.balance.batch.division import count_micro_batches, turns_of
from trainspec_cli.core.errors import Problem
from trainspec_cli.planner.setup import changed
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec, PipelineSchedule, ZeroStage
from trainspec_cli.recipe.keys.model import ModelSpec, TextModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.check import BUILT, KERNEL_RULES, apply_in_range
from trainspec_cli.recipe.rules.layout import exchanged, whole_hosts
from trainspec_cli.recipe.rules.run import forget_out_of_range, measurable_noise

MIN_TOKENS_PER_RANK = 512
"""Minimum number of tokens per rank for context parallelism."""
MAX_MICRO_BATCHES = 6
"""Number of micro-batch sizes to try: the smallest powers of two, and all samples in one micro-batch."""
ELASTIC_GROUPS = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of replica groups to try. With more groups, a failure loses less work, but the state is sharded over fewer
devices."""


NOT_RUN = "the engine does not run them"


@dataclass
class Space:
    """Enumerates layouts, and counts the rejected ones by reason.

    In its layouts, `dp_replicate` counts the replicas of all replica groups together (`one_group`)."""

    spec: RunSpec
    world_size: int
    scaleup_devices: int
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        axes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "zero_stage"), AUTO)
        pipeline = dict.fromkeys(("pipeline_schedule", "virtual_stages"), AUTO)
        layout = replace(self.spec.layout, **axes, **pipeline)  # type: ignore[arg-type]
        self._open: RunSpec = forget_out_of_range(replace(self.spec, layout=layout))[0]
        self.anyhow = self._problems({})
        """Problems with the recipe that occur with every layout, and are therefore not a reason to reject one."""
        self._numbers: dict[tuple[int, int], tuple[list[int], int]] = {}
        """(A rank's samples, turns) -> (the micro-batch counts to try, how many others are left out)."""
        self._runs: dict[tuple[tuple[str, object], ...], bool] = {}
        compressed = self.spec.comm.gradients not in ("full", AUTO) or self.spec.comm.parameters != "full"
        self._limits_exchanges = compressed or self.spec.comm.across_nodes is not None
        self._measures_noise = self.spec.batching.schedule.kind == "noise"

    def layouts(self) -> Iterator[tuple[Layout, int, int]]:
        """Yield (layout, micro-batch size, gradient accumulation) for every layout to try."""
        wanted = self.spec.layout
        model = self.spec.model
        for tp in self._axis(wanted.tp, min(self.world_size, self.scaleup_devices)):
            if not self._keep(splits_heads(model, tp), "tp does not divide the heads") or not self._is_run(tp=tp):
                continue
            for cp in self._axis(wanted.cp, max(1, self.spec.data.seq_len // MIN_TOKENS_PER_RANK)):
                if not self._keep(self.spec.data.seq_len % cp == 0, "the sequence is not divisible by cp"):
                    continue
                closed = cp > 1 and wanted.cp == AUTO and "cp" in model.record.refuses
                if not self._keep(not closed, "this family of models does not support cp"):
                    continue
                if not self._is_run(tp=tp, cp=cp):
                    continue
                for pp in self._axis(wanted.pp, model.num_layers):
                    if self.world_size % (tp * cp * pp):
                        self.refused["the axes' product is not the number of devices"] += 1
                        continue
                    yield from self._data_parallel(tp, cp, pp)

    def _axis(self, wanted: int | str, most: int) -> Sequence[int]:
        if wanted != AUTO:
            return (int(wanted),)
        return [size for size in divisors(self.world_size) if size <= most]

    def _keep(self, fine: bool, reason: str) -> bool:
        if not fine:
            self.refused[reason] += 1
        return fine

    def _is_run(self, **axes: object) -> bool:
        """Return whether the engine supports layouts with these axes, regardless of the other axes.

        The rules of other frameworks are in `framework` (schedules, ZeRO stages)."""
        if not self.spec.framework.counted:
            return True
        key = tuple(axes.items())
        if key not in self._runs:
            self._runs[key] = all(problem in self.anyhow for problem in self._problems(axes))
        return self._keep(self._runs[key], NOT_RUN)

    def _problems(self, axes: dict[str, object]) -> list[Problem]:
        layout = replace(self._open.layout, **axes)  # type: ignore[arg-type]
        return apply_in_range((*BUILT, *KERNEL_RULES), replace(self._open, layout=layout))

    def _data_parallel(self, tp: int, cp: int, pp: int) -> Iterator[tuple[Layout, int, int]]:
        width = self.world_size // (tp * cp * pp)
        samples = self.spec.batching.global_batch_size
        wanted = self.spec.layout
        idle = samples < width and AUTO in (wanted.tp, wanted.cp, wanted.pp)
        if not self._keep(not idle, "a data-parallel rank would get no samples"):
            return
        per_rank = -(-samples // width)
        base = Layout(
            cp=cp,
            tp=tp,
            pp=pp,
            sequence_parallel=wanted.sequence_parallel and tp > 1,
            context_method=wanted.context_method,
        )
        for sharded in self._shardings(base, width):
            for routed in self._expert_axes(sharded):
                for layout in self._schedules(routed):
                    for accum in self._micro_batches(per_rank, turns_of(layout)):
                        # A zero-bubble schedule brings no gain with fewer micro-batches than stages.
                        starved = wanted.pipeline_schedule == AUTO and layout.splits_backward and accum < layout.pp
                        if not self._keep(not starved, "a zero-bubble schedule needs one micro-batch per stage"):
                            continue
                        # Reject layouts without the exchanges that the recipe compresses or measures.
                        if self.spec.framework.counted and (self._limits_exchanges or self._measures_noise):
                            one, groups = one_group(self.spec, layout)
                            noise = measurable_noise(self.spec, one, groups, accum)
                            if not self._keep(not [*noise, *exchanged(self.spec, one, groups)], NOT_RUN):
                                continue
                        yield layout, -(-per_rank // accum), accum

    def _shardings(self, base: Layout, width: int) -> Iterator[Layout]:
        """Yield the shardings to try: over all ranks, over the ranks of a node with replicas across nodes (ZeRO-3), and
        none.

        A run that survives failures by shrinking needs groups that each have the full state. Their number comes from
        the recipe, or several numbers are tried."""
        wanted = self.spec.layout
        elastic = self.spec.resilience.mode == "elastic"
        node = max(1, self.scaleup_devices // (base.tp * base.cp))
        # Count the replicas of all groups: `layout.dp_replicate` is the number inside a group if
        # `resilience.replica_groups` is set, otherwise the number of groups.
        groups = asked_groups(self.spec)
        open_replicas = wanted.dp_replicate == AUTO or (groups is None and wanted.dp_replicate == 1)
        asked = None if open_replicas else int(wanted.dp_replicate) * (groups or 1)
        options = {width, 1, *([node] if width % node == 0 else [])}
        if asked is not None:
            options.add(width // asked if width % asked == 0 else width)
        for number in ELASTIC_GROUPS if groups is None else (groups,):
            if elastic and width % number == 0:
                options.add(width // number)
        if wanted.dp_shard != AUTO and width % int(wanted.dp_shard) == 0:
            options.add(int(wanted.dp_shard))
        for shard in sorted(options):
            replicate = width // shard
            if wanted.dp_shard not in (AUTO, shard) or asked not in (None, replicate):
                continue
            if elastic:  # the replicas form complete replica groups, and each node holds complete groups or part of one
                number = groups or replicate
                parts = number > 1 and not any(whole_hosts(self.spec.cluster.num_nodes, number))
                if not (
                    self._keep(number > 1, "resilience=elastic needs two replica groups")
                    and self._keep(replicate % number == 0, "resilience.replica_groups does not divide the replicas")
                    and self._keep(parts, "nodes cannot be divided evenly among the replica groups")
                ):
                    continue
            # Try the ZeRO stages that the framework supports. The stage has no meaning without sharding.
            facts = self.spec.framework
            stages = stages_of(wanted, shard, replicate)
            had = [stage for stage in stages if shard == 1 or stage in facts.zero_stages]
            self._keep(had != [], f"{facts.name} has no such ZeRO stage")
            for stage in had:
                yield changed(base, dp_replicate=replicate, dp_shard=shard, zero_stage=stage)

    def _expert_axes(self, base: Layout) -> Iterator[Layout]:
        experts = self.spec.model.experts
        wanted = self.spec.layout
        if experts is None:
            yield base
            return
        ranks = base.expert_ranks
        sizes = divisors(experts.num_experts) if wanted.ep == AUTO else [int(wanted.ep)]
        for ep in sizes:
            for etp in [1] if wanted.etp == AUTO else [int(wanted.etp)]:
                fine = self._keep(ranks % (ep * etp) == 0, "ep does not divide the ranks that share experts")
                if fine and self._is_run(tp=base.tp, cp=base.cp, dp_shard=base.dp_shard, ep=ep, etp=etp):
                    yield changed(base, ep=ep, etp=etp)

    def _micro_batches(self, per_rank: int, turns: int) -> Sequence[int]:
        """Return the micro-batch counts to try, without duplicates."""
        key = per_rank, turns
        if key not in self._numbers:
            pinned = self.spec.batching.micro_batch_size
            powers = [2**power for power in range(MAX_MICRO_BATCHES) if 2**power < per_rank]
            sizes = [*powers, per_rank] if pinned == AUTO else [int(pinned)]
            numbers = dict.fromkeys(count_micro_batches(per_rank, size, turns) for size in sizes)
            most = per_rank if self.spec.layout.pipeline_schedule == AUTO else max(numbers)
            self._numbers[key] = [n for n in numbers if n <= most], sum(n > most for n in numbers)
        kept, left_out = self._numbers[key]
        if left_out:
            self.refused["fewer samples per rank than micro-batches that the schedule needs"] += left_out
        return kept

    def _schedules(self, base: Layout) -> Iterator[Layout]:
        wanted = self.spec.layout
        if base.pp == 1:
            yield base
            return
        layers = self.spec.model.num_layers
        if not self._keep(base.pp <= layers, "more pipeline stages than layers"):
            return
        schedules = [name for name in schedules_of(wanted) if name in self.spec.framework.schedules]
        if not self._keep(schedules != [], f"{self.spec.framework.name} has no such pipeline schedule"):
            return
        for schedule in schedules:
            legal: Sequence[int] = (1,)
            if schedule == "interleaved":
                per_stage = -(-layers // base.pp)
                sizes = [size for size in divisors(per_stage) if size > 1]
                sizes = sizes if wanted.virtual_stages == AUTO else [int(wanted.virtual_stages)]
                legal = [size for size in sizes if base.pp * size <= layers][:4]
                self._keep(legal != [], "more pipeline stages than layers")
            for chunks in legal:
                if not self._is_run(pp=base.pp, pipeline_schedule=schedule, virtual_stages=chunks):
                    continue
                yield changed(base, pipeline_schedule=schedule, virtual_stages=chunks, stage_layers=wanted.stage_layers)


def asked_groups(spec: RunSpec) -> int | None:
    """Return the number of replica groups in the recipe; None if every replica is a group."""
    if spec.resilience.mode != "elastic":
        return 1
    groups = spec.resilience.replica_groups
    return None if groups == AUTO else int(groups)


def one_group(spec: RunSpec, layout: Layout) -> tuple[Layout, int]:
    """Return (the layout of a replica group, the number of groups) for a search's layout, which counts the replicas of
    all groups together."""
    groups = asked_groups(spec) or layout.dp_replicate
    if groups == 1:
        return layout, 1
    return changed(layout, dp_replicate=layout.dp_replicate // groups), groups


def open_layout(spec: RunSpec) -> LayoutSpec:
    """Return a layout with every axis open."""
    wide = replace(spec.layout, dp_replicate=AUTO, dp_shard=AUTO, cp=AUTO, tp=AUTO, pp=AUTO, ep=AUTO)
    return replace(wide, zero_stage=AUTO, pipeline_schedule=AUTO, virtual_stages=AUTO)


def stages_of(wanted: LayoutSpec, shard: int, replicate: int) -> Sequence[ZeroStage]:
    """Return the ZeRO stages to try. Without sharding, the stage has no meaning; ZeRO-1 and 2 shard over all ranks."""
    if wanted.zero_stage != AUTO:
        return (wanted.zero_stage,)
    if shard == 1:
        return (1,)
    return (1, 3) if replicate == 1 else (3,)


def schedules_of(wanted: LayoutSpec) -> Sequence[PipelineSchedule]:
    if wanted.pipeline_schedule != AUTO:
        return (wanted.pipeline_schedule,)
    chunks = wanted.virtual_stages
    if chunks == 1:
        return "1f1b", "zero_bubble"
    return ("1f1b", "interleaved", "zero_bubble") if chunks == AUTO else ("interleaved",)


def splits_heads(model: ModelSpec, tp: int) -> bool:
    if tp == 1 or "tp" in model.record.refuses:
        return tp == 1
    text = cast("TextModel", model)
    heads = text.num_kv_heads or tp
    return text.num_heads % tp == text.ffn_size % tp == 0 and (heads % tp == 0 or tp % heads == 0)


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]
