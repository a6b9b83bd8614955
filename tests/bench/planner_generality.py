"""How the planner's step times do on sources that it was not fitted to, and whether its intervals hold there.

    python tests/bench/planner_generality.py [--table FILE.csv] [--keep ERRORS.json] [--against ERRORS.json]

Each source is judged by what rows of other sources teach whose framework is not of a family that the source has: of
Megatron's (NeMo, Bridge and Megatron-DeepSpeed are), FSDP's, XLA's, ROCm's, or the vision libraries'. Nested: for each
judged source the same is done once more among the rows that teach. That chooses how far the efficiencies may leave
their guesses, and how wide the interval is that holds nine times in ten; then the source is predicted.

What this cannot undo: the model's form, its tables of what frameworks do, and the guesses were written by someone who
had seen these rows. Needs numpy. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.planner.validation.backtest import (
    HUBER,
    Backtest,
    FittedRow,
    Prediction,
    backtest,
    cases_of,
    derive,
    fit,
    log_errors,
    newton_step,
)
from trainspec_cli.planner.validation.table import Row

Values, Mask = NDArray[np.float64], NDArray[np.bool_]
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
PRIORS = (0.1, 0.2, 0.4)
ITERATIONS, LINEAR_ITERATIONS = 6, 8
COVERAGE = 0.9
FAMILIES = {
    "megatron": ("megatron", "nemo", "bridge", "korthikanti"),
    "xla": ("maxtext", "paxml", "jax"),
    "fsdp": ("foundry", "composer", "fsdp"),
}


def family_of(row: Row) -> str:
    """Return the family of a row's framework. NVIDIA's language models in MLPerf are NeMo's."""
    name = ((row.get("framework") or "") + source_of(row)).lower()
    for family, words in FAMILIES.items():
        if any(word in name for word in words):
            return family
    if row.get("family") == "cnn":
        return "vision"
    return "rocm" if (row.get("gpu") or "").startswith("MI") else "megatron"


@dataclass(frozen=True)
class Known:
    """The table's runs as cases, and what is computed of them once. What was measured is in `errors` alone."""

    runs: list[Prediction]
    case_of: list[int]
    """The case of each run: runs of one source and family that state the same are one."""
    cases: list[FittedRow]
    sources: list[str]
    """Of each case, as are its `families`, `weights`, `derivatives` and `errors`."""
    families: list[str]
    weights: Values
    derivatives: Values
    """By the logarithm of each efficiency, at the guesses."""
    errors: Values
    """The logarithm of predicted over measured, at the guesses."""

    @classmethod
    def of(cls, runs: list[Prediction]) -> Known:
        numbers: dict[tuple[str, str, Setup], int] = {}
        case_of = []
        for run in runs:
            assert run.setup is not None
            case_of.append(numbers.setdefault((source_of(run.row), family_of(run.row), run.setup), len(numbers)))
        groups: list[list[Prediction]] = [[] for _ in numbers]
        for run, number in zip(runs, case_of, strict=True):
            groups[number].append(run)
        cases = [case for group in groups for case in cases_of(group)]
        sources, families = [source for source, _, _ in numbers], [family for _, family, _ in numbers]
        weights = np.array([case.weight for case in cases])
        return cls(runs, case_of, cases, sources, families, weights, derive(cases, GUESS), log_errors(cases, GUESS))

    def of_source(self, source: str) -> Mask:
        return np.array([own == source for own in self.sources])

    def apart_from(self, source: str, *, families: bool = True) -> Mask:
        """Return the cases that may teach what is said of a source."""
        own = {family for one, family in zip(self.sources, self.families, strict=True) if one == source and families}
        pairs = zip(self.sources, self.families, strict=True)
        return np.array([one != source and family not in own for one, family in pairs])


