"""Infer the posterior of a few parameters from a few step times: Gauss-Newton in logarithms, with a Laplace interval.

The model is hierarchical. Every cluster has its own pace (`PACE`), parameters near the shipped ones, and an error
shared by the runs of one group (a model, a run folder); the rest is noise. The prior's standard deviations describe the
spread among clusters that were not used to fit the shipped values. Even four runs are therefore useful: they change
only the parameters that they constrain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainspec_cli.planner.hardware.rates import FRACTIONS, Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.results.plan import LocalPrediction

if TYPE_CHECKING:
    from trainspec_cli.planner.validation.backtest import Prediction


PACE = "pace"
"""Name of the factor applied to all step times of the cluster, regardless of what limits them."""
NINE_IN_TEN = 1.645
"""Number of standard deviations on either side of the mean that contain 90% of a normal distribution."""
STEP = 0.02
"""Step size in a parameter's logarithm for numerical derivatives."""
ITERATIONS = 6
OUTLYING = 3.0
"""Errors larger than this many deviations count linearly (Huber)."""
TAUGHT = 0.98
"""A parameter is treated as undetermined if its posterior deviation stays above this fraction of the prior's."""


@dataclass(frozen=True)
class Observation:
    """A measured time and the function that predicts it."""

    seconds_of: Callable[[Mapping[str, float]], float]
    """Maps the parameters' factors (relative to the shipped values) to seconds."""
    measured_s: float
    group: str
    """Observations in one group share an error."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithms of factors and times."""

    parameter: float
    pace: float
    group: float
    noise: float


@dataclass(frozen=True)
class Posterior:
    names: tuple[str, ...]
    means: tuple[float, ...]
    """Logarithms of the factors relative to the shipped values."""
    covariance: tuple[tuple[float, ...], ...]
    informed: tuple[bool, ...]

    @property
    def deviations(self) -> tuple[float, ...]:
        return tuple(math.sqrt(row[place]) for place, row in enumerate(self.covariance))

    def known_within(self, slopes: Sequence[float], spread: Spread) -> float:
        """Return the 90% uncertainty factor of a step time in another group. `slopes`: derivatives of that step
        time."""
        pairs = zip(slopes, self.covariance, strict=True)
        doubt = sum(own * sum(a * b for a, b in zip(row, slopes, strict=True)) for own, row in pairs)
        return math.exp(NINE_IN_TEN * math.sqrt(doubt + spread.group**2 + spread.noise**2))

    @property
    def factors(self) -> dict[str, float]:
        return {name: math.exp(mean) for name, mean in zip(self.names, self.means, strict=True)}


def infer(observations: Sequence[Observation], names: Sequence[str], spread: Spread) -> Posterior:
    """Return the posterior factors of `names` and of the pace, given the observations."""
    import numpy as np

    every = (*names, PACE)
    prior = np.array([spread.parameter] * len(names) + [spread.pace])
    theta = np.zeros(len(every))
    groups = [observation.group for observation in observations]
    alike = np.array([[own == other for other in groups] for own in groups], dtype=float)
    noise = spread.noise**2 * np.eye(len(groups)) + spread.group**2 * alike
    for iteration in range(ITERATIONS):
        errors = _errors(observations, every, theta, np)
        if iteration % 3 == 0:
            slopes = _slopes(observations, every, theta, errors, np)
        usual = np.sqrt(spread.noise**2 + spread.group**2)
        lenience = np.maximum(1.0, abs(errors) / (OUTLYING * usual)) ** 0.5
        weights = np.linalg.inv(noise * lenience[:, None] * lenience[None, :])
        normal = slopes.T @ weights @ slopes + np.diag(prior**-2.0)
        change = np.linalg.solve(normal, slopes.T @ weights @ errors + theta / prior**2)
        theta = theta - np.clip(change, -1.0, 1.0)
    covariance = np.linalg.inv(normal)
    deviations = np.sqrt(np.diag(covariance))
    return Posterior(
        every,
        tuple(map(float, theta)),
        tuple(tuple(map(float, row)) for row in covariance),
        tuple(bool(after < TAUGHT * before) for after, before in zip(deviations, prior, strict=True)),
    )


def choose(slopes: Sequence[Any], spread: Spread, number: int) -> list[int]:
    """Return the indices of `number` trials that together reduce the uncertainty most (greedily D-optimal). `slopes`:
    derivatives of each trial's observations with respect to all parameters, with the pace last."""
    import numpy as np

    width = slopes[0].shape[1]
    covariance = np.diag([spread.parameter**2] * (width - 1) + [spread.pace**2])
    chosen: list[int] = []
    for _ in range(min(number, len(slopes))):
        gains = []
        for place, each in enumerate(slopes):
            noise = _one_group(len(each), spread, np)
            sure = np.linalg.slogdet(noise)[1]
            doubtful = np.linalg.slogdet(noise + each @ covariance @ each.T)[1]
            gains.append(-math.inf if place in chosen else float(doubtful - sure))
        best = max(range(len(gains)), key=gains.__getitem__)
        chosen.append(best)
        seen = slopes[best]
        inner = seen @ covariance @ seen.T + _one_group(len(seen), spread, np)
        covariance = covariance - covariance @ seen.T @ np.linalg.solve(inner, seen @ covariance)
    return chosen


