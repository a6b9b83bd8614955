"""The planner's errors on sources and years that were left out while its efficiencies were fitted.

    python tests/bench/nested.py [--keep ERRORS.json] [--against ERRORS.json]

Three ways to leave out rows: the judged source; the judged year; both at once, so that neither another year of the
source nor another source of the year teaches anything. The efficiencies start from round guesses; the remaining rows
choose how far they move, with step times linear in their logarithms (`planner_generality.py`), and the rows that were
left out are then predicted exactly. The last columns show how many of them lie inside the interval that a plan prints.
Needs numpy; takes about half a minute on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path

import numpy as np
from planner_generality import GUESS, TABLE, Known, choose_prior, measured_runs, shift_taught_by, source_of

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.run.forecast import STEP_TIME_KNOWN_WITHIN
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.planner.validation.backtest import Prediction, backtest, log_values, moved_to

WAYS = {"source": (True, False), "year": (False, True), "source and year": (True, True)}


def year_of(run: Prediction) -> str:
    return run.row.get("year") or "?"


def judge(known: Known, by_source: bool, by_year: bool) -> dict[str, float]:
    """Return each row's error with the efficiencies that the rows apart from it teach, by its id."""
    pairs = [(source_of(run.row) if by_source else "", year_of(run) if by_year else "") for run in known.runs]
    found = {}
    for source, year in sorted(set(pairs)):
        taught = np.ones(len(known.cases), dtype=bool)
        for run, case in zip(known.runs, known.case_of, strict=True):
            if (by_source and source_of(run.row) == source) or (by_year and year_of(run) == year):
                taught[case] = False
        shift = shift_taught_by(known, taught, choose_prior(known, taught)[0])
        learned = moved_to(GUESS, log_values(GUESS) + shift)
        for run, pair in zip(known.runs, pairs, strict=True):
            if pair == (source, year) and run.setup and run.measured_step_time_s:
                found[run.row["id"]] = estimate_step(run.setup, learned).total_s / run.measured_step_time_s - 1
    return found


def describe(errors: list[float]) -> str:
    size = np.abs(errors)
    within = math.log(STEP_TIME_KNOWN_WITHIN)
    held = np.mean(np.abs(np.log1p(errors)) <= within)
    nine = np.quantile(np.abs(np.log1p(errors)), 0.9)
    text = (
        "{:5d} rows   mean {:5.1%}   median {:5.1%}   bias {:+6.1%}   nine in ten within x{:.2f}   inside x{} {:4.0%}"
    )
    return text.format(
        len(errors), size.mean(), np.median(size), np.median(errors), math.exp(nine), STEP_TIME_KNOWN_WITHIN, held
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="write each row's errors here")
    parser.add_argument("--against", type=Path, help="errors that --keep wrote, to compare with")
    chosen = parser.parse_args()
    with TABLE.open(newline="", encoding="utf-8") as lines:
        known = Known.of(measured_runs(backtest(csv.DictReader(lines), Efficiency())))
    before = json.loads(chosen.against.read_text(encoding="utf-8")) if chosen.against else {}
    found = {}
    group_of = {run.row["id"]: f"{source_of(run.row)[:28]} {year_of(run)}" for run in known.runs}
    for way, sides in WAYS.items():
        found[way] = errors = judge(known, *sides)
        print(f"left out: {way}", flush=True)
        for name in (*sorted(set(group_of.values())), ""):
            own = [key for key in errors if group_of[key].startswith(name)]
            was = f"   before {np.mean(np.abs([before[way][key] for key in own])):5.1%}" if before else ""
            print(f"  {name or 'all':34s} {describe([errors[key] for key in own])}{was}")
    if chosen.keep:
        chosen.keep.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
