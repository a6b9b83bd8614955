"""The matrix of runs that the clauses are measured on. A case is one plan; the recipe rules reject illegal plans.

The axes of the matrix are model families, layouts, ways to save memory or bandwidth, the non-default kernels that this
chip supports, and changes during a trainer run."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from trainspec_cli.balance.batch.division import count_micro_batches, turns_of, weighted_counts
from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.keys.kernels import KERNELS, TORCH, KernelSpec
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import ModelSpec, has_layer_list
from trainspec_cli.recipe.keys.run import (
    CheckpointSpec,
    DataSpec,
    Offload,
    PrecisionSpec,
    Recompute,
    RunSpec,
    TrainSection,
)
from trainspec_cli.recipe.keys.training import (
    BatchingSpec,
    BatchScheduleSpec,
    CommSpec,
    OptimSpec,
    RampStage,
    ScheduleSpec,
    WireFormat,
)
from trainspec_cli.recipe.results.plan import Plan, PlannedLayout
from trainspec_cli.recipe.rules.check import KERNEL_RULES, apply, check_engine, lacking
from trainspec_cli.run.recovery.memory import build_ladder
from trainspec_cli.wings.certify.families import FAMILIES, LOSSES, SAMPLES, SEQ_LEN

Compute = Literal["fp32", "bf16", "fp64", "fp8"]
"""fp8: linear layers multiply in fp8, and everything else uses bf16."""
Optimizer = Literal["sgd", "adamw", "even_adamw"]
STEPS = 20
SAVE_AT = 10
CLIP_FROM = 10
"""The first step that clips gradients, in runs with plain gradient descent."""
CLIP_NORM = 0.1
"""Smaller than the gradient norm of any family, so every step clips."""
RAMP = ((0, 4), (12, 8), (28, 12))
"""Batch-size schedule of a run with a growing batch: (samples trained on so far, batch size from then on)."""
RAMP_SIZES = (4, 4, 4, 8, 8, 12, 12)
"""The batch size of each step of `RAMP`."""
LIVE_STEPS = 14
"""Number of steps of a live run, during which the trainer makes changes."""
EVERY_STEPS = 2
"""Number of steps between two changes in a live run."""
SAVE_EVERY_STEPS = 3
"""Checkpoint interval of a live run, chosen so that a killed run has a checkpoint between its first and second
change."""
CHANGED_AT = EVERY_STEPS
KILLED_AT = 2 * EVERY_STEPS
"""The step of a live run at which a change fails or is interrupted by a kill."""
SHORT_AT = 5
"""The step when a live run runs out of memory."""
FITTING_SAMPLES = 2
"""Size, in samples, of the largest micro-batch that fits after a live run has run out of memory."""


@dataclass(frozen=True)
class Live:
    """The changes of a live run."""

    changes: tuple[Layout, ...] = ()
    """The layouts after the first one, in order. Each is used for `EVERY_STEPS` steps, and the last one until the
    end."""
    disturbance: Literal["none", "killed", "move_oom", "oom"] = "none"

    def fault(self, ranks: int) -> str:
        """Return the value of the recipe key `fault`."""
        if self.disturbance == "move_oom":
            return f"move_oom(step={CHANGED_AT},rank={ranks - 1})"
        if self.disturbance == "oom":
            shortages = (f"oom(step={SHORT_AT},rank={rank},above={FITTING_SAMPLES})" for rank in range(ranks))
            return "; ".join(shortages)
        return ""


@dataclass(frozen=True)
class Case:
    family: str
    layout: Layout = field(default_factory=Layout)
    compute: Compute = "fp32"
    recompute: Recompute = "none"
    offload: Offload = "none"
    compile: bool = False
    micro_batch_size: int = 4
    """Maximum number of samples per micro-batch; a rank may have fewer."""
    optimizer: Optimizer = "sgd"
    unequal_shares: bool = False
    """Assign nearly all samples to the first data-parallel rank, so that other ranks have empty micro-batches."""
    ramp: bool = False
    """True if the batch grows during the run."""
    gradients: WireFormat = "full"
    """The wire format of gradients."""
    kernel: tuple[str, str] | None = None
    """An operation and the backend that replaces its default."""
    live: Live | None = None
    """The changes in a live run, made by the trainer as in a launch; None for a run of the certify worker."""

    @property
    def weights(self) -> tuple[float, ...]:
        """The sample shares of the data-parallel ranks; empty if they are equal."""
        others = self.layout.data_parallel_size - 1
        return (float(SAMPLES - others), *([1.0] * others)) if self.unequal_shares else ()

    @property
    def name(self) -> str:
        """The name of the case, such as `dense-fp32-tp2.pp2.zbv-full`."""
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
        if self.live:
            undisturbed = "changed" if self.live.changes else "kept"
            shown += ["live", undisturbed if self.live.disturbance == "none" else self.live.disturbance]
        return "-".join([self.family, self.compute, name_layout(self.layout), *shown])

    @property
    def reference(self) -> Case:
        """The same computation as this case, in a single process."""
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


def layouts(num_layers: int) -> tuple[Layout, ...]:
    """Return the layouts of the matrix: every axis alone, in each of its variants, and combinations of axes."""
    uneven = (num_layers - 1, 1)
    return (
        Layout(dp_replicate=2),
        *(Layout(dp_shard=2, zero_stage=stage) for stage in (1, 2, 3)),
        *(Layout(tp=2, sequence_parallel=parallel) for parallel in (True, False)),
        Layout(cp=2),
        Layout(cp=2, context_method="ulysses"),
        *(Layout(pp=2, pipeline_schedule=schedule) for schedule in ("gpipe", "1f1b", "zero_bubble", "zbv")),
        Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2),
        Layout(pp=2, stage_layers=uneven),
        Layout(dp_shard=2, ep=2),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(dp_shard=2, tp=2),
        Layout(dp_shard=2, cp=2),
        Layout(dp_replicate=2, pp=2, pipeline_schedule="zbv"),
        Layout(dp_shard=2, pp=2, pipeline_schedule="zero_bubble"),
        Layout(dp_shard=2, pp=2, zero_stage=2),
        Layout(tp=2, cp=2),
        Layout(tp=2, pp=2),
        Layout(cp=2, pp=2, pipeline_schedule="interleaved", virtual_stages=2),
        Layout(dp_shard=4, ep=2),
        Layout(dp_shard=2, tp=2, ep=4),
        Layout(dp_shard=2, pp=2, ep=2),
        Layout(dp_shard=2, tp=2, pp=2),
        Layout(dp_replicate=2, dp_shard=2, tp=2),
        Layout(tp=2, cp=2, pp=2),
        Layout(dp_shard=2, cp=2, pp=2, pipeline_schedule="zbv"),
        Layout(dp_shard=4, tp=2, ep=8),
    )


COMBINED = (
    Layout(dp_shard=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
    Layout(pp=2, pipeline_schedule="zbv"),
    Layout(dp_shard=2, ep=2),
    Layout(dp_shard=2, tp=2),
)
"""Layouts to combine with recomputation, offloading, compilation and bf16."""
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
"""Layouts for training with a growing batch."""
COMPRESSED = (
    Layout(dp_replicate=2),
    Layout(dp_shard=2),
    Layout(dp_shard=2, ep=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2, pp=2, pipeline_schedule="zero_bubble"),
)
"""Layouts that exchange compressed gradients."""
MOVING = (Layout(pp=2), Layout(dp_shard=2, pp=2, pipeline_schedule="zero_bubble"))
"""Pipelined layouts where layers move between stages."""
TOURS = (
    (
        *(Layout(dp_shard=2), Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp_shard=2, ep=2)),
        *(Layout(dp_shard=2, zero_stage=1), Layout(dp_replicate=2)),
    ),
    (
        *(Layout(dp_replicate=2, dp_shard=2), Layout(tp=2, pp=2), Layout(dp_shard=2, cp=2), Layout(dp_shard=4)),
        *(Layout(dp_shard=2, pp=2, pipeline_schedule="zbv"), Layout(dp_shard=4, ep=2)),
    ),
)
"""Layouts that a run goes through in order, skipping those that are illegal for its family."""
SHORT = (Layout(), Layout(dp_shard=2), Layout(pp=2, pipeline_schedule="gpipe"))
"""Layouts for runs that run out of memory. With gpipe, all messages between stages arrive before the first backward
pass, so a restart within the process leaves no message behind."""
COMPRESSED_FAMILIES = ("dense", "moe")
"""Two families suffice, because compression does not depend on the model, except that experts have a separate
exchange."""


LIVE_CLAUSES = ("LIVE-1", "LIVE-2", "LIVE-3", "LIVE-4", "LIVE-5")
COMM_CLAUSES = ("COMM-1", "COMM-2", "COMM-3")
OWN_CASES = ("NUM-1", "NUM-3", "NUM-4", "NUM-5", "NUM-7", "NUM-8", *COMM_CLAUSES, *LIVE_CLAUSES)
FP8_FAMILY = "dense"


def cases(max_processes: int, *, with_fp8: bool = True) -> dict[str, list[Case]]:
    """Return the valid cases for each clause that has cases of its own, with at most `max_processes` processes.

    `with_fp8`: whether torchao is installed, which linear layers need to compute in fp8."""
    by_clause: dict[str, list[Case]] = {clause: [] for clause in OWN_CASES}
    for family, spread in ((f, s) for f in FAMILIES for s in legal_layouts(f, max_processes)):
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
    for family in FAMILIES:
        for clause, layout, live in _live_runs(family, max_processes):
            by_clause[clause].append(Case(family, layout, optimizer="even_adamw", live=live))
    return {clause: [case for case in found if not refusals(case)] for clause, found in by_clause.items()}


def _live_runs(family: str, max_processes: int) -> Iterator[tuple[str, Layout, Live]]:
    """Yield the live runs of a family: the clause, the first layout, and the changes."""

    def is_legal(layout: Layout) -> bool:
        return layout.world_size <= max_processes and not refusals(Case(family, layout))

    for pipeline in filter(is_legal, MOVING):
        cuts = moves(pipeline, FAMILIES[family].num_layers)
        if all(map(is_legal, cuts)):
            yield "LIVE-1", pipeline, Live(cuts)
            yield "LIVE-4", pipeline, Live(cuts[:1], "move_oom")
    tours = ([layout for layout in tour if is_legal(layout)] for tour in TOURS)
    for first, *others in (tour for tour in tours if len(tour) > 1):
        yield "LIVE-2", first, Live(tuple(others))
        if len(others) > 1:
            yield "LIVE-3", first, Live(tuple(others), "killed")
        yield "LIVE-4", first, Live(tuple(others[:1]), "move_oom")
    if not _keeps_micro_batches(family):
        yield from (("LIVE-5", layout, Live(disturbance="oom")) for layout in SHORT if is_legal(layout))


def moves(layout: Layout, num_layers: int) -> tuple[Layout, ...]:
    """Return the layer splits of a two-stage pipeline, in order: layers move in one direction, then in the other, then
    back."""
    cuts = ((num_layers - 1, 1), (1, num_layers - 1), None)
    return tuple(replace(layout, stage_layers=cut) for cut in cuts)


def _keeps_micro_batches(family: str) -> bool:
    """Return whether a family uses batch normalisation, whose results depend on the micro-batch size."""
    return FAMILIES[family].unit == "samples"


def legal_layouts(family: str, max_processes: int) -> list[Layout]:
    """Return the layouts of the matrix that are legal for a family."""
    return [layout for layout in _sized(family, max_processes) if not refusals(Case(family, layout))]


def refused(max_processes: int) -> dict[str, tuple[Problem, ...]]:
    """Return the illegal layouts of the matrix, by case name, with the reasons."""
    all_cases = [Case(family, layout) for family in FAMILIES for layout in _sized(family, max_processes)]
    return {case.name: problems for case in all_cases if (problems := refusals(case))}


def _sized(family: str, max_processes: int) -> list[Layout]:
    num_layers = FAMILIES[family].num_layers
    return [layout for layout in layouts(num_layers) if layout.world_size <= max_processes]


@cache
def refusals(case: Case) -> tuple[Problem, ...]:
    """Return the reasons why a case is illegal; empty if it is legal."""
    spec = build_spec(case)
    return (*check_engine(spec), *(apply(KERNEL_RULES, spec) if case.kernel else ()))


# Kernels as an axis of the matrix

UPDATE = "adamw"
"""The operation that updates weights. All other operations affect the gradients."""
SPREAD_FAMILIES = {"grouped_matmul": "moe", "ssd_scan": "mamba"}
"""The model family used to measure an operation in several layouts; `dense` for all operations not listed here."""
FP8 = "fp8"


EMULATED = "emulated"
"""The feature that marks certificates measured on the emulated accelerator, which does not compile anything."""


def features_here(*, on_gpu: bool) -> tuple[str, ...]:
    """Return the kernels (`attention.math`) and formats (`fp8`) that this machine supports in addition to the
    defaults."""
    kernels = [
        f"{operation}.{name}"
        for operation, backends in KERNELS.items()
        for name, backend in backends.items()
        if name != TORCH and not lacking(backend, on_gpu=on_gpu)
    ]
    return (*kernels, *([FP8] if importlib.util.find_spec("torchao") is not None else []))


def kernel_cases(max_processes: int, features: Collection[str], *, of_updates: bool = False) -> Iterator[Case]:
    """Yield the legal cases for the kernels that affect gradients, or for the optimizer's kernels.

    Compiling is slow, so compiled kernels are measured in only one family and one process."""
    for family, model in FAMILIES.items():
        for operation in KERNELS:
            if (operation == UPDATE) != of_updates or not (of_updates or _has(model, operation)):
                continue
            shows = family == SPREAD_FAMILIES.get(operation, "dense") or len(FAMILIES) == 1
            for backend in KERNELS[operation]:
                compiled = KERNELS[operation][backend].needs_compiler
                if f"{operation}.{backend}" not in features or (compiled and not shows):
                    continue
                spread = COMBINED if shows and not compiled else ()
                for layout in (Layout(), *(each for each in spread if each.world_size <= max_processes)):
                    optimizer: Optimizer = "even_adamw" if of_updates else "sgd"
                    case = Case(family, layout, optimizer=optimizer, kernel=(operation, backend))
                    if not refusals(case):
                        yield case


def _has(model: ModelSpec, operation: str) -> bool:
    """Return whether a model uses an operation. If it does not, recipe rules reject kernels for it, except for
    attention and SwiGLU."""
    if operation not in ("attention", "swiglu"):
        return True
    if not has_layer_list(model):
        return False
    mixers = {mixer for layer in model.layer_list for mixer in layer.mixers}
    if operation == "attention":
        return bool(mixers & {"attention", "latent"})
    plain = "feed_forward" in mixers or ("experts" in mixers and model.as_decoder.gate_limit is None)
    return plain and model.gated_mlp and model.activation == "silu"


# A case as a plan


_OPTIMIZERS = {
    "sgd": OptimSpec(name="sgd", lr=0.1, weight_decay=0.0, grad_clip_norm=None, schedule=ScheduleSpec(kind="constant")),
    "adamw": OptimSpec(name="adamw", lr=1e-3, schedule=ScheduleSpec(kind="constant")),
    # AdamW turns near-zero gradients into full-sized updates. This eps keeps them small, so that the moments matter.
    "even_adamw": OptimSpec(
        name="adamw", lr=1e-3, eps=1e-2, weight_decay=0.0, grad_clip_norm=1.0, schedule=ScheduleSpec(kind="constant")
    ),
}


def build_spec(case: Case) -> RunSpec:
    model = FAMILIES[case.family]
    images = model.unit == "samples"
    wanted = {name: getattr(case.layout, name) for name in LayoutSpec.__dataclass_fields__}
    seq_len = 1 if images else SEQ_LEN
    batching = BatchingSpec(global_batch_size=SAMPLES)
    steps = LIVE_STEPS if case.live else STEPS
    if case.ramp:
        (_, first), *later = RAMP
        stages = tuple(RampStage(samples * seq_len, size) for samples, size in later)
        batching = BatchingSpec(global_batch_size=first, schedule=BatchScheduleSpec(kind="ramp", stages=stages))
        steps = sum(RAMP_SIZES) // RAMP_SIZES[0]
    train = TrainSection(steps)
    if (section := LOSSES.get(case.family)) is not None:
        train = TrainSection(steps, loss=section.loss, loss_options=section.loss_options)
    is_killed = case.live is not None and case.live.disturbance == "killed"
    return RunSpec(
        model=model,
        data=DataSpec(source="phantom" if images else "python_stdlib", seq_len=seq_len),
        optim=_OPTIMIZERS[case.optimizer],
        batching=batching,
        train=train,
        layout=LayoutSpec(**wanted),
        comm=CommSpec(gradients=case.gradients),
        kernels=KernelSpec(**dict([case.kernel] if case.kernel else [])),
        precision=PrecisionSpec(compute="fp32", matmul="fp8" if case.compute == "fp8" else "compute"),
        compile=case.compile,
        recompute=case.recompute,
        offload=case.offload,
        checkpoint=CheckpointSpec(SAVE_EVERY_STEPS, "sync") if is_killed else CheckpointSpec(None),
        fault=case.live.fault(case.layout.world_size) if case.live else "",
    )


def build_plan(case: Case, device: Literal["cpu", "cuda"]) -> Plan:
    layout = case.layout
    spec = build_spec(case)
    largest = RAMP[-1][1] if case.ramp else SAMPLES
    most = max(weighted_counts(largest, case.weights or (1.0,) * layout.data_parallel_size))
    # Batch norm shares statistics over all samples of a micro-batch on all ranks, so a step must have exactly one
    # micro-batch.
    keeps_micro_batches = _keeps_micro_batches(case.family)
    micro = most if keeps_micro_batches else min(case.micro_batch_size, most)
    plan = Plan(
        spec=spec,
        layout=replace(layout, sequence_parallel=layout.sequence_parallel and layout.tp > 1),
        device=device,
        num_nodes=1,
        devices_per_node=layout.world_size,
        compute="bf16" if case.compute == "fp8" else case.compute,
        recompute=case.recompute,
        offload=case.offload,
        micro_batch_size=micro,
        grad_accum_steps=count_micro_batches(most, micro, turns_of(layout)),
        comm=spec.comm.fixed,
        kernels=spec.kernels,
        params=0,
        flops_per_token=0.0,
    )
    if case.live is None:
        return plan
    changes = []
    for number, later in enumerate(case.live.changes, 1):
        then = build_plan(replace(case, layout=later, live=None), "cpu")
        changes.append(PlannedLayout(EVERY_STEPS * number, then.layout, then.micro_batch_size, then.grad_accum_steps))
    return replace(
        plan,
        peak_flops=1.0,
        memory_ladder=build_ladder(plan.memory_setting, keeps_micro_batches=keeps_micro_batches, may_offload=False),
        changes=tuple(changes),
    )
