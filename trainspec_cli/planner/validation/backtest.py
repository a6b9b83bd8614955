"""Predict every row in a table of measured runs, and report the errors by source, model and chip."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.hardware.rates import FRACTIONS, Efficiency
from trainspec_cli.planner.memory.predict import (
    GROUP_BYTES,
    RESERVE,
    communicators,
    estimate_memory,
    in_flight,
    mean_layer_memory,
    memory_limit_bytes,
    peak_of,
)
from trainspec_cli.planner.setup import RECOMPUTE, Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.planner.validation.columns import DERIVED, MEASURED
from trainspec_cli.planner.validation.table import Row, RowRefused, Stated, framework_of, number, state
from trainspec_cli.recipe.results.tables import BacktestReport, BacktestSummary, ErrorSummary, PredictedRow, Ranking

# Interpret a measured memory value, to compare it with the corresponding part of a prediction.
#
# nvidia-smi includes the device's context, communication buffers and the allocator's cache; PyTorch's counters include
# only tensors; papers give activations or states as formulas.


UNITS = {"GiB": GIB, "MiB": 2**20, "MB": 1e6}


def memory_figure(row: Row, setup: Setup) -> tuple[float | None, float | None]:
    """Return (predicted, measured) in bytes; (None, None) if the row has no memory value."""
    facts, _ = framework_of(row)
    reserved = " reserved" if facts.allocator_peaks else ""
    if number(row, "peak_mem_gib"):
        measured = number(row, "peak_mem_gib", 0.0) * GIB  # type: ignore[operator]
        return predicted_as((row.get("mem_kind") or "") + reserved, setup), measured
    metric = row.get("metric") or ""
    unit = row.get("unit") or ""
    value = number(row, "value")
    if not metric or value is None:
        return None, None
    if unit == "%":
        # Papers give activations relative to the same run without sequence parallelism and recomputation.
        layout = replace(setup.layout, sequence_parallel=False)
        baseline = replace(setup, layout=layout, recompute=RECOMPUTE["none"])
        return kept_activation_bytes(setup) / kept_activation_bytes(baseline), value / 100
    scale = facts.gb_bytes if unit == "GB" else UNITS.get(unit, GIB)
    return predicted_as(metric + reserved, setup), value * scale


def predicted_as(metric: str, setup: Setup) -> float:
    """Return the memory that the metric counts, on the stage that needs the most."""
    metric = metric.lower()
    stages = estimate_memory(setup)
    if "activations" in metric:
        return kept_activation_bytes(setup)
    if "weights+optimizer" in metric:
        return stages[0].parameters_bytes + stages[0].gradients_bytes + stages[0].optimizer_bytes
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    # PyTorch's allocator does not count the device context and NCCL's buffers.
    outside = fullest.context_bytes + GROUP_BYTES * communicators(setup)
    if "reserved" not in metric and any(name in metric for name in ("torch", "lora max", "allocated")):
        tensors = fullest.total_bytes - fullest.fragmentation_bytes - outside
        return tensors * (1 + RESERVE)  # the same relative reserve as for the total
    # This applies to nvidia-smi: the allocator releases its unused blocks when a device becomes full.
    needed = (fullest.total_bytes - fullest.fragmentation_bytes) * (1 + RESERVE)
    resident = max(needed, min(fullest.total_bytes, setup.fabric.chip.memory_gb * GIB))
    return resident - outside if "reserved" in metric else resident


def kept_activation_bytes(setup: Setup) -> float:
    """Return the number of bytes that the first stage keeps from forward to backward, without the running layer's
    temporaries."""
    layer = mean_layer_memory(setup)
    return layer.kept_bytes * in_flight(setup, 0) * setup.model.num_layers / setup.layout.pp


@dataclass(frozen=True)
class Prediction:
    row: Row
    setup: Setup | None = None
    step_time_s: float | None = None
    measured_step_time_s: float | None = None
    tokens_s_gpu: float | None = None
    """Tokens per second per GPU; for image models, samples."""
    peak_memory_bytes: float | None = None
    memory_bytes: float | None = None
    """The prediction for the row's memory column (without the device context if the column excludes it)."""
    measured_memory_bytes: float | None = None
    assumed: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def judged(self) -> bool:
        """True if the row counts towards the errors. Rows that the table marks as unsuitable or incomplete are only
        predicted."""
        flags = (self.row.get("fit_ok"), self.row.get("config_complete"))
        return all((flag or "1").lower() in ("1", "1.0", "true") for flag in flags)

    @property
    def step_error(self) -> float | None:
        """The relative error of the step time; 0.1 means that the predicted step is 10% too slow."""
        if not self.step_time_s or not self.measured_step_time_s:
            return None
        return self.step_time_s / self.measured_step_time_s - 1

    @property
    def memory_error(self) -> float | None:
        if not self.memory_bytes or not self.measured_memory_bytes:
            return None
        return self.memory_bytes / self.measured_memory_bytes - 1


