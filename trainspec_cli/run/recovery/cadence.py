"""The checkpoint interval: writing costs as much as the work that failures undo."""

from __future__ import annotations

import math

from trainspec_cli.recipe.field_types import LARGEST_WHOLE

AUTO_SHORTEST_S = 60.0
"""`auto` lets at least so much work go by before its first checkpoint, and between two: shorter runs write the last one
alone, and a restart takes longer anyway."""
MOST_LOST_S = 600.0
"""`auto` lets no more work than this go by between checkpoints that are cheap."""
MOST_WAITED = 0.05
"""`auto` writes so seldom that checkpoints hold training up for this fraction of the time, at most."""


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, first order: sqrt(2 C M) (Young 1974, doi:10.1145/361147.361115).

    `checkpoint_s` (C) is the time a checkpoint holds training up, `mtbf_s` (M) the mean time between failures of the
    whole job. Good while C is small beside M; at C = M/10 the loss is some 1% above the least.
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, higher order (Daly 2006, eq. 37, doi:10.1016/j.future.2004.11.016).

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C below C = 2 M, and M above it.
    """
    if math.isinf(mtbf_s):
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def checkpoint_interval_s(blocked_s: float, written_s: float, mtbf_s: float) -> float:
    """Return Daly's interval for the time that training waits (`blocked_s`), but at least a checkpoint's writing
    time."""
    return max(daly_interval_s(blocked_s, mtbf_s), written_s)


def auto_interval_s(blocked_s: float, written_s: float, mtbf_s: float) -> float:
    """Return the interval of `checkpoint.interval_steps: auto`: that of `checkpoint_interval_s`, but at least a minute
    and at most ten, as failures are not the only reason to end a run; twenty times `blocked_s` where that is longer, so
    that training waits for a twentieth of the time at most."""
    longest_s = max(MOST_LOST_S, blocked_s / MOST_WAITED)
    return max(min(daly_interval_s(blocked_s, mtbf_s), longest_s), written_s, AUTO_SHORTEST_S)


def checkpoint_interval_steps(interval_s: float, step_time_s: float) -> int:
    """Return the nearest whole number of steps, at least one; for an infinite interval, more than any run has.

    It is a number that a record may hold.
    """
    if math.isinf(interval_s):
        return LARGEST_WHOLE
    return max(1, round(interval_s / step_time_s))
