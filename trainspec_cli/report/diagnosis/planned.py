"""A run that nothing disturbs: what bounds its steps, and what would help most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from trainspec_cli.core.units import format_seconds
from trainspec_cli.recipe.results.verdict import RunVerdict, WhatIf
from trainspec_cli.report.diagnosis.evidence import COMPUTE_PARTS, RunEvidence
from trainspec_cli.report.diagnosis.outlook import WAITING, Outlook, PlannedChange

LEAST_SAVED = 0.02
"""Changes that save less than this part of a step are not named."""
COMPUTING, EXCHANGES = "computing", "exchanges between ranks"
FASTER = "twice the device's speed"
BOUNDS = {
    "exposed_comm": EXCHANGES,
    WAITING: "waiting for late ranks",
    "data_wait": "data",
    "checkpoint": "checkpoints",
    "other": "the host between the passes",
}
"""The bound of a step in the parts that neither passes nor the optimizer take."""
ALWAYS = (
    PlannedChange("no waiting for data", {"data_wait": 0.0}),
    PlannedChange("ranks that are never late", {WAITING: 0.0}),
)
UNPLANNED = (
    PlannedChange(FASTER, dict.fromkeys((*COMPUTE_PARTS, WAITING), 0.5)),
    PlannedChange("exchanges in half the time", {"exposed_comm": 0.5}),
)
"""Bounds by the measured parts alone, which do not say whether bandwidth or latency makes an exchange long."""


def as_planned(evidence: RunEvidence, outlook: Outlook) -> list[RunVerdict]:
    """Return what bounds the steps, and what each change would make of them.

    The measured parts of a step are scaled as the planner's own are by a change, so that an error of its predictions
    that all parts have in common does not count.
    """
    # The rank that waits least in exchanges shows the transfer itself; the rest is waiting for late ranks. The rank
    # that waits most for data holds up the others, so part of their waiting is for data.
    means = {name: float(np.mean(series)) for name, series in evidence.parts_s.items()}
    exposed_s, data_s = evidence.parts_s["exposed_comm"], evidence.parts_s["data_wait"]
    transfer_s = min(means["exposed_comm"], float(np.median(exposed_s.min(axis=1))))
    waiting_s = means["exposed_comm"] - transfer_s
    for_data_s = min(waiting_s, float(np.mean(data_s.max(axis=1))) - means["data_wait"])
    parts_s = means | {
        "exposed_comm": transfer_s,
        WAITING: waiting_s - for_data_s,
        "data_wait": means["data_wait"] + for_data_s,
    }
    step_s = sum(parts_s.values())
    if step_s <= 0:
        return []
    bounds = dict(_bounds(parts_s, outlook))
    bound = max(bounds, key=lambda name: bounds[name])
    planned_s = sum(evidence.planned_s.values())
    beside = f"; {format_seconds(planned_s)} were planned" if planned_s else ""
    shares = ", ".join(f"{seconds / step_s:.0%} {name}" for name, seconds in bounds.items() if seconds >= 0.01 * step_s)
    what_if = _what_if(parts_s, (*(outlook.changes if outlook.is_known else UNPLANNED), *ALWAYS))
    return [
        RunVerdict(
            cause="as_planned",
            since_step=int(evidence.steps[0]),
            confidence=0.9,
            evidence=(f"a step takes {format_seconds(step_s)}{beside}; bound by {bound}: {shares}", outlook.basis),
            advice=f"{what_if[0].change} would help most" if what_if else "no change would save 2% of a step",
            what_if=what_if,
        )
    ]


def _bounds(parts_s: Mapping[str, float], outlook: Outlook) -> Iterator[tuple[str, float]]:
    """Yield (what bounds a step, for how many seconds of it)."""
    computed_s = sum(parts_s[name] for name in COMPUTE_PARTS)
    shares = dict(outlook.shares) if outlook.is_known else {COMPUTING: 1.0}
    exchanged_s = shares.pop(EXCHANGES, 0.0) * computed_s  # a GPU's parts do not show it apart
    for name, share in shares.items():
        yield name, share * computed_s
    for part, name in BOUNDS.items():
        yield name, parts_s[part] + exchanged_s * (name == EXCHANGES)


def _what_if(parts_s: Mapping[str, float], changes: tuple[PlannedChange, ...]) -> tuple[WhatIf, ...]:
    """Return the changes that are worth it, best first."""
    step_s = sum(parts_s.values())
    found = []
    for one in changes:
        changed_s = sum(seconds * one.factors.get(part, 1.0) for part, seconds in parts_s.items())
        if step_s - changed_s >= LEAST_SAVED * step_s:
            found.append(WhatIf(one.change, changed_s, step_s - changed_s))
    return tuple(sorted(found, key=lambda one: -one.saved_s))
