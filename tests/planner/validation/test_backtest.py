"""The planner's error on published runs, recomputed: it must not grow."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean as geometric
from statistics import median

import pytest

from trainspec_cli.planner.hardware.rates import FRACTIONS, Efficiency
from trainspec_cli.planner.run.forecast import STEP_TIME_KNOWN_WITHIN
from trainspec_cli.planner.validation.backtest import (
    FITTED_SOURCES,
    Backtest,
    Prediction,
    backtest,
    cases_of,
    fit,
    rank_sweeps,
    report,
)

MEASURED = Path(__file__).parents[2] / "data" / "measured"


def read(name: str) -> list[dict[str, str]]:
    with (MEASURED / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def throughput() -> Backtest:
    return backtest(read("throughput.csv"), Efficiency())


@pytest.fixture(scope="module")
def unseen() -> Backtest:
    """Sources that the efficiencies were not fitted to. Fit nothing to these rows: they are what the README states."""
    return backtest(read("throughput_unseen.csv"), Efficiency())


@pytest.fixture(scope="module")
def memory() -> Backtest:
    return backtest(read("memory.csv"), Efficiency())


@pytest.fixture(scope="module")
def corrected_memory() -> Backtest:
    """memory_corrections.csv: rows whose columns name other sizes than the section of the source they stand in."""
    corrections = {row["id"]: row for row in read("memory_corrections.csv")}
    return backtest([row | corrections.get(row["id"], {}) for row in read("memory.csv")], Efficiency())


ODD = ("m43", "m44")


@pytest.fixture(scope="module")
def measured_peaks(corrected_memory: Backtest) -> list[Prediction]:
    """All but papers' formulas and m43, for which see below."""
    rows = [p for p in corrected_memory.predictions if p.memory_error is not None and p.row["id"] != ODD[0]]
    return [p for p in rows if "Korthikanti" not in p.row["source"]]


def test_step_time_error_does_not_grow(throughput: Backtest) -> None:
    summary = report(throughput).summary
    assert summary.judged == 1092
    assert summary.step_time_mape < 0.09
    assert summary.step_time_median_ape < 0.065
    assert abs(summary.bias) < 0.015


def test_nine_in_ten_unseen_runs_lie_within_the_interval_that_a_plan_states(unseen: Backtest) -> None:
    summary = report(unseen).summary
    assert summary.unseen and summary.fitted is None and summary.unseen.rows == 178
    assert 1.6 < summary.unseen.known_within <= STEP_TIME_KNOWN_WITHIN, "neither too narrow nor wider than it must be"
    dense = unseen.errors(lambda p: p.row["family"] == "dense")
    experts = unseen.errors(lambda p: p.row["family"] == "moe")
    assert (len(dense), len(experts)) == (166, 12)
    for errors in (dense, experts):
        held = [1 / STEP_TIME_KNOWN_WITHIN <= 1 + error <= STEP_TIME_KNOWN_WITHIN for error in errors]
        assert sum(held) >= 0.9 * len(held)


def test_the_figures_of_unseen_runs_do_not_grow(unseen: Backtest) -> None:
    summary = report(unseen).summary
    assert summary.unseen and summary.unseen.mape < 0.2145 and summary.unseen.median_ape < 0.2105
    assert summary.memory_mape is not None and summary.memory_mape < 0.165


def test_rows_are_divided_by_what_the_efficiencies_were_fitted_to(throughput: Backtest, unseen: Backtest) -> None:
    assert {p.row["source"] for p in throughput.predictions} == FITTED_SOURCES
    both = Backtest(throughput.predictions + unseen.predictions)
    summary = report(both).summary
    assert summary.fitted == report(throughput).summary.fitted and summary.unseen == report(unseen).summary.unseen
    assert summary.fitted and summary.fitted.rows == 1092
    without = report(both, fitted=()).summary
    assert without.fitted is None and without.unseen is None and without.judged == 1270


