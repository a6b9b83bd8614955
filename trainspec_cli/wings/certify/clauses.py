"""The clauses of SPEC.md, and how measured values determine whether a clause is met, and its grade.

`make_finding` derives a finding from its values, both when measuring and when verifying a certificate. A certificate
therefore cannot state anything that contradicts its values."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainspec_cli.recipe.results.certificate import NOT_FINITE, Figure, Finding
from trainspec_cli.wings.certify.cases import CLIP_NORM

SPEC = Path(__file__).with_name("SPEC.md")
_VERSION = re.compile(r"^# The training spec, version (\S+)$", re.MULTILINE)
_CLAUSE_TEXT = re.compile(r"^## (\S+) (MUST|SHOULD): (.+)\n\n((?:.+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Clause:
    id: str
    level: Literal["MUST", "SHOULD"]
    title: str
    text: str


@lru_cache
def spec_version() -> str:
    found = _VERSION.search(SPEC.read_text(encoding="utf-8"))
    assert found, "SPEC.md starts with its version"
    return found.group(1)


@lru_cache
def spec_sha256() -> str:
    return hashlib.sha256(SPEC.read_bytes()).hexdigest()


@lru_cache
def read_clauses() -> dict[str, Clause]:
    """Return the clauses by id, in document order."""
    found = _CLAUSE_TEXT.findall(SPEC.read_text(encoding="utf-8"))
    return {id: Clause(id, level, title, " ".join(text.split())) for id, level, title, text in found}


# Bounds

GRADIENT_BOUND = 1e-5
LOSS_BOUND = 1e-5
WHOLE_GRADIENT_BOUND = 1e-6
WEIGHT_BOUND = 1e-4
"""NUM-7 and NUM-8 apply these bounds to the combined error of all parameters."""
LIVE_BOUND = 1e-6
FORMAT_FACTOR = 2.0
"""Bound of NUM-3, as a multiple of the rounding error of the number format."""
EXCHANGE_BOUNDS = {"bf16": 4e-3, "int8": 2e-2, "int4": 2e-1}
"""COMM-1's bounds on the combined error of all parameters, by wire format."""
EXCHANGES = 64
"""Number of exchanges that COMM-2 averages over."""
WAITING = 8
"""In COMM-2, the maximum rounding error that has yet to be sent after all exchanges, relative to that of one
exchange."""

SECURITY = ("SEC-1", "SEC-2", "SEC-3", "SEC-4")
AS_THEY_MUST_BE = "as they must be"
FACTS = {
    "LIVE-1": ("steps", "layouts", "samples", "disk"),
    "LIVE-2": ("steps", "layouts", "samples", "disk"),
    "LIVE-3": ("steps", "starts", "layouts", "samples"),
    "LIVE-4": ("steps", "starts", "layouts"),
    "LIVE-5": ("steps", "starts", "micro-batches", "samples"),
}
"""Conditions that a run must meet for each live clause, in addition to its bounds."""
GRADES = ("A", "B", "C")


@dataclass(frozen=True)
class Levels:
    """The bounds of a measured value for the grades A, B and C."""

    figure: str
    bounds: tuple[float, float, float]
    rises: bool = False
    """True if higher is better."""

    def grade(self, value: float) -> str:
        """Return A, B or C; `-` if the value misses all bounds."""
        for grade, bound in zip(GRADES, self.bounds, strict=True):
            if (value >= bound) if self.rises else (value <= bound):
                return grade
        return "-"


LEVELS = {
    "PERF-1": Levels("ratio_to_plan", (1.15, 1.3, 1.6)),
    "PERF-2": Levels("efficiency", (0.9, 0.75, 0.5), rises=True),
    "PERF-3": Levels("all_reduce_gb_per_s", (100.0, 10.0, 1.0), rises=True),
    "PERF-4": Levels("recovery_s", (30.0, 120.0, 600.0)),
    "PERF-5": Levels("slower_gb_per_s", (1.0, 0.25, 0.05), rises=True),
}
"""The graded clauses, with the bounds stated in the training spec."""

_FORMAT = re.compile(r"-(bf16|int8|int4)_gradients(?:-|$)")
_EXCHANGES = re.compile(r"-(\d+)-exchanges(?:-|$)")
_PROCESSES = re.compile(r"^(\d+)-processes$")


