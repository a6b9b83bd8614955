"""Checks of the engine in this process: memory and time against plan and trace, losses by profile, clauses."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .record import Items
from .workloads import MEMORY, WORKLOADS, Workload, arguments_of, write_tokens

MODES = (("none", False), ("selective", False), ("full", False), ("none", True), ("full", True))
"""(recompute, compiled)"""
WARMUP_STEPS, STEPS = 2, 4
PROFILED_STEPS = 3
LOSSES = 5


def sized(workload: Workload, tiny: bool) -> Workload:
    return workload.shrunk() if tiny else workload


def memory_of(name: str, items: Items, device_type: str, tiny: bool) -> None:
    """Memory of one size in every mode against plan and trace, and the allocator's events and statistics."""
    from .live import join, plan_of, predicted, traced

    workload = sized(MEMORY[name], tiny)
    folder = Path(tempfile.mkdtemp())
    data = f"data.path={write_tokens(folder, workload, 4 * workload.units_a_step)}"
    plans = {}
    for recompute, compiled in MODES[: 4 if tiny else None]:
        settings = ["data=nanogpt", data, f"recompute={recompute}", f"compile={str(compiled).lower()}"]
        plans[f"{recompute}{'-compiled' * compiled}"] = plan_of(arguments_of(workload, device_type, *settings))
    eager = {mode: plan for mode, plan in plans.items() if not plan.spec.compile}
    for mode, plan in plans.items():
        items.take(f"{mode} predicted", functools.partial(predicted, plan))
    for mode, plan in eager.items():
        items.take(f"{mode} traced", functools.partial(traced, plan), least_s=5)
    device = join(device_type)
    for mode, plan in plans.items():
        items.take(mode, functools.partial(measure_memory, plan, device, items, f"{name} {mode}"), least_s=20)


def measure_memory(plan: Any, device: Any, items: Items, label: str) -> dict[str, Any]:
    import torch

    from trainspec_cli.engine.accelerators import on_chip
    from trainspec_cli.engine.observe.counters import peak_memory_bytes

    from .allocations import keep, replay, start_recording, stop_recording
    from .live import LiveRun, memory_statistics

    if on_chip(device):
        torch.accelerator.reset_peak_memory_stats(device)
    start_recording(device)
    run = LiveRun(plan, device)
    for _ in range(2):
        run.step()
    events = stop_recording(device)
    keep(items.folder / "allocations.jsonl.gz", label, events)
    found = {
        "peak_memory_bytes": peak_memory_bytes(device),
        "statistics": memory_statistics(device),
        "by_the_planners_rules": replay(events),
        **run.timed(0, STEPS),
    }
    run.close()
    return found


def profile_of(name: str, items: Items, device_type: str, tiny: bool, compiled: bool = True) -> None:
    """The step's largest losses: what the device does longest beside its products, and when it does nothing."""
    from .live import LiveRun, join, plan_of, predicted

    workload = sized(WORKLOADS[name], tiny)
    folder = Path(tempfile.mkdtemp())
    data = f"data.path={write_tokens(folder, workload, 4 * workload.units_a_step)}"
    given = ["data=nanogpt", data, f"compile={str(compiled and not tiny).lower()}"]
    plan = plan_of(arguments_of(workload, device_type, *given))
    items.take("predicted", functools.partial(predicted, plan))
    device = join(device_type)
    run: list[LiveRun] = []

    def timed() -> dict[str, Any]:
        run.append(LiveRun(plan, device))
        found = run[0].timed(3, 10 if not tiny else 2)
        flops = found["units_a_step"] * workload.flops_per_token
        return found | {"flops_per_s": flops / found["step_s"]}

    items.take("timed", timed, least_s=30)
    items.take("losses", lambda: profiled(run[0] if run else LiveRun(plan, device), device), least_s=10)


def profiled(run: Any, device: Any) -> dict[str, Any]:
    from trainspec_cli.engine.accelerators import on_chip, synchronise
    from trainspec_cli.engine.observe.deeper_look import StepsInView, heaviest, own_times

    for _ in range(2):
        run.step()
    synchronise(device)
    profile = StepsInView(device)
    for _ in range(PROFILED_STEPS):
        run.step()
    synchronise(device)
    profile.end()
    operations = profile.operations()
    there = [one for one in operations if one.on_device == on_chip(device)]
    named: dict[str, float] = {}
    for one, own_ns in own_times(there):
        named[one.name] = named.get(one.name, 0.0) + own_ns / 1e9 / PROFILED_STEPS
    ranked = sorted(named.items(), key=lambda pair: -pair[1])
    begin, end = min(one.begin_ns for one in there), max(one.end_ns for one in there)
    span_s = (end - begin) / 1e9 / PROFILED_STEPS
    others = {"idle": span_s - sum(named.values())} | {key: s for key, s in ranked if not is_product(key)}
    return {
        "step_s": span_s,
        "products_s": sum(seconds for key, seconds in named.items() if is_product(key)),
        "losses": sorted(others.items(), key=lambda pair: -pair[1])[:LOSSES],
        "heaviest": [(one.name, one.self_s, one.calls) for one in heaviest(operations, PROFILED_STEPS)],
    }