def shift_taught_by(known: Known, taught: Mask, prior: float) -> Values:
    """Fit as `fit` does, with times linear in the logarithms of the efficiencies: for what is chosen within a fold."""
    derivatives, errors, weights = known.derivatives[taught], known.errors[taught], known.weights[taught]
    shift = np.zeros(derivatives.shape[1])
    for _ in range(LINEAR_ITERATIONS):
        shift = shift - newton_step(derivatives, errors + derivatives @ shift, weights, shift, prior)
    return shift


def spread(known: Known, taught: Mask, prior: float, cases: Mask) -> Values:
    """Return each case's standard deviation, in widths of a run's error: that of the run itself, and what follows from
    the efficiencies that the taught cases leave open (a Bayesian linear model's)."""
    derivatives, weights = known.derivatives[taught], known.weights[taught]
    precision = (derivatives * weights[:, None]).T @ derivatives + (HUBER / prior) ** 2 * np.eye(derivatives.shape[1])
    own = known.derivatives[cases]
    return np.sqrt(1.0 + np.einsum("ij,ij->i", own @ np.linalg.inv(precision), own))


def within_fold(known: Known, taught: Mask, prior: float) -> tuple[list[Values], list[Values]]:
    """-> (errors, spreads) of each taught source, by what the other taught ones say."""
    errors, spreads = [], []
    for source in sorted({known.sources[case] for case in np.flatnonzero(taught)}):
        teachers, judged = taught & known.apart_from(source), taught & known.of_source(source)
        if teachers.any():
            shift = shift_taught_by(known, teachers, prior)
            errors.append(known.errors[judged] + known.derivatives[judged] @ shift)
            spreads.append(spread(known, teachers, prior, judged))
    return errors, spreads


@dataclass(frozen=True)
class Judged:
    """What is said of one run by rows that know nothing of it."""

    run: Prediction
    log_error: float
    log_width: float
    """The interval that is to hold nine times in ten goes so far to both sides."""

    @property
    def error(self) -> float:
        return math.exp(self.log_error) - 1

    @property
    def held(self) -> bool:
        return abs(self.log_error) <= self.log_width


def choose_prior(known: Known, taught: Mask) -> tuple[float, list[Values]]:
    """-> (how far the efficiencies may leave their guesses, the scaled errors of the taught sources with that)."""
    inner = {prior: within_fold(known, taught, prior) for prior in PRIORS}
    prior = min(PRIORS, key=lambda one: float(np.mean([np.mean(abs(own)) for own in inner[one][0]])))
    return prior, [abs(errors) / spreads for errors, spreads in zip(*inner[prior], strict=True)]


def learn(known: Known, taught: Mask, prior: float) -> Efficiency:
    cases = [case for case, teaches in zip(known.cases, taught, strict=True) if teaches]
    return fit(cases, GUESS, prior, ITERATIONS, known.derivatives[taught])


def judge(known: Known, source: str, *, families: bool = True) -> list[Judged]:
    taught, judged = known.apart_from(source, families=families), known.of_source(source)
    prior, scaled = choose_prior(known, taught)
    width = quantile_by_source(scaled)
    learned = learn(known, taught, prior)
    predicted = {case: estimate_step(known.cases[case].setup, learned).total_s for case in np.flatnonzero(judged)}
    widths = dict(zip(np.flatnonzero(judged), width * spread(known, taught, prior, judged), strict=True))
    return [
        Judged(run, math.log(predicted[case] / run.measured_step_time_s), widths[case])
        for run, case in zip(known.runs, known.case_of, strict=True)
        if case in predicted and run.measured_step_time_s
    ]


def quantile_by_source(values: Sequence[Values]) -> float:
    """Return what nine in ten values are within, each source as heavy as the root of its number of values."""
    flat = np.concatenate(values)
    weights = np.concatenate([np.full(len(own), len(own) ** -0.5) for own in values])
    order = np.argsort(flat)
    heap = np.cumsum(weights[order])
    return float(flat[order][np.searchsorted(heap, COVERAGE * heap[-1])])


