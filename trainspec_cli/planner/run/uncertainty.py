"""Turn inputs that are known within a factor into an interval of what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainspec_cli.recipe.results.forecast import Interval


def within(value: float, factor: float) -> Interval:
    """`value`, nine times in ten no further off than `factor` either way."""
    return Interval(value, value / factor, value * factor)


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def propagate(result: Callable[[Mapping[str, float]], float], inputs: Mapping[str, Interval]) -> Interval:
    """The interval of a positive `result` whose inputs err independently.

    Each input goes to its bounds while the others stay; the logarithms of the changes add in quadrature. Exact for
    products of log-normal factors, first order for the rest.
    """
    middle = {name: interval.value for name, interval in inputs.items()}
    value = result(middle)
    if value <= 0:
        return exact(value)
    down = up = 0.0
    for name, interval in inputs.items():
        ends = [result({**middle, name: end}) / value for end in (interval.low, interval.high)]
        changes = [math.log(end) for end in ends if end > 0]
        down += min(0.0, *changes, 0.0) ** 2
        up += max(0.0, *changes, 0.0) ** 2
    return Interval(value, value * math.exp(-math.sqrt(down)), value * math.exp(math.sqrt(up)))
