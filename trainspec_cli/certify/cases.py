"""The matrix: which runs the clauses are measured on. A case is one plan; what is illegal is refused by the rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal

from trainspec_cli.certify.families import FAMILIES, LOSSES, SAMPLES, SEQ_LEN
from trainspec_cli.certify.live import SAVE_EVERY_STEPS, Live, live_runs
from trainspec_cli.certify.live import STEPS as LIVE_STEPS
from trainspec_cli.errors import Problem
from trainspec_cli.policy.batch.division import count_micro_batches, turns_of, weighted_counts
from trainspec_cli.policy.recovery.memory import build_ladder
from trainspec_cli.spec.recipe.batching import BatchingSpec, BatchScheduleSpec, RampStage
from trainspec_cli.spec.recipe.comm import CommSpec, WireFormat
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.kernels import KernelSpec
from trainspec_cli.spec.recipe.layout import Layout, LayoutSpec
from trainspec_cli.spec.recipe.optim import OptimSpec, ScheduleSpec
from trainspec_cli.spec.recipe.run import CheckpointSpec, Offload, PrecisionSpec, Recompute, RunSpec, TrainSection
from trainspec_cli.spec.results.plan import Plan, PlannedLayout
from trainspec_cli.spec.rules.check import apply
from trainspec_cli.spec.rules.engine import check_engine
from trainspec_cli.spec.rules.kernels import KERNEL_RULES

Compute = Literal["fp32", "bf16", "fp64", "fp8"]
"""fp8: linear layers multiply in it, the rest is bf16."""
STEPS = 20
SAVE_AT = 10
CLIP_FROM, CLIP_NORM = 10, 0.1
"""Plain descent clips from this step on, to less than any gradient's norm."""
RAMP = ((0, 4), (12, 8), (28, 12))
"""A batch that grows: samples trained, and the samples of the steps from there on."""
RAMP_SIZES = (4, 4, 4, 8, 8, 12, 12)
"""The steps that it makes."""


@dataclass(frozen=True)
class Case:
    family: str
    layout: Layout = field(default_factory=Layout)
    compute: Compute = "fp32"
    recompute: Recompute = "none"
    offload: Offload = "none"
    compile: bool = False
    micro_batch_size: int = 4
    """Samples of a micro-batch; a rank's samples where they are fewer."""
    optimizer: Literal["sgd", "adamw", "even_adamw"] = "sgd"
    unequal_shares: bool = False
    """The first data-parallel rank takes nearly all samples, so that the others have empty micro-batches."""
    ramp: bool = False
    """The batch grows while the run goes on."""
    gradients: WireFormat = "full"
    """The format in which gradients travel."""
    kernel: tuple[str, str] | None = None
    """An operation, and its backend in place of the default one."""
    live: Live | None = None
    """The trainer makes the run, as in a launch, and this is what happens to it."""

    @property
    def weights(self) -> tuple[float, ...]:
        """The shares of the data-parallel ranks; none where they are equal."""
        others = self.layout.data_parallel_size - 1
        return (float(SAMPLES - others), *([1.0] * others)) if self.unequal_shares else ()

    @property
    def name(self) -> str:
        """`dense-fp32-tp2.pp2.zbv-full`."""
        extras = {
            self.recompute: self.recompute != "none",
            "offload": self.offload != "none",
            "compiled": self.compile,
            self.optimizer: self.optimizer != "sgd" and not self.live,
            "shares": self.unequal_shares,
            "ramp": self.ramp,
            f"{self.gradients}_gradients": self.gradients != "full",
            ".".join(self.kernel or ()): self.kernel is not None,
        }
        shown = [extra for extra, wanted in extras.items() if wanted]
        shown += self.live.words if self.live else []
        return "-".join([self.family, self.compute, name_layout(self.layout), *shown])

    @property
    def kept(self) -> Case:
        """The same run of the trainer, to which nothing happens."""
        return replace(self, live=Live())

    @property
    def reference(self) -> Case:
        """The same arithmetic in one process."""
        return Case(
            self.family,
            compute=self.compute,
            micro_batch_size=self.micro_batch_size,
            optimizer=self.optimizer,
            ramp=self.ramp,
        )


