"""How well a few runs of a source predict the rest of it, as `trainspec calibrate` fits them and as `--fit` does.

    python tests/bench/calibration.py [--draws 10] [--rows 4]

For each source of at least twice as many rows the efficiencies are fitted to the other sources, from guesses that owe
nothing to it and as far from them as those sources choose among themselves; then so many of its rows are drawn (seeds
0, 1, ...), and the rest is predicted. Needs numpy. The fits take a minute on one core, the draws a few seconds each.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Sequence

from planner_generality import TABLE, Known, choose_prior, learn, measured_runs, source_of

from trainspec_cli.planner.calibration import EFFICIENCIES, GPU_SPREAD, efficiency_with, infer, of_rows, slopes_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation.backtest import Prediction, backtest, fit_table


def error_with(runs: Sequence[Prediction], eff: Efficiency) -> float:
    errors = backtest((run.row for run in runs), eff).errors()
    return sum(map(abs, errors)) / len(errors)


def draw(runs: Sequence[Prediction], learned: Efficiency, rows: int, seed: int) -> tuple[float, float, float, float]:
    """-> errors of the rest as learned from others, by `--fit`, calibrated; the part inside the intervals."""
    given = random.Random(seed).sample(range(len(runs)), rows)
    few = [runs[place] for place in given]
    rest = [run for place, run in enumerate(runs) if place not in given]
    found = infer(of_rows(few, learned), EFFICIENCIES, GPU_SPREAD)
    fitted = fit_table(backtest((run.row for run in few), learned), learned)
    observations = of_rows(rest, learned)
    held = 0
    for one, slopes in zip(observations, slopes_of(observations, EFFICIENCIES), strict=True):
        ratio, within = one.seconds_of(found.factors) / one.measured_s, found.known_within(slopes, GPU_SPREAD)
        held += 1 / within <= ratio <= within
    calibrated = efficiency_with(found.factors, learned)
    errors = (error_with(rest, eff) for eff in (learned, fitted, calibrated))
    return (*errors, held / len(observations))  # type: ignore[return-value]


def few_shot(source: str, runs: Sequence[Prediction], learned: Efficiency, rows: int, draws: int) -> list[float]:
    figures = [draw(runs, learned, rows, seed) for seed in range(draws)]
    means = [sum(column) / draws for column in zip(*figures, strict=True)]
    print("{:40s} {:4d} rows   none {:5.1%}   --fit {:5.1%}   calibrated {:5.1%}   inside {:4.0%}".format(
        source[:40], len(runs), *means
    ), flush=True)  # fmt: skip
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="rows of a source that are given")
    asked = parser.parse_args()
    with TABLE.open(newline="", encoding="utf-8") as lines:
        runs = measured_runs(backtest(csv.DictReader(lines), Efficiency()))
    known, found = Known.of(runs), []
    for source in sorted(set(known.sources)):
        own = [run for run in runs if source_of(run.row) == source]
        if len(own) >= 2 * asked.rows:
            others = known.apart_from(source, families=False)
            prior, _ = choose_prior(known, others)
            found.append(few_shot(source, own, learn(known, others, prior), asked.rows, asked.draws))
    means = [sum(column) / len(found) for column in zip(*found, strict=True)]
    print("mean of the sources: none {:.1%}   --fit {:.1%}   calibrated {:.1%}   inside {:.0%}".format(*means))


if __name__ == "__main__":
    main()