def make_finding(clause: str, case: str, figures: Mapping[str, Figure], *, of_engine: bool = False) -> Finding:
    """Return the finding that follows from the measured values. The value compared with the bound comes first.

    Values that follow from others are always computed, even if `figures` contains them. A missing value breaks the
    clause. `of_engine`: whether another engine was measured, whose protocol reports fewer values."""
    numbers = _Numbers(figures)
    finding = Finding(clause, case, passed=False, figures=dict(figures))
    if clause in LEVELS:
        levels = LEVELS[clause]
        if clause == "PERF-1":
            ratio = _divide(numbers["step_s"], numbers["planned_s"])
            value = max(ratio, _divide(numbers["planned_s"], numbers["step_s"]))
        elif clause == "PERF-2":
            processes = _PROCESSES.match(case)
            alone = numbers["alone_per_s"] * (int(processes.group(1)) if processes else math.nan)
            value = _divide(numbers["together_per_s"], alone)
        elif clause == "PERF-5":
            value = min(numbers["write_gb_per_s"], numbers["read_gb_per_s"])
        else:
            value = numbers[levels.figure]
        # A missing value gets the worst grade, even if higher is better.
        value = value if math.isfinite(value) or not levels.rises else 0.0
        grade = levels.grade(value)
        ordered = {levels.figure: value, **{name: one for name, one in figures.items() if name != levels.figure}}
        return replace(finding, passed=grade != "-", figures=ordered, bound=levels.bounds[-1], grade=grade)
    if clause in ("NUM-1", "NUM-4", "NUM-5", "KERN-1"):
        return _bounded(finding, "worst_gradient_error", numbers["worst_gradient_error"], GRADIENT_BOUND)
    if clause == "NUM-2":
        # Every later step must clip. Otherwise, clipping by the norm of only one part of the gradient might not show.
        clipped = of_engine or CLIP_NORM < numbers["least_clipped_norm"] < math.inf
        return _bounded(finding, "worst_loss_error", numbers["worst_loss_error"], LOSS_BOUND, kept=clipped)
    if clause == "CKPT-2":
        return _bounded(finding, "worst_loss_error", numbers["worst_loss_error"], LOSS_BOUND)
    if clause == "NUM-3":
        ratio = _divide(numbers["error"], numbers["error_of_the_format"])
        return _bounded(finding, "worst_ratio", ratio, FORMAT_FACTOR)
    if clause in ("NUM-7", "NUM-8", "KERN-2"):
        bounds = {"worst_loss_error": LOSS_BOUND, "weight_error": WEIGHT_BOUND}
        bounds |= {"gradient_error": WHOLE_GRADIENT_BOUND} if clause == "NUM-7" else {}
        worst = max(numbers[name] / bound for name, bound in bounds.items())
        kept = clause != "NUM-8" or figures.get("samples") == "each once"
        return _bounded(finding, "worst_of_bound", worst, 1.0, kept=kept)
    if clause in ("COMM-1", "COMM-2"):
        # The case's name states the format and the number of exchanges. Without a format in the name, no bound is met.
        form = _FORMAT.search(case)
        exchanges = _EXCHANGES.search(case)
        count = int(exchanges.group(1)) if exchanges else 1
        allowed = EXCHANGE_BOUNDS[form.group(1)] * min(1.0, WAITING / count) if form and count else math.nan
        return _bounded(finding, "worst_of_bound", numbers["gradient_error"] / allowed, 1.0)
    facts = all(figures.get(name) == AS_THEY_MUST_BE for name in FACTS.get(clause, ()))
    if clause in ("LIVE-1", "LIVE-2", "LIVE-5"):
        worst = max(numbers[name] for name in ("worst_loss_error", "gradient_error", "weight_error"))
        return _bounded(finding, "worst_error", worst, LIVE_BOUND, kept=facts)
    # The other clauses have no tolerance.
    if clause == "LEGAL-1":
        kept = all(figures.get(name) for name in ("reason", "hint"))
    elif clause == "SEC-1":
        kept = 0 < numbers["listening"] < math.inf and figures.get("beyond") == "none"
    elif clause == "SEC-3":
        kept = numbers["open"] == 0
    elif clause == "SEC-4":
        kept = all(figures.get(name) == "refused" for name in ("certificate", "checkpoint", "plan"))
    else:
        other = "beside" if of_engine else {"NUM-6": "again", "SEC-2": "left_alone"}.get(clause, "resumed")
        other = "undisturbed" if clause.startswith("LIVE") else other
        kept = figures.get("sha256") == figures.get(other) and figures.get("sha256") not in (None, "", "None")
        if clause == "SEC-2":
            quiet = (figures.get("ended"), figures.get("their_code")) == ("well", "was not run")
            kept = kept and quiet and 0 < numbers["ports"] < math.inf
        elif clause != "NUM-6" or of_engine:
            kept = kept and numbers["worst_loss_error"] == 0
    return replace(finding, passed=facts and kept)


class _Numbers:
    """Access to measured values as numbers. A missing or non-numeric value is infinite."""

    def __init__(self, figures: Mapping[str, Figure]):
        self._figures = figures

    def __getitem__(self, name: str) -> float:
        value = self._figures.get(name)
        number = float(value) if isinstance(value, (int, float)) or value in NOT_FINITE else math.inf
        return math.inf if math.isnan(number) else number


def _bounded(finding: Finding, name: str, value: float, bound: float, *, kept: bool = True) -> Finding:
    """Return the finding with `value` first, compared with the bound. `kept`: whether all other conditions are met."""
    others = {other: figure for other, figure in finding.figures.items() if other != name}
    passed = kept and math.isfinite(value) and value <= bound
    return replace(finding, passed=passed, figures={name: value, **others}, bound=bound)


def _divide(value: float, by: float) -> float:
    """Return the quotient; infinite if it is undefined."""
    quotient = value / by if by and not math.isinf(by) else math.inf
    return math.inf if math.isnan(quotient) else quotient