def name_layout(layout: Layout) -> str:
    axes = [f"{axis}{getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")]
    words = [axis for axis in axes if not axis.endswith("1")] or ["one"]
    if layout.dp_shard > 1 and layout.zero_stage != 3:
        words.append(f"zero{layout.zero_stage}")
    if layout.cp > 1:
        words.append(layout.context_method)
    if layout.tp > 1 and not layout.sequence_parallel:
        words.append("plain")
    if layout.pp > 1:
        words.append(layout.pipeline_schedule)
    if layout.stage_layers:
        words.append("uneven")
    return ".".join(words)


# The matrix


def layouts(num_layers: int) -> Iterator[Layout]:
    """Every axis alone in every manner, and axes combined."""
    uneven = (num_layers - 1, 1)
    yield Layout(dp_replicate=2)
    yield from (Layout(dp_shard=2, zero_stage=stage) for stage in (1, 2, 3))
    yield from (Layout(tp=2, sequence_parallel=parallel) for parallel in (True, False))
    yield Layout(cp=2)
    yield Layout(cp=2, context_method="ulysses")
    yield from (Layout(pp=2, pipeline_schedule=schedule) for schedule in ("gpipe", "1f1b", "zero_bubble", "zbv"))
    yield Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    yield Layout(pp=2, stage_layers=uneven)
    yield Layout(dp_shard=2, ep=2)
    yield Layout(dp_replicate=2, dp_shard=2)
    yield Layout(dp_shard=2, tp=2)
    yield Layout(dp_shard=2, cp=2)
    yield Layout(dp_replicate=2, pp=2, pipeline_schedule="zbv")
    yield Layout(dp_shard=2, pp=2, pipeline_schedule="zero_bubble")
    yield Layout(dp_shard=2, pp=2, zero_stage=2)
    yield Layout(tp=2, cp=2)
    yield Layout(tp=2, pp=2)
    yield Layout(cp=2, pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    yield Layout(dp_shard=4, ep=2)
    yield Layout(dp_shard=2, tp=2, ep=4)
    yield Layout(dp_shard=2, pp=2, ep=2)
    yield Layout(dp_shard=2, tp=2, pp=2)
    yield Layout(dp_replicate=2, dp_shard=2, tp=2)
    yield Layout(tp=2, cp=2, pp=2)
    yield Layout(dp_shard=2, cp=2, pp=2, pipeline_schedule="zbv")
    yield Layout(dp_shard=4, tp=2, ep=8)


COMBINED = (
    Layout(dp_shard=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
    Layout(pp=2, pipeline_schedule="zbv"),
    Layout(dp_shard=2, ep=2),
    Layout(dp_shard=2, tp=2),
)
"""Layouts that recomputation, offload, compiling and bf16 are combined with."""
RAMPED = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2, pipeline_schedule="zbv"),
    Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2),
    Layout(dp_shard=2, ep=2),
    Layout(dp_replicate=2, dp_shard=2),
)
"""Layouts of the cases that train a batch which grows."""
COMPRESSED = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2),
    Layout(dp_shard=2, ep=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2, pp=2, pipeline_schedule="zero_bubble"),
)
"""Layouts of the cases whose gradients travel in fewer bits."""
COMPRESSED_FAMILIES = ("dense", "moe")
"""Exchanges know rows of numbers and no models: experts alone have exchanges of their own."""