@dataclass(frozen=True)
class Backtest:
    predictions: tuple[Prediction, ...]

    def errors(self, keep: Callable[[Prediction], bool] = lambda _: True) -> list[float]:
        found = (p.step_error for p in self.predictions if p.judged and keep(p))
        return [error for error in found if error is not None]

    def points(self) -> list[tuple[float, float, str]]:
        """Return (measured, predicted, source) for the rows that count."""
        return [
            (p.measured_step_time_s, p.step_time_s, p.row.get("source") or "?")
            for p in self.predictions
            if p.judged and p.measured_step_time_s and p.step_time_s
        ]

    def by(self, column: str) -> dict[str, ErrorSummary]:
        groups: dict[str, list[float]] = defaultdict(list)
        for prediction in self.predictions:
            if prediction.judged and prediction.step_error is not None:
                groups[prediction.row.get(column) or "?"].append(prediction.step_error)
        found = {name: ErrorSummary.of(errors) for name, errors in groups.items()}
        return {name: summary for name, summary in sorted(found.items(), key=lambda kv: -len(groups[kv[0]])) if summary}


FITTED_SOURCES = frozenset(
    {
        "MLPerf Training",
        "NVIDIA/dgxc-benchmarking",
        "NVIDIA-NeMo/Megatron-Bridge",
        "mosaicml/llm-foundry",
        "bigscience-workshop/bigscience",
        "NVIDIA/DeepLearningExamples",
        "NVIDIA/Megatron-LM",
        "Korthikanti 2022 (arXiv:2205.05198)",
    }
)
"""Sources (names in the column `source`) whose step times were used to fit the shipped efficiencies. The error on their
rows shows how well the model fits; the error on all other sources shows what to expect for other runs."""
SWEEP_KEYS = (
    *("source", "model", "gpu", "table", "layers", "hidden", "heads", "n_gpus", "dtype", "gbs", "seq_len"),
    *("task", "framework"),
)
"""Columns that identify a sweep: rows that agree in all of them differ only in layout."""


def backtest(rows: Iterable[Row], eff: Efficiency) -> Backtest:
    return Backtest(tuple(predict(row, eff) for row in rows))


def predict(row: Row, eff: Efficiency) -> Prediction:
    try:
        if any(row.get(name) for name in DERIVED) and not any(row.get(name) for name in MEASURED):
            raise RowRefused(f"{' and '.join(DERIVED)} are not compared: give tokens_s_gpu or step_time_s")
        stated = state(row)
        setup = close_recompute(stated)
        step = estimate_step(setup, eff).total_s
        devices = setup.fabric.num_devices
        rate = stated.samples * setup.seq_len / step / devices
        memory, measured_memory = memory_figure(row, setup)
        # The measured step time is in one of several columns.
        measured = number(row, "step_time_s")
        if not measured and (samples_s := number(row, "samples_s_gpu")):
            measured = stated.samples / samples_s / devices
        elif not measured:
            tokens_s = number(row, "tokens_s_gpu")
            measured = stated.samples * stated.setup.seq_len / tokens_s / devices if tokens_s else None
        return Prediction(
            row=row,
            setup=setup,
            step_time_s=step,
            measured_step_time_s=measured,
            tokens_s_gpu=rate,
            peak_memory_bytes=peak_of(setup, mean_layer_memory(setup)),
            memory_bytes=memory,
            measured_memory_bytes=measured_memory,
            assumed=stated.assumed,
        )
    except RowRefused as refusal:
        return Prediction(row, refused=str(refusal))
    except (ArithmeticError, ValueError, AssertionError):
        return Prediction(row, refused="its sizes do not describe a run")


