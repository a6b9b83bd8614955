"""Predict every row of a table of measured runs, and say how far off: by source, by model, by chip."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.frameworks import (
    DEFAULT_MEMORY,
    communicators,
    estimate_memory,
    kept_activation_bytes,
    memory_limit_bytes,
    peak_bytes,
)
from trainspec_cli.planner.setup import RECOMPUTE, Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.planner.validation.fit import FittedRow, fit, framework_of
from trainspec_cli.planner.validation.table import Row, RowRefused, Stated, number, state
from trainspec_cli.recipe.results.plan import MemoryBreakdown
from trainspec_cli.recipe.results.tables import BacktestReport, BacktestSummary, ErrorSummary, PredictedRow, Ranking

# Interpret a measured memory figure: the part of a prediction that it is compared with.
#
# nvidia-smi sees the device's context, communication buffers and the allocator's cache; PyTorch's counters see
# tensors alone; papers give activations or states by formula.


UNITS = {"GiB": GIB, "MiB": 2**20, "MB": 1e6}


def memory_figure(row: Row, setup: Setup) -> tuple[float | None, float | None]:
    """-> (predicted, measured) in bytes, or (None, None) where the row measures no memory."""
    if number(row, "peak_mem_gib"):
        return predicted_as(row.get("mem_kind") or "", setup), number(row, "peak_mem_gib", 0.0) * GIB  # type: ignore[operator]
    metric = row.get("metric") or ""
    unit = row.get("unit") or ""
    value = number(row, "value")
    if not metric or value is None:
        return None, None
    if unit == "%":
        # The papers give activations over those of the same run with neither sequence parallelism nor recomputation.
        layout = replace(setup.layout, sequence_parallel=False)
        baseline = replace(setup, layout=layout, recompute=RECOMPUTE["none"])
        return kept_activation_bytes(setup) / kept_activation_bytes(baseline), value / 100
    scale = framework_of(row)[0].gb_bytes if unit == "GB" else UNITS.get(unit, GIB)
    return predicted_as(metric, setup), value * scale


def predicted_as(metric: str, setup: Setup) -> float:
    """The part of the fullest stage that a metric of that name counts."""
    metric = metric.lower()
    stages = estimate_memory(setup)
    if "activations" in metric:
        return kept_activation_bytes(setup)
    if "weights+optimizer" in metric:
        return stages[0].parameters_bytes + stages[0].gradients_bytes + stages[0].optimizer_bytes
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    if "reserved" in metric:
        return resident_bytes(fullest, setup) - outside_bytes(fullest, setup)
    if "torch" in metric or "lora max" in metric or "allocated" in metric:
        tensors = fullest.total_bytes - fullest.fragmentation_bytes - outside_bytes(fullest, setup)
        return tensors * (1 + DEFAULT_MEMORY.reserve)  # the same reserve as the whole
    return resident_bytes(fullest, setup)


def resident_bytes(memory: MemoryBreakdown, setup: Setup) -> float:
    """Bytes that nvidia-smi shows: before a device is full, the allocator hands its unused blocks back."""
    needed = (memory.total_bytes - memory.fragmentation_bytes) * (1 + DEFAULT_MEMORY.reserve)
    return max(needed, min(memory.total_bytes, setup.fabric.chip.memory_gb * GIB))


def outside_bytes(memory: MemoryBreakdown, setup: Setup) -> float:
    """Bytes that PyTorch's allocator does not see: the device's context and NCCL's own buffers."""
    return memory.context_bytes + DEFAULT_MEMORY.group_bytes * communicators(setup)


