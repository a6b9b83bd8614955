"""Fit the efficiencies to measured runs: robust Gauss-Newton on the logarithm of the step time.

Each parameter is pulled towards its present value, so that a handful of runs moves only what they measure
(a Bayesian's prior, a ridge in logarithms). Huber's weights keep outliers from steering (Huber 1964).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step

HUBER = 0.08
"""Errors beyond 8% count linearly: identical configurations already differ by 4% on average."""
FRACTIONS = frozenset(
    {
        *("matmul", "attention_forward", "attention_backward", "memory", "cache_reuse"),
        *("link_nvswitch", "link_mesh", "link_pcie", "nic"),
        *("tp_overlap", "cp_overlap", "ep_overlap", "ep_overlap_network", "dp_overlap", "pp_overlap"),
    }
)
"""Parameters that cannot pass 1."""
STEP = 0.05
"""Relative change by which a derivative is taken."""


@dataclass(frozen=True)
class FittedRow:
    setup: Setup
    step_time_s: float
    weight: float = 1.0


def fit(
    cases: Sequence[FittedRow], start: Efficiency, prior: float = 0.3, iterations: int = 8, derive_every: int = 1
) -> Efficiency:
    """The efficiencies nearest to the measurements. `prior`: the relative change of a parameter that costs as much
    as one run's error of one Huber width. `derive_every`: iterations that share their derivatives, nearly all the time.
    """
    import numpy as np

    names = list(start.as_dict())
    origin = np.log(np.array([max(start.as_dict()[name], 1e-9) for name in names]))
    theta = origin.copy()
    ridge = (HUBER / prior) ** 2
    best, best_cost = start, math.inf
    damping = 1.0
    for iteration in range(iterations):
        current = _with(start, names, theta)
        errors = _errors(cases, current, np)
        cost = _cost(errors, cases, theta - origin, ridge, np)
        if cost < best_cost:
            best, best_cost, best_theta = current, cost, theta.copy()
            damping = max(0.1, damping / 2)
        else:
            theta, damping = best_theta.copy(), damping * 4
            current, errors = best, _errors(cases, best, np)
        if iteration % derive_every == 0:
            jacobian = _jacobian(cases, current, names, theta, errors, np)
        weights = np.array([case.weight for case in cases]) * np.minimum(1.0, HUBER / np.maximum(abs(errors), 1e-9))
        normal = (jacobian * weights[:, None]).T @ jacobian + ridge * np.eye(len(names))
        normal += damping * 0.02 * np.diag(np.diag(normal))
        gradient = (jacobian * weights[:, None]).T @ errors + ridge * (theta - origin)
        theta = theta - np.clip(np.linalg.solve(normal, gradient), -0.4, 0.4)
    last = _with(start, names, theta)
    if _cost(_errors(cases, last, np), cases, theta - origin, ridge, np) < best_cost:
        return last
    return best


def _with(start: Efficiency, names: Sequence[str], theta: Sequence[float]) -> Efficiency:
    values = {name: math.exp(float(value)) for name, value in zip(names, theta, strict=True)}
    return replace(start, **{name: min(v, 0.98) if name in FRACTIONS else v for name, v in values.items()})


def _errors(cases: Sequence[FittedRow], eff: Efficiency, np):  # type: ignore[no-untyped-def]
    return np.array([math.log(estimate_step(case.setup, eff).total_s / case.step_time_s) for case in cases])


def _cost(errors, cases: Sequence[FittedRow], shift, ridge: float, np) -> float:  # type: ignore[no-untyped-def]
    size = abs(errors)
    huber = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
    return float((np.array([case.weight for case in cases]) * huber).sum() + 0.5 * ridge * (shift**2).sum())


def _jacobian(cases: Any, current: Any, names: Any, theta: Any, errors: Any, np: Any) -> Any:
    columns = []
    for index in range(len(names)):
        moved = theta.copy()
        moved[index] += STEP
        columns.append((_errors(cases, _with(current, names, moved), np) - errors) / STEP)
    return np.stack(columns, axis=1)