def cases(max_processes: int, *, with_fp8: bool = True) -> dict[str, list[Case]]:
    """Return the legal cases of each clause that needs runs of its own, on at most `max_processes`.

    `with_fp8`: torchao is installed, so that linear layers can compute in fp8.
    """
    by_clause: dict[str, list[Case]] = {clause: [] for clause in OWN_CASES}
    for family, spread in ((f, s) for f in FAMILIES for s in spreads(f, max_processes)):
        by_clause["NUM-1"].append(Case(family, spread))
        if spread.data_parallel_size > 1:
            by_clause["NUM-7"].append(Case(family, spread, unequal_shares=True))
        if spread in RAMPED:
            by_clause["NUM-8"].append(Case(family, spread, ramp=True))
        if spread in COMPRESSED and family in COMPRESSED_FAMILIES:
            by_clause["COMM-1"] += [Case(family, spread, gradients=gradients) for gradients in ("bf16", "int8", "int4")]
            by_clause["COMM-2"] += [Case(family, spread, gradients=gradients) for gradients in ("int8", "int4")]
            by_clause["COMM-3"].append(Case(family, spread, optimizer="adamw", gradients="int4"))
        if spread not in COMBINED:
            continue
        by_clause["NUM-3"].append(Case(family, spread, compute="bf16"))
        if family == FP8_FAMILY and with_fp8:
            by_clause["NUM-3"].append(Case(family, spread, compute="fp8"))
        by_clause["NUM-4"] += [Case(family, spread, recompute=again) for again in ("selective", "full")]
        by_clause["NUM-4"].append(Case(family, spread, offload="optimizer"))
        by_clause["NUM-5"].append(Case(family, spread, compile=True))
    for family, model in FAMILIES.items():
        is_legal = partial(_runs_in, family, max_processes)
        for clause, layout, live in live_runs(
            model.num_layers, is_legal, keeps_micro_batches=_shares_statistics(family)
        ):
            by_clause[clause].append(Case(family, layout, optimizer="even_adamw", live=live))
    return {clause: [case for case in found if not refusals(case)] for clause, found in by_clause.items()}


LIVE_CLAUSES = ("LIVE-1", "LIVE-2", "LIVE-3", "LIVE-4", "LIVE-5")
COMM_CLAUSES = ("COMM-1", "COMM-2", "COMM-3")
OWN_CASES = ("NUM-1", "NUM-3", "NUM-4", "NUM-5", "NUM-7", "NUM-8", *COMM_CLAUSES, *LIVE_CLAUSES)
FP8_FAMILY = "dense"


def _runs_in(family: str, max_processes: int, layout: Layout) -> bool:
    return layout.world_size <= max_processes and not refusals(Case(family, layout))


def _shares_statistics(family: str) -> bool:
    """Return whether the samples of a micro-batch do, over all ranks: batch normalisation."""
    return FAMILIES[family].unit == "samples"


def spreads(family: str, max_processes: int) -> list[Layout]:
    """The layouts that are legal for a family."""
    return [layout for layout in _sized(family, max_processes) if not refusals(Case(family, layout))]


def refused(max_processes: int) -> dict[str, tuple[Problem, ...]]:
    """The layouts of the matrix that are illegal, by case, with the reasons."""
    all_cases = [Case(family, layout) for family in FAMILIES for layout in _sized(family, max_processes)]
    return {case.name: problems for case in all_cases if (problems := refusals(case))}


def _sized(family: str, max_processes: int) -> list[Layout]:
    num_layers = FAMILIES[family].num_layers
    return [layout for layout in layouts(num_layers) if layout.world_size <= max_processes]


@cache
def refusals(case: Case) -> tuple[Problem, ...]:
    spec = build_spec(case)
    return (*check_engine(spec), *(apply(KERNEL_RULES, spec) if case.kernel else ()))


# A case as a plan


_OPTIMIZERS = {
    "sgd": OptimSpec(name="sgd", lr=0.1, weight_decay=0.0, grad_clip_norm=None, schedule=ScheduleSpec(kind="constant")),
    "adamw": OptimSpec(name="adamw", lr=1e-3, schedule=ScheduleSpec(kind="constant")),
    # AdamW turns a gradient of nearly 0 into a whole update. Beside this eps it stays a small one, and moments count.
    "even_adamw": OptimSpec(
        name="adamw", lr=1e-3, eps=1e-2, weight_decay=0.0, grad_clip_norm=1.0, schedule=ScheduleSpec(kind="constant")
    ),
}