def is_product(name: str) -> bool:
    """Return whether an operation multiplies matrices, which is what a step is for."""
    words = ("gemm", "cutlass", "nvjet", "matmul", "::mm", "addmm", "bmm", "flash", "attention", "conv", "grouped_mm")
    return any(word in name.lower() for word in words)


# Clauses that one process can keep or break, held against one process of the CPU


FP8_OVER_BF16 = 2**4
"""e4m3 keeps 3 bits of a number's fraction, bf16 keeps 7."""
FAMILIES = ("dense", "moe", "hybrid", "unet", "resnet")
DECODERS = ("dense", "moe", "hybrid")


def cases_of(family: str, tiny: bool) -> list[Any]:
    from trainspec_cli.wings.certify.cases import Case

    plain = Case(family)
    cases = [plain, replace(plain, compute="bf16")]
    if family in DECODERS:
        cases += [replace(plain, recompute="selective"), replace(plain, recompute="full")]
    if family == "dense" and not tiny:
        cases += [replace(plain, offload="optimizer"), replace(plain, compile=True), replace(plain, compute="fp8")]
    return cases


def clauses(items: Items, device_type: str, tiny: bool) -> None:
    """Gradients, losses, repetition and resume of one process on the chip, against the CPU's."""
    from trainspec_cli.run.job.machine import detect

    machine = detect(look_for_gpus=device_type != "cpu")
    for family in FAMILIES[: 1 if tiny else None]:
        items.take(family, functools.partial(judge_family, cases_of(family, tiny), machine), least_s=40)


def judge_family(cases: Sequence[Any], machine: Any) -> dict[str, Any]:
    """Return what was found of each case; one torchrun on the chip and one on the CPU make all runs."""
    from trainspec_cli.wings.certify.runs import measure

    with tempfile.TemporaryDirectory() as folder:
        wanted = [run for case in cases for run in runs_of(case)]
        chip = measure(wanted, Path(folder, "chip"), machine, lambda _done: None)
        on_cpu = replace(machine, gpu_names=())
        cpu = measure(references_of(cases[0].family), Path(folder, "cpu"), on_cpu, lambda _done: None)
        return {case.name: judge_case(case, chip, cpu) for case in cases}


def runs_of(case: Any) -> tuple[Any, Any, Any]:
    """Return a run, its repetition, and one that is resumed in the middle."""
    from trainspec_cli.wings.certify.runs import Run

    return Run(case), Run(case, take=1), Run(replace(case, optimizer="adamw"), gradients=False, resume=True)


def references_of(family: str) -> tuple[Any, Any, Any]:
    """Return the runs in fp64, fp32 and bf16."""
    from trainspec_cli.wings.certify.cases import Case
    from trainspec_cli.wings.certify.runs import Run

    return Run(Case(family, compute="fp64")), Run(Case(family)), Run(Case(family, compute="bf16"))


def judge_case(case: Any, chip: Any, cpu: Any) -> dict[str, Any]:
    from trainspec_cli.wings.certify.cases import SAVE_AT
    from trainspec_cli.wings.certify.clauses import FORMAT_FACTOR, GRADIENT_BOUND, LOSS_BOUND
    from trainspec_cli.wings.certify.runs import gradient_errors, loss_error

    first, again, resumed = (chip[run] for run in runs_of(case))
    exact, plain, rough = (cpu[run] for run in references_of(case.family))
    error = max(gradient_errors(first.gradients, exact.gradients).values())
    losses = loss_error(first.losses, plain.losses)
    exactly = case.compute == "fp32"
    format_error = max(gradient_errors(rough.gradients, exact.gradients).values()) * (
        FP8_OVER_BF16 if case.compute == "fp8" else 1
    )
    bound = GRADIENT_BOUND if exactly else FORMAT_FACTOR * format_error
    return {
        "gradient_error": error,
        "gradient_bound": bound,
        "loss_error": losses,
        "loss_bound": LOSS_BOUND if exactly else None,
        "kept": error <= bound and (not exactly or losses <= LOSS_BOUND),
        "repeats_to_the_bit": first.result.trained.weights_sha256 == again.result.trained.weights_sha256,
        "resumes_to_the_bit": resumed.losses[SAVE_AT:] == resumed.resumed_losses,
    }