def close_recompute(stated: Stated) -> Setup:
    """Choose the recomputation if the row leaves it open: full, in as few layers as are needed for the run to fit on
    the chip (usually none)."""
    setup = stated.setup
    if not stated.recompute_open:
        return setup
    limit = memory_limit_bytes(setup.fabric.chip)
    again = replace(setup, recompute=RECOMPUTE["full"])
    plain, full = (peak_of(one, mean_layer_memory(one)) for one in (setup, again))
    if plain <= limit or full >= plain:
        return setup
    share = math.ceil(10 * min(1.0, (plain - limit) / (plain - full))) / 10
    return replace(setup, recompute=replace(RECOMPUTE["full"], layers=share))


def rank_sweeps(predictions: Sequence[Prediction]) -> list[Ranking]:
    """Return sweeps of three or more rows that differ only in layout."""
    sweeps: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        if prediction.judged and prediction.step_error is not None:
            sweeps[tuple(prediction.row.get(key) or "" for key in SWEEP_KEYS)].append(prediction)
    found = []
    for key, runs in sweeps.items():
        layouts = {(p.setup.layout, p.setup.micro_batch_size, p.setup.recompute) for p in runs if p.setup}
        if len(layouts) >= 3:
            chosen = min(runs, key=lambda p: p.step_time_s or math.inf)
            best = min(p.measured_step_time_s or math.inf for p in runs)
            found.append(Ranking(key[0], key[1], key[2], len(layouts), (chosen.measured_step_time_s or 0) / best - 1))
    return found


def fit_table(result: Backtest, start: Efficiency, prior: float = 0.3) -> Efficiency:
    """Return the efficiencies, corrected by the measured rows."""
    runs = [p for p in result.predictions if p.judged and p.setup and p.measured_step_time_s]
    return fit(cases_of(runs), start, prior)


CASE_WEIGHT = 0.2
"""Weight of a run: five runs weigh as much as the prior of one parameter."""


