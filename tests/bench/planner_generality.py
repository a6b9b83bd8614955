"""How the planner's step times do on what it was not fitted to: sources and models held out in turn.

    python tests/bench/planner_generality.py [TABLE.csv]

For each fold the efficiencies are fitted afresh to the other rows, from guesses that owe nothing to the fold, and the
fold is predicted with them. Needs numpy. Takes about three minutes on one core.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation.backtest import Backtest, Prediction, backtest, cases_of
from trainspec_cli.planner.validation.fit import fit

TABLE = Path(__file__).parents[1] / "data" / "measured" / "throughput.csv"
GUESS = Efficiency(
    matmul=0.9,
    matmul_fp8=0.85,
    matmul_fp4=0.65,
    gemm_memory=0.5,
    kernel_s=6e-06,
    tail_waves=0.5,
    misalignment=0.3,
    attention_forward=0.6,
    attention_backward=0.5,
    attention_older=0.6,
    exponentials=0.5,
    memory=0.85,
    cache_reuse=0.4,
    elementwise=1.2,
    elementwise_eager=1.5,
    issue=1.0,
    cast_fp8=0.8,
    launch_s=8e-06,
    link_nvswitch=0.75,
    link_mesh=0.7,
    link_pcie=0.5,
    nic=0.72,
    all_to_all=0.6,
    collective_latency_s=1.5e-05,
    hop_latency_s=1.5e-06,
    tp_overlap=0.75,
    cp_overlap=0.7,
    ep_overlap=0.3,
    ep_overlap_network=0.5,
    dp_overlap=0.8,
    pp_overlap=0.5,
    contention=0.2,
    expert_imbalance=0.2,
    experts_ungrouped=1.5,
    jitter=0.01,
    optimizer_passes=1.2,
    step_s=0.02,
    step_graphed_s=0.004,
    bubble=0.9,
    conv=1.0,
    conv_memory=0.95,
)
"""Round numbers for what kernels, links and schedules reach, from data sheets and microbenchmarks."""
PRIOR = 0.15
ITERATIONS, DERIVE_EVERY = 8, 4
MODEL_FOLDS = 5


def judged(result: Backtest) -> list[Prediction]:
    return [p for p in result.predictions if p.judged and p.setup and p.measured_step_time_s]


def held_out(runs: Sequence[Prediction], fold_of: Callable[[Prediction], str]) -> dict[str, list[float]]:
    """-> the signed relative errors of each fold, predicted by what the others taught."""
    errors = {}
    for fold in sorted({fold_of(run) for run in runs}):
        learned = fit(cases_of([run for run in runs if fold_of(run) != fold]), GUESS, PRIOR, ITERATIONS, DERIVE_EVERY)
        errors[fold] = backtest((run.row for run in runs if fold_of(run) == fold), learned).errors()
    return errors


def source_of(run: Prediction) -> str:
    return run.row.get("source") or "?"


def family_of(run: Prediction) -> str:
    """Cut-down and reshaped versions of a model belong to it."""
    return re.split(r"-proto|-proxy|-nemo\d", run.row.get("model") or "?")[0]


def describe(errors: Sequence[float]) -> str:
    size, signed = sorted(map(abs, errors)), sorted(errors)
    count = len(size)
    figures = sum(size) / count, size[count // 2], size[int(0.9 * count)], signed[count // 2]
    return "{:5d} rows   mean {:5.1%}   median {:5.1%}   nine in ten within {:5.1%}   bias {:+6.1%}".format(
        count, *figures
    )


def report(title: str, errors: dict[str, list[float]]) -> None:
    print(title)
    for fold, own in errors.items():
        print(f"  {fold[:44]:44s} {describe(own)}")
    print(f"  {'all':44s} {describe([error for own in errors.values() for error in own])}\n")


def main() -> None:
    began = time.monotonic()
    table = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    with table.open(newline="", encoding="utf-8") as lines:
        shipped = backtest(csv.DictReader(lines), Efficiency())
    runs = judged(shipped)
    print(f"{'as shipped, fitted to all':46s} {describe(shipped.errors())}\n")
    report("sources held out", held_out(runs, source_of))
    families = sorted({family_of(run) for run in runs})
    report("models held out", held_out(runs, lambda run: f"fold {families.index(family_of(run)) % MODEL_FOLDS + 1}"))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
