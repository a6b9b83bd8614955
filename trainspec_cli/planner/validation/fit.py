"""Fit the efficiencies to measured runs: robust Gauss-Newton on the logarithm of the step time.

Each parameter is pulled towards its present value, so that a handful of runs moves only what they measure
(a Bayesian's prior, a ridge in logarithms). Huber's weights keep outliers from steering (Huber 1964).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from trainspec_cli.planner.hardware.rates import FRACTIONS, Efficiency, load_group, without_defaults
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.framework import FrameworkSpec
from trainspec_cli.recipe.records import from_plain

HUBER = 0.08
"""Errors beyond 8% count linearly: identical configurations already differ by 4% on average."""
STEP = 0.05
"""Relative change by which a derivative is taken."""


@dataclass(frozen=True)
class FittedRow:
    setup: Setup
    step_time_s: float
    weight: float = 1.0


def fit(
    cases: Sequence[FittedRow], start: Efficiency, prior: float = 0.3, iterations: int = 8, derivatives: Any = None
) -> Efficiency:
    """The efficiencies nearest to the measurements. `prior`: the relative change of a parameter that costs as much
    as one run's error of one Huber width. `derivatives`: the cases' at `start`, which then serve every iteration;
    deriving takes nearly all the time.
    """
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
        cost = _cost(errors, case_weights, theta - origin, prior, np)
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
    """Return by how much the logarithms of the efficiencies, `shift` from where the prior has them, are to fall."""
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
    """Return efficiencies whose logarithms are `theta`, fractions kept below 1."""
    values = {name: math.exp(float(value)) for name, value in zip(start.as_dict(), theta, strict=True)}
    return replace(start, **{name: min(v, 0.98) if name in FRACTIONS else v for name, v in values.items()})


def log_errors(cases: Sequence[FittedRow], eff: Efficiency) -> Any:
    """Return the logarithm of predicted over measured, of each case."""
    import numpy as np

    return np.array([math.log(estimate_step(case.setup, eff).total_s / case.step_time_s) for case in cases])


def _cost(errors, case_weights, shift, prior: float, np) -> float:  # type: ignore[no-untyped-def]
    size = abs(errors)
    huber = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
    return float((case_weights * huber).sum() + 0.5 * (HUBER / prior) ** 2 * (shift**2).sum())


def derive(cases: Sequence[FittedRow], at: Efficiency) -> Any:
    """Derivatives of each case's logarithm of the step time by the logarithm of each efficiency: cases x efficiencies.
    What was measured has no part in them."""
    import numpy as np

    theta = log_values(at)
    errors = log_errors(cases, at)
    columns = []
    for index in range(len(theta)):
        moved = theta.copy()
        moved[index] += STEP
        columns.append((log_errors(cases, moved_to(at, moved)) - errors) / STEP)
    return np.stack(columns, axis=1)


# The framework of a table's row, by the names that the files of conf/framework list: whole words, nothing guessed.


GROUP = "framework"
UNSTATED = "pytorch"
"""The file that is taken where a row names no framework at all: its facts are those of PyTorch alone."""


class UnknownFramework(ValueError):  # noqa: N818 - an answer, not a fault
    """No file has the framework's name; the message says which there are and what to write."""


@lru_cache(maxsize=1)
def frameworks() -> dict[str, FrameworkSpec]:
    """Return every framework of conf/framework by the name of its file."""
    return load_group(GROUP, lambda values: from_plain(FrameworkSpec, without_defaults(values)))


def framework_of(row: Mapping[str, str]) -> tuple[FrameworkSpec, bool]:
    """-> (framework, in its version of the row's year; whether nothing names it). Raises UnknownFramework.

    Tables that a file claims whole come first, then the column `framework`, and where that is empty what `source` says.
    """
    stated = (row.get("framework") or "").strip()
    source = (row.get("source") or "").strip()
    claimed = [
        (one, table)
        for one in frameworks().values()
        for table in one.tables
        if table.source.casefold() == source.casefold()
    ]
    year = round(float(row["year"])) if row.get("year") else claimed[0][1].year if claimed else None
    if claimed:
        return of_year([one for one, _ in claimed], year), False
    named = named_in(stated or source)
    if named:
        return of_year(named, year), False
    if stated:
        there_are = ", ".join(sorted(frameworks()))
        raise UnknownFramework(
            f"unknown framework {stated[:40]}: write conf/framework/NAME.yaml ({there_are} are there)"
        )
    return frameworks()[UNSTATED], True


def named_in(text: str) -> list[FrameworkSpec]:
    """Return the versions of the framework that a text names first; of two that begin at one word, the longer name."""
    words = words_of(text)
    for start in range(len(words)):
        found: dict[tuple[str, ...], list[FrameworkSpec]] = {}
        for one in frameworks().values():
            for name in set(map(words_of, one.names)):
                if name and words[start : start + len(name)] == name:
                    found.setdefault(name, []).append(one)
        if found:
            return found[max(found, key=len)]
    return []


@lru_cache(maxsize=1024)
def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9.]+", text.casefold()))


def of_year(versions: list[FrameworkSpec], year: int | None) -> FrameworkSpec:
    """Return the version that a run of that year had; the newest where the year is not known."""
    latest = 10**4
    reach = [one for one in versions if year is None or (one.until_year or latest) >= year]
    order = sorted(reach or versions, key=lambda one: one.until_year or latest)
    return order[-1] if year is None or not reach else order[0]