def geometric_mean(values: Iterable[float | None]) -> float:
    return geometric([value for value in values if value])


def test_no_prediction_changes_unnoticed(throughput: Backtest, memory: Backtest) -> None:
    """Whoever changes a constant or a formula sees by how much, compares the errors above, and writes the new means."""
    found, peaks = throughput.predictions, memory.predictions
    assert geometric_mean(p.step_time_s for p in found) == pytest.approx(3.25049369, rel=1e-7)
    assert geometric_mean(p.tokens_s_gpu for p in found) == pytest.approx(1876.2679, rel=1e-7)
    assert geometric_mean(p.peak_memory_bytes for p in found) == pytest.approx(6.1329082e10, rel=1e-7)
    assert geometric_mean(p.memory_bytes for p in found) == pytest.approx(5.59243242e10, rel=1e-7)
    assert geometric_mean(p.peak_memory_bytes for p in peaks) == pytest.approx(5.56855236e10, rel=1e-7)
    assert geometric_mean(p.memory_bytes for p in peaks) == pytest.approx(2.18616425e9, rel=1e-7)


def test_the_columns_are_read_as_they_were(throughput: Backtest, memory: Backtest) -> None:
    assert geometric_mean(p.measured_step_time_s for p in throughput.predictions) == pytest.approx(3.25496634, rel=1e-7)
    assert geometric_mean(p.measured_memory_bytes for p in memory.predictions) == pytest.approx(2.15970482e9, rel=1e-7)
    assumed = Counter(name for p in throughput.predictions for name in p.assumed)
    assert assumed == {"recompute": 342, "mbs": 47, "head_dim": 43, "interconnect": 36, "layer pattern": 27}
    summary = report(throughput).summary
    assert (summary.rows, summary.predicted, summary.refused) == (1194, 1181, 13)
    assert summary.refused_by_reason["columns mbs and gbs are empty"] == 8
    assert report(memory).summary.refused_by_reason == {
        "columns mbs and gbs are empty": 4,
        "column n_gpus is empty": 3,
    }
    assert summary.step_time_mape == pytest.approx(0.0888186, rel=1e-5)
    assert summary.step_time_median_ape == pytest.approx(0.0631661, rel=1e-5)
    assert summary.bias == pytest.approx(0.00184394, rel=1e-5)
    assert summary.memory_worst_under == pytest.approx(-0.268193, rel=1e-5)
    assert sum(ranking.loss for ranking in rank_sweeps(throughput.predictions)) == pytest.approx(0.252683, rel=1e-5)
    assert next(iter(summary.by_gpu)) == "H100-SXM-80GB", "the largest group comes first"
    assert sum(group.rows for group in summary.by_gpu.values()) == len(throughput.points()) == 1092


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("MLPerf Training", 0.095),
        ("NVIDIA/dgxc-benchmarking", 0.098),
        ("NVIDIA-NeMo/Megatron-Bridge", 0.123),
        ("mosaicml/llm-foundry", 0.055),
        ("bigscience-workshop/bigscience", 0.073),
    ],
)
def test_no_source_is_bought_with_another(throughput: Backtest, source: str, most: float) -> None:
    assert throughput.by("source")[source].mape < most


def test_sweeps_are_won_by_a_layout_near_the_best(throughput: Backtest) -> None:
    near = [ranking.loss < 0.05 for ranking in rank_sweeps(throughput.predictions)]
    assert len(near) == 18 and sum(near) >= 17


def test_few_rows_are_refused_and_each_says_why(throughput: Backtest) -> None:
    refused = [p for p in throughput.predictions if p.refused]
    assert len(refused) <= 0.03 * len(throughput.predictions)
    assert all("column" in (p.refused or "") or "model" in (p.refused or "") for p in refused)
    assert not any(p.judged for p in refused)


def test_activations_follow_the_published_formula(memory: Backtest) -> None:
    rows = [p for p in memory.predictions if "activation" in p.row["metric"]]
    assert len(rows) == 28
    assert max(abs(p.memory_error or 0) for p in rows) < 0.02