@dataclass(frozen=True)
class Prediction:
    row: Row
    setup: Setup | None = None
    step_time_s: float | None = None
    measured_step_time_s: float | None = None
    tokens_s_gpu: float | None = None
    """Samples, for a model of images."""
    peak_memory_bytes: float | None = None
    memory_bytes: float | None = None
    """The figure that the row's memory column counts (without the device's context where it does not count that)."""
    measured_memory_bytes: float | None = None
    assumed: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def judged(self) -> bool:
        """Rows that their table marks as unfit or incomplete are predicted, and left out of the errors."""
        flags = (self.row.get("fit_ok"), self.row.get("config_complete"))
        return all((flag or "1").lower() in ("1", "1.0", "true") for flag in flags)

    @property
    def step_error(self) -> float | None:
        """Relative: 0.1 is 10% too slow."""
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
    ranking: tuple[Ranking, ...] = field(default=())

    def errors(self, keep: Callable[[Prediction], bool] = lambda _: True) -> list[float]:
        found = (p.step_error for p in self.predictions if p.judged and keep(p))
        return [error for error in found if error is not None]

    def memory_errors(self) -> list[float]:
        return [p.memory_error for p in self.predictions if p.memory_error is not None]

    def points(self) -> list[tuple[float, float, str]]:
        """(measured, predicted, source) of the judged rows."""
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

    def refusals(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for prediction in self.predictions:
            if prediction.refused:
                counts[prediction.refused] += 1
        return dict(counts)


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
"""Sources, by their name in the column `source`, whose step times the shipped efficiencies were fitted to. The error on
their rows shows how well the model fits; the error on all other sources is what to expect of another run."""
SWEEP_KEYS = (
    *("source", "model", "gpu", "table", "layers", "hidden", "heads", "n_gpus", "dtype", "gbs", "seq_len"),
    *("task", "framework"),
)
"""Rows that agree in all of these differ in how the same work is spread."""


def backtest(rows: Iterable[Row], eff: Efficiency) -> Backtest:
    predictions = tuple(predict(row, eff) for row in rows)
    return Backtest(predictions, tuple(rank_sweeps(predictions)))


def predict(row: Row, eff: Efficiency) -> Prediction:
    try:
        stated = state(row)
        setup = close_recompute(stated)
        step = estimate_step(setup, eff).total_s
        rate = stated.samples * setup.seq_len / step / setup.fabric.num_devices
        memory, measured_memory = memory_figure(row, setup)
        return Prediction(
            row=row,
            setup=setup,
            step_time_s=step,
            measured_step_time_s=measured_step_s(row, stated),
            tokens_s_gpu=rate,
            peak_memory_bytes=peak_bytes(setup),
            memory_bytes=memory,
            measured_memory_bytes=measured_memory,
            assumed=stated.assumed,
        )
    except RowRefused as refusal:
        return Prediction(row, refused=str(refusal))
    except (ArithmeticError, ValueError, AssertionError):
        return Prediction(row, refused="its sizes describe no run")


def close_recompute(stated: Stated) -> Setup:
    """Settle a recompute that the row leaves open: full in as few layers as fit the chip (none, mostly)."""
    if not stated.recompute_open:
        return stated.setup
    setup = stated.setup
    limit = memory_limit_bytes(setup.fabric.chip)
    plain = peak_bytes(setup)
    full = peak_bytes(replace(setup, recompute=RECOMPUTE["full"]))
    if plain <= limit or full >= plain:
        return setup
    share = math.ceil(10 * min(1.0, (plain - limit) / (plain - full))) / 10
    return replace(setup, recompute=replace(RECOMPUTE["full"], layers=share))


def measured_step_s(row: Row, stated: Stated) -> float | None:
    """Seconds of a step, from whichever of the measured columns is filled."""
    step = number(row, "step_time_s")
    if step:
        return step
    devices = stated.setup.fabric.num_devices
    rate = number(row, "samples_s_gpu")
    if rate:
        return stated.samples / rate / devices
    rate = number(row, "tokens_s_gpu")
    return stated.samples * stated.setup.seq_len / rate / devices if rate else None


def rank_sweeps(predictions: Sequence[Prediction]) -> list[Ranking]:
    """Sweeps of three layouts or more that only differ in how the same work is spread."""
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
    """Efficiencies corrected by the measured rows."""
    runs = [p for p in result.predictions if p.judged and p.setup and p.measured_step_time_s]
    return fit(cases_of(runs), start, prior)


CASE_WEIGHT = 0.2
"""Five runs say as much as one parameter's prior."""


def cases_of(runs: Sequence[Prediction]) -> list[FittedRow]:
    """Identical setups of one source become one case, of their median."""
    groups: dict[tuple[Setup, str], list[float]] = defaultdict(list)
    for run in runs:
        assert run.setup is not None and run.measured_step_time_s is not None
        groups[run.setup, run.row.get("source") or ""].append(run.measured_step_time_s)
    return [
        FittedRow(setup, sorted(times)[len(times) // 2], CASE_WEIGHT * math.sqrt(len(times)))
        for (setup, _), times in groups.items()
    ]


def report(result: Backtest, fitted: Collection[str] = FITTED_SOURCES) -> BacktestReport:
    """Summarise a backtest, and describe each of its rows. `fitted`: the sources that its efficiencies were fitted to;
    where none are known, the summary does not divide the rows by that."""
    total = ErrorSummary.of(result.errors())
    memory = ErrorSummary.of(result.memory_errors())
    refused = sum(p.refused is not None for p in result.predictions)
    summary = BacktestSummary(
        rows=len(result.predictions),
        predicted=len(result.predictions) - refused,
        refused=refused,
        step_time_mape=total.mape if total else None,
        step_time_median_ape=total.median_ape if total else None,
        bias=total.bias if total else None,
        judged=total.rows if total else 0,
        memory_mape=memory.mape if memory else None,
        memory_worst_under=memory.worst_under if memory else None,
        fitted=ErrorSummary.of(result.errors(lambda p: p.row.get("source") in fitted)) if fitted else None,
        unseen=ErrorSummary.of(result.errors(lambda p: p.row.get("source") not in fitted)) if fitted else None,
        refused_by_reason=result.refusals(),
        by_source=result.by("source"),
        by_model=result.by("model"),
        by_gpu=result.by("gpu"),
        sweeps=result.ranking,
    )
    return BacktestReport(summary, tuple(map(_row, result.predictions)))


def _row(prediction: Prediction) -> PredictedRow:
    return PredictedRow(
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