def cases_of(runs: Sequence[Prediction]) -> list[FittedRow]:
    """Merge identical setups from one source into one case with their median step time."""
    groups: dict[tuple[Setup, str], list[float]] = defaultdict(list)
    for run in runs:
        assert run.setup is not None and run.measured_step_time_s is not None
        groups[run.setup, run.row.get("source") or ""].append(run.measured_step_time_s)
    return [
        FittedRow(setup, sorted(times)[len(times) // 2], CASE_WEIGHT * math.sqrt(len(times)))
        for (setup, _), times in groups.items()
    ]


def report(result: Backtest, fitted: Collection[str] = FITTED_SOURCES) -> BacktestReport:
    """Summarise a backtest, and describe each row. `fitted`: the sources used to fit its efficiencies; if empty, the
    summary does not separate them."""
    total = ErrorSummary.of(result.errors())
    memory = ErrorSummary.of([p.memory_error for p in result.predictions if p.memory_error is not None])
    refusals = Counter(p.refused for p in result.predictions if p.refused)
    summary = BacktestSummary(
        rows=len(result.predictions),
        predicted=len(result.predictions) - refusals.total(),
        refused=refusals.total(),
        step_time_mape=total.mape if total else None,
        step_time_median_ape=total.median_ape if total else None,
        bias=total.bias if total else None,
        judged=total.rows if total else 0,
        memory_mape=memory.mape if memory else None,
        memory_worst_under=memory.worst_under if memory else None,
        fitted=ErrorSummary.of(result.errors(lambda p: p.row.get("source") in fitted)) if fitted else None,
        unseen=ErrorSummary.of(result.errors(lambda p: p.row.get("source") not in fitted)) if fitted else None,
        refused_by_reason=dict(refusals),
        by_source=result.by("source"),
        by_model=result.by("model"),
        by_gpu=result.by("gpu"),
        sweeps=tuple(rank_sweeps(result.predictions)),
    )
    rows = tuple(
        PredictedRow(
            id=prediction.row.get("id"),
            predicted_step_time_s=prediction.step_time_s,
            measured_step_time_s=prediction.measured_step_time_s,
            predicted_tokens_s_gpu=prediction.tokens_s_gpu,
            peak_memory_bytes=prediction.peak_memory_bytes,
            compared_memory_bytes=prediction.memory_bytes,
            measured_memory_bytes=prediction.measured_memory_bytes,
            assumed=prediction.assumed,
            refused=prediction.refused,
        )
        for prediction in result.predictions
    )
    return BacktestReport(summary, rows)


# Fit the efficiencies to measured runs: robust Gauss-Newton on the logarithm of the step time.
#
# Each parameter is pulled towards its current value, so that a few runs change only the parameters that they measure (a
# Bayesian prior, or ridge regression in logarithms). Huber weights reduce the influence of outliers (Huber 1964).


HUBER = 0.08
"""Errors beyond 8% count linearly, because even identical configurations differ by 4% on average."""
STEP = 0.05
"""Relative step for numerical derivatives."""


@dataclass(frozen=True)
class FittedRow:
    setup: Setup
    step_time_s: float
    weight: float = 1.0


def fit(
    cases: Sequence[FittedRow], start: Efficiency, prior: float = 0.3, iterations: int = 8, derivatives: Any = None
) -> Efficiency:
    """Return the efficiencies that best fit the measurements. `prior`: the relative change of a parameter that costs as
    much as an error of one Huber width in one run. `derivatives`: derivatives of the cases at `start`, reused in every
    iteration because computing them takes nearly all of the time."""
    import numpy as np

    origin = log_values(start)
    theta = origin.copy()
    case_weights = np.array([case.weight for case in cases])
    best = start
    best_cost = math.inf
    best_theta = theta
    damping = 1.0
    for iteration in range(iterations + 1):
        current = moved_to(start, theta)
        errors = log_errors(cases, current)
        size = abs(errors)
        huber = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        shift = theta - origin
        cost = float((case_weights * huber).sum() + 0.5 * (HUBER / prior) ** 2 * (shift**2).sum())
        if cost < best_cost:
            best = current
            best_cost = cost
            best_theta = theta
            damping = max(0.1, damping / 2)
        else:
            theta = best_theta
            damping = damping * 4
            current = best
            errors = log_errors(cases, best)
        if iteration < iterations:
            jacobian = derive(cases, current) if derivatives is None else derivatives
            theta = theta - newton_step(jacobian, errors, case_weights, theta - origin, prior, damping)
    return best


def newton_step(jacobian: Any, errors: Any, case_weights: Any, shift: Any, prior: float, damping: float = 0.0) -> Any:
    """Return the amount by which to reduce the logarithms of the efficiencies, which are `shift` away from those of the
    prior."""
    import numpy as np

    weights = case_weights * np.minimum(1.0, HUBER / np.maximum(abs(errors), 1e-9))
    ridge = (HUBER / prior) ** 2
    normal = (jacobian * weights[:, None]).T @ jacobian + ridge * np.eye(len(shift))
    normal += damping * 0.02 * np.diag(np.diag(normal))
    gradient = (jacobian * weights[:, None]).T @ errors + ridge * shift
    return np.clip(np.linalg.solve(normal, gradient), -0.4, 0.4)


def log_values(eff: Efficiency) -> Any:
    import numpy as np

    return np.log(np.array([max(value, 1e-9) for value in eff.as_dict().values()]))


def moved_to(start: Efficiency, theta: Sequence[float]) -> Efficiency:
    """Return the efficiencies whose logarithms are `theta`, with fractions limited to 1."""
    values = {name: math.exp(float(value)) for name, value in zip(start.as_dict(), theta, strict=True)}
    return replace(start, **{name: min(v, 0.98) if name in FRACTIONS else v for name, v in values.items()})


def log_errors(cases: Sequence[FittedRow], eff: Efficiency) -> Any:
    """Return the logarithm of the ratio of the predicted to the measured value for each case."""
    import numpy as np

    return np.array([math.log(estimate_step(case.setup, eff).total_s / case.step_time_s) for case in cases])


def derive(cases: Sequence[FittedRow], at: Efficiency) -> Any:
    """Return the derivatives of the logarithm of each case's step time with respect to the logarithm of each
    efficiency, as cases x efficiencies. They do not depend on the measurements."""
    import numpy as np

    theta = log_values(at)
    errors = log_errors(cases, at)
    columns = []
    for index in range(len(theta)):
        moved = theta.copy()
        moved[index] += STEP
        columns.append((log_errors(cases, moved_to(at, moved)) - errors) / STEP)
    return np.stack(columns, axis=1)