@pytest.mark.parametrize(
    ("source", "most", "scatter", "furthest_under"),
    [
        ("InternLM/InternEvo", 0.056, 0.035, 0.02),
        ("Lightning-AI/litgpt", 0.025, 0.016, 0.03),
        ("bigscience-workshop/bigscience", 0.052, 0.033, 0.03),
    ],
)
def test_memory_error_does_not_grow(
    measured_peaks: list[Prediction], source: str, most: float, scatter: float, furthest_under: float
) -> None:
    """`scatter`: about the median, which a reserve lifts and does not narrow."""
    errors = [p.memory_error or 0.0 for p in measured_peaks if p.row["source"] == source]
    assert mean_size(errors) < most
    assert mean_size([error - median(errors) for error in errors]) < scatter
    assert min(errors) > -furthest_under


def test_no_peak_is_more_than_3_percent_under(measured_peaks: list[Prediction]) -> None:
    errors = [p.memory_error or 0.0 for p in measured_peaks]
    assert len(errors) == 135
    assert min(errors) > -0.03
    assert mean_size(errors) < 0.05


def test_one_row_contradicts_its_neighbours(corrected_memory: Backtest) -> None:
    """m43: its source gives 65 GB for a micro-batch of 2, and 56 GB for one of 4 in the line below (m44)."""
    first, second = (next(p for p in corrected_memory.predictions if p.row["id"] == name) for name in ODD)
    assert all(first.row[key] == second.row[key] for key in ("layers", "hidden", "n_gpus", "tp", "pp", "dp", "dp_mode"))
    assert float(first.row["mbs"]) < float(second.row["mbs"]) and float(first.row["value"]) > float(second.row["value"])
    assert min(p.memory_error or 0.0 for p in corrected_memory.predictions) == first.memory_error


def mean_size(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def test_rows_without_measurements_are_predicted_alone() -> None:
    row = read("throughput.csv")[0] | {"step_time_s": "", "tokens_s_gpu": "", "samples_s_gpu": ""}
    found = report(backtest([row], Efficiency()))
    (only,) = found.rows
    assert only.predicted_step_time_s is not None and only.predicted_step_time_s > 0
    assert only.measured_step_time_s is None
    assert found.summary.step_time_mape is None


def test_unknown_chip_is_refused_by_name() -> None:
    row = read("throughput.csv")[0] | {"gpu": "Abacus-9000"}
    assert "Abacus-9000" in (backtest([row], Efficiency()).predictions[0].refused or "")


def test_fit_recovers_a_slower_cluster() -> None:
    """Runs that all take a quarter longer than predicted: the fit takes most of it back, by few rows."""
    rows = [row for row in read("throughput.csv") if row["source"] == "mosaicml/llm-foundry"][:20]
    predicted = backtest(rows, Efficiency()).predictions
    slower = [row | {"step_time_s": str(1.25 * (p.step_time_s or 0))} for row, p in zip(rows, predicted, strict=True)]
    before = backtest(slower, Efficiency())
    fitted = fit(cases_of(before.predictions), Efficiency(), iterations=3)
    after = [abs(error) for error in backtest(slower, fitted).errors()]
    assert sum(after) / len(after) < 0.08


def test_no_fraction_is_fitted_beyond_what_there_is() -> None:
    """Runs that all take a third of what is predicted: many a fraction would pass 1."""
    rows = [row for row in read("throughput.csv") if row["source"] == "mosaicml/llm-foundry"][:4]
    cases = cases_of(backtest(rows, Efficiency()).predictions)
    faster = [replace(case, step_time_s=case.step_time_s / 3, weight=100.0) for case in cases]
    fitted = fit(faster, Efficiency(), prior=3.0, iterations=3).as_dict()
    assert max(fitted[name] for name in FRACTIONS) == 0.98
