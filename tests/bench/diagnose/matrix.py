"""The confusion matrix of the results, as a table for the docs, and what else the bench is judged by."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .cases import HANG, HEALTHY, MECHANISMS, TEN
from .judge import AS_PLANNED, NOISE

Result = Mapping[str, Any]
LENGTHENING = [
    name for name, about in MECHANISMS.items() if not about.from_start and name not in ("leak", HANG, "burst")
]
LEAST = 0.15
"""By which an injection must lengthen the median step, or it has hardly taken place."""
NEAR = 0.2
"""The target for the steps that are left before memory runs out."""


def render(results: Sequence[Result]) -> str:
    """Return the matrix, the misses, and the figures."""
    judged = [result for result in results if "exact" in result]
    failed = [result for result in results if "error" in result]
    parts = [render_matrix(judged), *figures(judged)]
    if failed:
        parts.append(f"not run: {len(failed)} cases")
    return "\n".join(parts)


def render_matrix(results: Sequence[Result]) -> str:
    """Return a row for each mechanism, and a column for each cause that was named first."""
    rows = [name for name in (*MECHANISMS, HEALTHY) if any(_name(result) == name for result in results)]
    causes = dict.fromkeys(result["cause"] for result in results if _name(result) in rows)
    known = dict.fromkeys([*(about.cause for about in MECHANISMS.values()), AS_PLANNED, *causes])
    columns = [cause for cause in known if cause in causes]
    lines = [_line("injected", "cause", "cases", *columns, "exact"), _line(*["---"] * (len(columns) + 4))]
    for row in rows:
        of_row = [result for result in results if _name(result) == row]
        counts = Counter(result["cause"] for result in of_row)
        cause = MECHANISMS[row].cause if row in MECHANISMS else AS_PLANNED
        cells = [str(counts[column] or "") for column in columns]
        exact = sum(result["exact"] for result in of_row)
        lines.append(_line(row, cause, str(len(of_row)), *cells, f"{exact / len(of_row):.0%}"))
    return "\n".join(lines)


def figures(results: Sequence[Result]) -> Iterable[str]:
    """Yield a line for each figure that has a target."""
    groups = {
        "ten causes, cause and place exact": [result for result in results if _name(result) in TEN],
        "all single injections, exact": [result for result in results if _name(result) in MECHANISMS],
        "two at once, both named": [result for result in results if "+" in _name(result)],
    }
    for label, group in groups.items():
        if group:
            exact = sum(result["exact"] for result in group)
            yield f"{label}: {exact} of {len(group)} ({exact / len(group):.1%})"
    acted = [result for result in groups["all single injections, exact"] if result["case"]["name"] in LENGTHENING]
    if weak := [result for result in acted if not _lengthened(result)]:
        exact, felt = sum(result["exact"] for result in acted if _lengthened(result)), len(acted) - len(weak)
        yield (
            f"injections that are to lengthen steps and did so by less than {LEAST:.0%}: {len(weak)} of {len(acted)}, "
            f"on a machine with much other load; of the others {exact} of {felt} are exact"
        )
    if healthy := [result for result in results if _name(result) == HEALTHY]:
        alarms = [result["cause"] for result in healthy if not result["exact"]]
        noise = alarms.count(NOISE)
        yield f"healthy runs: {len(healthy)}, alarms {len(alarms)}, of which {noise} say noise"
    if leaks := [result for result in results if "exhausted_at" in result]:
        near = sum(_is_near(result) for result in leaks)
        yield f"leaks: {near} of {len(leaks)} told the step at which memory runs out within {NEAR:.0%}"
    if after_s := [result["named_after_s"] for result in results if _name(result) == HANG and result["exact"]]:
        yield f"seconds until a hang is named: median {statistics.median(after_s):g}, at most {max(after_s)}"
    if after := [result["named_after"] for result in results if _counts_steps(result)]:
        yield f"steps until named: median {statistics.median(after):g}, at most {max(after)}, of {len(after)}"
    if errors := [result["since_error"] for result in results if result.get("since_error") is not None]:
        apart = statistics.median(abs(error) for error in errors)
        yield f"since_step: median {apart:g} steps from the first disturbed, of {len(errors)}"
    extra, earlier = (sum(result[name] for result in results) for name in ("extra", "earlier"))
    yield f"of {len(results)} cases: {extra} verdicts beside the right ones, {earlier} on steps before the injection"


def misses(results: Iterable[Result]) -> Iterable[str]:
    """Yield a line for each case that was not judged exact."""
    for result in results:
        if result.get("exact"):
            continue
        case = result["case"]
        shape = f"{case['nodes']} x {case['ranks_per_node']} ranks, {case['stages']} stages"
        injected = "; ".join(_describe(injection) for injection in case["injections"])
        yield f"{result['key']} ({shape}; {injected}): {result.get('error') or result['verdicts']}"


def _describe(injection: Mapping[str, Any]) -> str:
    told = [(name, value) for name, value in injection.items() if value is not None]
    return ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in told)


def _lengthened(result: Result) -> bool:
    return float(result["after_s"] or 0.0) >= (1 + LEAST) * float(result["before_s"] or 0.0)


def _is_near(result: Result) -> bool:
    """Return whether the steps that are left were told rightly."""
    left = result["exhausted_at"] - result["asked_at"]
    told = result["exhaustion_told"]
    return told is not None and abs(told - result["exhausted_at"]) <= NEAR * left


def _counts_steps(result: Result) -> bool:
    """Return whether the result has steps from the injection to the right verdict; in a hang there are none."""
    return result.get("named_after") is not None and _name(result) != HANG


def _name(result: Result) -> str:
    return str(result["case"]["name"])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