def build_spec(case: Case) -> RunSpec:
    model = FAMILIES[case.family]
    images = model.unit == "samples"
    wanted = {name: getattr(case.layout, name) for name in LayoutSpec.__dataclass_fields__}
    seq_len = 1 if images else SEQ_LEN
    return RunSpec(
        model=model,
        data=DataSpec(source="phantom" if images else "python_stdlib", seq_len=seq_len),
        optim=_OPTIMIZERS[case.optimizer],
        batching=_ramp(seq_len) if case.ramp else BatchingSpec(global_batch_size=SAMPLES),
        train=_train(case),
        layout=LayoutSpec(**wanted),
        comm=CommSpec(gradients=case.gradients),
        kernels=_kernels(case),
        precision=PrecisionSpec(compute="fp32", matmul="fp8" if case.compute == "fp8" else "compute"),
        compile=case.compile,
        recompute=case.recompute,
        offload=case.offload,
        checkpoint=CheckpointSpec(SAVE_EVERY_STEPS, "sync") if _is_killed(case) else CheckpointSpec(None),
        fault=case.live.fault(case.layout.world_size) if case.live else "",
    )


def _kernels(case: Case) -> KernelSpec:
    return KernelSpec(**dict([case.kernel] if case.kernel else []))


def _train(case: Case) -> TrainSection:
    steps, own = _max_steps(case), LOSSES.get(case.family)
    return TrainSection(steps) if own is None else TrainSection(steps, loss=own.loss, loss_options=own.loss_options)


def _is_killed(case: Case) -> bool:
    return case.live is not None and case.live.disturbance == "killed"


def _max_steps(case: Case) -> int:
    if case.live:
        return LIVE_STEPS
    return sum(RAMP_SIZES) // RAMP_SIZES[0] if case.ramp else STEPS


def _ramp(seq_len: int) -> BatchingSpec:
    (_, first), *later = RAMP
    stages = tuple(RampStage(samples * seq_len, size) for samples, size in later)
    return BatchingSpec(global_batch_size=first, schedule=BatchScheduleSpec(kind="ramp", stages=stages))


def build_plan(case: Case, device: Literal["cpu", "cuda"]) -> Plan:
    layout = case.layout
    largest = RAMP[-1][1] if case.ramp else SAMPLES
    most = max(weighted_counts(largest, case.weights or (1.0,) * layout.data_parallel_size))
    # Batch norm speaks of all samples of a micro-batch, over all ranks: there has to be one of them.
    keeps_micro_batches = _shares_statistics(case.family)
    micro = most if keeps_micro_batches else min(case.micro_batch_size, most)
    plan = Plan(
        spec=build_spec(case),
        layout=replace(layout, sequence_parallel=layout.sequence_parallel and layout.tp > 1),
        device=device,
        num_nodes=1,
        devices_per_node=layout.world_size,
        compute="bf16" if case.compute == "fp8" else case.compute,
        recompute=case.recompute,
        offload=case.offload,
        micro_batch_size=micro,
        grad_accum_steps=count_micro_batches(most, micro, turns_of(layout)),
        comm=CommSpec(gradients=case.gradients).fixed,
        kernels=_kernels(case),
        params=0,
        flops_per_token=0.0,
    )
    if case.live is None:
        return plan
    return replace(
        plan,
        peak_flops=1.0,
        memory_ladder=build_ladder(plan.memory_setting, keeps_micro_batches=keeps_micro_batches, may_offload=False),
        changes=tuple(_planned(step, replace(case, layout=layout)) for step, layout in case.live.steps_of_changes()),
    )


def _planned(step: int, case: Case) -> PlannedLayout:
    plan = build_plan(replace(case, live=None), "cpu")
    return PlannedLayout(step, plan.layout, plan.micro_batch_size, plan.grad_accum_steps)