def slopes_of(observations: Sequence[Observation], names: Sequence[str]) -> Any:
    """Return the derivatives of the observations' logarithms at the shipped values, with the pace in the last
    column."""
    import numpy as np

    every = (*names, PACE)
    theta = np.zeros(len(every))
    return _slopes(observations, every, theta, _errors(observations, every, theta, np), np)


def _one_group(size: int, spread: Spread, np: Any) -> Any:
    return spread.noise**2 * np.eye(size) + spread.group**2


def _errors(observations: Sequence[Observation], names: Sequence[str], theta: Any, np: Any) -> Any:
    factors = {name: math.exp(float(value)) for name, value in zip(names, theta, strict=True)}
    return np.array([math.log(one.seconds_of(factors) / one.measured_s) for one in observations])


def _slopes(observations: Sequence[Observation], names: Sequence[str], theta: Any, errors: Any, np: Any) -> Any:
    columns = []
    for place in range(len(names)):
        moved = theta.copy()
        moved[place] += STEP
        columns.append((_errors(observations, names, moved, np) - errors) / STEP)
    return np.stack(columns, axis=1)


# Measured steps as observations: on GPUs through the planner's efficiencies, on a CPU through the parts of a step.


EFFICIENCIES = tuple(Efficiency().as_dict())
PARTS = ("forward", "backward", "exposed_comm", "optimizer", "other")
"""Parts of a step on a CPU that a probe predicts."""
RATES = (
    *("matmul", "matmul_fp8", "matmul_fp4", "memory"),
    *("link_nvswitch", "link_mesh", "link_pcie", "nic"),
)
TIMES = (
    *("kernel_s", "launch_s", "collective_latency_s", "hop_latency_s", "step_s", "step_graphed_s"),
    *("exponentials", "issue"),
)
"""Efficiencies that together set the pace: dividing these rates, and multiplying these times, by a number multiplies
the step time by the same number. The other efficiencies are relative to them."""
GPU_SPREAD = Spread(parameter=0.1, pace=0.08, group=0.09, noise=0.05)
"""With these deviations, 91% of the sources that were not used for the fit lie within their 90% intervals
(tests/bench/calibration.py)."""
CPU_SPREAD = Spread(parameter=0.3, pace=0.3, group=0.05, noise=0.05)
"""Predicted CPU steps are assumed to be off by a third because of other load; runs with the same layout differ by
5%."""
LEAST_SHARE = 0.02
"""Parts that take less than this fraction of a step are treated as noise and ignored."""
LARGEST = 0.98


def efficiency_with(factors: Mapping[str, float], start: Efficiency) -> Efficiency:
    """Return `start` with its parameters multiplied by their factors, and the step time by the pace."""
    values = start.as_dict()
    pace = factors.get(PACE, 1.0)
    for name in values:
        value = values[name] * factors.get(name, 1.0)
        values[name] = min(value, max(LARGEST, values[name])) if name in FRACTIONS else value
    for name in RATES:
        values[name] /= pace
    for name in TIMES:
        values[name] *= pace
    return Efficiency(**values)


def of_setup(setup: Setup, measured_s: float, group: str, start: Efficiency) -> Observation:
    """Return the observation of a full step on GPUs."""
    return Observation(lambda factors: estimate_step(setup, efficiency_with(factors, start)).total_s, measured_s, group)


def of_rows(predictions: Sequence[Prediction], start: Efficiency) -> list[Observation]:
    """Return the observations of a table's measured rows; rows of one model and format form a group."""
    return [
        of_setup(run.setup, run.measured_step_time_s, f"{run.row.get('model')} {run.setup.matmul}", start)
        for run in predictions
        if run.judged and run.setup and run.measured_step_time_s
    ]


def of_parts(predicted: LocalPrediction, measured: Mapping[str, float] | None, group: str) -> list[Observation]:
    """Return the observations of a step's parts on a CPU; without `measured`, the predicted ones."""
    found = []
    whole_s = predicted.step_time_s
    for part in PARTS:
        own_s = predicted.time_s.get(part, 0.0)
        took_s = own_s if measured is None else measured.get(part, 0.0)
        if own_s > LEAST_SHARE * whole_s and took_s > 0:
            found.append(Observation(partial(_paced, part, own_s), took_s, group))
    return found


def _paced(part: str, seconds: float, factors: Mapping[str, float]) -> float:
    return seconds * factors.get(part, 1.0) * factors.get(PACE, 1.0)


def calibrated(predicted: LocalPrediction, factors: Mapping[str, float]) -> LocalPrediction:
    """Return the prediction with its parts corrected by this machine's measurements."""
    parts = {part: _paced(part, seconds, factors) for part, seconds in predicted.time_s.items()}
    return replace(predicted, time_s=parts)