def source_of(row: Row) -> str:
    return row.get("source") or "?"


def devices_of(row: Row) -> str:
    count = float(row.get("n_gpus") or 1)
    return "1 node" if count <= 8 else "to 64" if count <= 64 else "to 512" if count <= 512 else "more"


GROUPS: dict[str, Callable[[Row], str]] = {
    "source": source_of,
    "kind": lambda row: row.get("family") or "?",
    "chip": lambda row: (row.get("gpu") or "?").split("-")[0],
    "format": lambda row: (row.get("dtype") or "?").split("|")[0],
    "devices": devices_of,
    "U-Net or detector": lambda row: (row.get("model") or "") if row.get("family") == "cnn" else "",
    "tensor-parallel": lambda row: "tp " + ("above 8" if float(row.get("tp") or 1) > 8 else "to 8"),
}


def describe(found: Sequence[Judged]) -> str:
    errors = sorted(one.error for one in found)
    size = sorted(map(abs, errors))
    count = len(size)
    figures = sum(size) / count, size[count // 2], size[int(0.9 * count)], errors[count // 2]
    held, width = sum(one.held for one in found) / count, sorted(one.log_width for one in found)[count // 2]
    text = "{:5d} rows   mean {:5.1%}   median {:5.1%}   nine in ten within {:5.1%}   bias {:+6.1%}"
    return text.format(count, *figures) + f"   interval x{math.exp(width):.2f} holds {held:4.0%}"


def report(found: Sequence[Judged]) -> None:
    for title, group_of in GROUPS.items():
        print(title)
        for name in sorted({group_of(one.run.row) for one in found} - {""}):
            print(f"  {name[:40]:40s} {describe([one for one in found if group_of(one.run.row) == name])}")
    print(f"{'all':42s} {describe(found)}")


def compare(found: Sequence[Judged], before: dict[str, float]) -> None:
    """Print mean sizes of errors that were kept beside today's, of the rows that both have."""
    both = [one for one in found if (one.run.row.get("id") or "") in before]
    for group_of in (*GROUPS.values(), lambda _: "all"):
        for name in sorted({group_of(one.run.row) for one in both} - {""}):
            own = [one for one in both if group_of(one.run.row) == name]
            was = [before[one.run.row.get("id") or ""] for one in own]
            now = [one.error for one in own]
            sizes = [f"{np.mean(np.abs(one)):6.1%} ({np.median(one):+6.1%})" for one in (was, now)]
            print(f"  {name[:40]:40s} {len(own):5d} rows   {sizes[0]} -> {sizes[1]}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--keep", type=Path, help="write each row's error here")
    parser.add_argument("--against", type=Path, help="errors that --keep wrote, to compare with")
    parser.add_argument("--same-families", action="store_true", help="leave out sources alone")
    return parser.parse_args()


def measured_runs(shipped: Backtest) -> list[Prediction]:
    return [run for run in shipped.predictions if run.judged and run.setup and run.measured_step_time_s]


def main() -> None:
    chosen, began = arguments(), time.process_time()
    with chosen.table.open(newline="", encoding="utf-8") as lines:
        shipped = backtest(csv.DictReader(lines), Efficiency())
    known = Known.of(measured_runs(shipped))
    sources = sorted(set(known.sources))
    found = [one for source in sources for one in judge(known, source, families=not chosen.same_families)]
    report(found)
    errors = shipped.errors()
    print(f"{'as shipped, fitted to all':42s} {len(errors):5d} rows   mean {np.mean(np.abs(errors)):5.1%}")
    if chosen.against:
        compare(found, json.loads(chosen.against.read_text(encoding="utf-8")))
    if chosen.keep:
        chosen.keep.write_text(json.dumps({one.run.row.get("id"): one.error for one in found}), encoding="utf-8")
    print(f"{time.process_time() - began:.0f} s of processor")


if __name__ == "__main__":
    main()
