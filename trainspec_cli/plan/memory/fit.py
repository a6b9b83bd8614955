"""The probability that a layout fits, by the error of the memory model, and the step time to expect with that in it.

On published runs the measured peak over the predicted one is about log-normal (`trainspec backtest`, 135 measured peaks
of 3 sources; tests/plan/validation/test_fit_probability.py counts it again). A run of yet another source errs by its
source's mean and by its own deviation from that: ln(measured / predicted) has the mean of the sources' means, m, and
the variance of a run within its source plus that between sources, s^2. So a predicted peak M fits a limit L with

    P = Phi((ln(L / M) - m) / s)

A layout that does not fit costs a start in vain, and goes on with less memory: with recomputation, which is a forward
more, or another layout that is about as much slower. The expected step is

    E = t + (1 - P) (t / 3 + start / steps)
"""

from __future__ import annotations

import math

LOG_BIAS = -0.038
"""m: predictions are 4% too high in the mean, since the model keeps a reserve."""
LOG_DEVIATION = 0.043
"""s: 0.037 within a source, 0.021 between them."""
RELIEF = 1 / 3
"""The part of a step by which less memory makes it slower: a forward among two of a backward."""
SURELY = 0.999
"""A probability that needs no other layout beside it."""


def fit_probability(peak_bytes: float, limit_bytes: float) -> float:
    """Return the probability that what is predicted to take `peak_bytes` takes no more than `limit_bytes`."""
    deviations = (math.log(limit_bytes / peak_bytes) - LOG_BIAS) / LOG_DEVIATION
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def expected_step_s(step_s: float, probability: float, start_s: float) -> float:
    """Return the step to expect of a layout that fits with `probability`; `start_s` is a start's time over the steps of
    the run."""
    return step_s + (1 - probability) * (step_s * RELIEF + start_s)
