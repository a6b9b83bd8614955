"""Hold the claims of tests/data/claims.yaml against plans, simulations and measured figures, and write docs/claims.md.

`python tests/bench/claims.py` prints the page, `--write` writes it. Plans are made anew, so that it takes some minutes.
"""

from __future__ import annotations

import argparse
import ast
import csv
import operator
import re
import statistics
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.bench.published_goodput import compare_runs
from trainspec_cli.planner.run.forecast import JOULES_PER_KWH
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.plan.labels import PlanReport, format_money
from trainspec_cli.session.planning.plan import plan_recipe, require_fit

ROOT = Path(__file__).parents[2]
CLAIMS = ROOT / "tests/data/claims.yaml"
PAGE = ROOT / "docs/claims.md"
RUNS = ROOT / "tests/data/measured/throughput.csv"
TUNING = ("layout", "batching", "recompute", "offload", "comm", "kernels", "checkpoint")
"""Sections and keys of a recipe that somebody tunes for speed."""
OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SHOWS: Mapping[str, Callable[[float], str]] = {
    "percent": lambda value: f"{100 * value:.1f}%",
    "hours": lambda value: f"{value:.1f} h",
    "weeks": lambda value: f"{value:.1f} weeks",
    "days": lambda value: f"{value:.0f} days",
    "money": format_money,
    "number": lambda value: f"{value:,.0f}",
}
INTRODUCTION = """\
# Claims compared with figures

Claims that circulate about training specs, launchers and schedulers, compared with figures from trainspec.
`python tests/bench/claims.py --write` recomputes the plans and writes this page from `tests/data/claims.yaml`. Each
figure is followed by its origin and, if it is decisive, by whether it meets the claim (yes or no).

Figures are *planned* or, with failures and restarts, *simulated* for GPUs, *measured* on two CPU cores
([benchmarks](benchmarks.md)), *published* by others, or *counted* in this version. Nothing here was trained on a GPU,
and plans that differ by less than x1.39 cannot be distinguished ([accuracy](planning.md#how-accurate-it-is)).

The verdicts:

"""
ABOUT_GOODPUT = """\
## Published goodput, simulated

`python tests/bench/published_goodput.py` simulates published runs with the rates that each source reports, or otherwise
trainspec's within their bounds (sources: `tests/data/measured/goodput.yaml`). Nothing is fitted. Simulated minus
published goodput, in points (0: a published lower bound is met):

"""
ABOUT_OTHERS = """\
The other runs show effects that the simulation omits: fewer failures than Llama 3's, lost hours without a recorded
failure, and waiting for people.
"""
VERDICTS = ("holds", "partly holds", "does not hold", "undecided")


@dataclass(frozen=True)
class Figure:
    of: str
    how: str
    """Measured, simulated, planned, published or counted."""
    value: float
    shown: str
    holds: bool | None
    """None where the claim is not decided by it."""


@dataclass(frozen=True)
class Claim:
    name: str
    figures: tuple[Figure, ...]
    assumes: str
    reason: str

    @property
    def verdict(self) -> str:
        """All figures that decide keep what is claimed, some of them, or none; or there is none that decides."""
        deciding = [figure.holds for figure in self.figures if figure.holds is not None]
        if not deciding:
            return "undecided"
        return "holds" if all(deciding) else "partly holds" if any(deciding) else "does not hold"


class Values:
    """What names in expressions stand for: `plan.quantity`, `measured.name`, `published.name` and `recipe.name`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.plans: dict[str, PlanReport] = {}

    def find(self, room: str, name: str) -> float:
        if room == "measured":
            return read_measured(**self.given["measured"][name])
        if room == "published":
            return summarise_published(**self.given["published"][name])
        if room == "recipe":
            return float(count_keys()[name])
        if room not in self.plans:
            self.plans[room] = plan_recipe(self.given["plans"][room].split())
        return QUANTITIES[name](self.plans[room])


def evaluate(expression: str, find: Callable[[str, str], float]) -> float:
    """Return the value of sums, differences, products and quotients of numbers and names such as `plan.mfu`."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Attribute(value=ast.Name(id=room), attr=name):
                return find(room, name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"`{ast.unparse(node)}` of `{expression}` is not a number, name or sum")

    return value(ast.parse(expression, mode="eval").body)


def _run(plan: PlanReport) -> Any:
    require_fit(plan)
    return plan.run


def _electricity(plan: PlanReport) -> float:
    site = plan.spec.cluster.site
    return float(_run(plan).energy_joules.value / JOULES_PER_KWH * site.electricity_usd_per_kwh)


QUANTITIES: Mapping[str, Callable[[PlanReport], float]] = {
    "tokens_per_s": lambda plan: require_fit(plan).tokens_per_s,
    "mfu": lambda plan: require_fit(plan).mfu,
    "considered": lambda plan: float(plan.capacity.considered),
    "wall_s": lambda plan: float(_run(plan).wall_time_s.value),
    "goodput": lambda plan: float(_run(plan).goodput.goodput.value),
    "cost_usd": lambda plan: float(_run(plan).cost_usd.value),
    "electricity_usd": _electricity,
}
"""Of a plan's best layout."""
WHOLE_RUN = ("wall_s", "goodput", "cost_usd", "electricity_usd")
"""Quantities that rest on a simulation of failures."""
ORIGINS: Mapping[str, str] = {"measured": "measured", "published": "published", "recipe": "counted"}
"""How the names of a room were found, other than by a plan."""


def read_measured(file: str, pattern: str) -> float:
    """Return the number that the pattern's group finds in a page. Raises ValueError where it is not there once."""
    found = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))
    if len(found) != 1:
        raise ValueError(f"{file} has {len(found)} places like {pattern}, and one is needed")
    return float(found[0])


def summarise_published(column: str, where: Mapping[str, str], statistic: str) -> float:
    """Return the median or the largest of a column, of the published runs that state it."""
    with RUNS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in where.items())]
    values = [float(row[column]) for row in rows if row[column]]
    return {"median": statistics.median, "max": max}[statistic](values)


@cache
def count_keys() -> dict[str, int]:
    """Count the keys of a recipe, those that take `auto`, and the same of those that are tuned for speed."""
    keys = list(_keys(RunSpec))
    tuned = [takes for path, takes in keys if path.split(".")[0] in TUNING]
    return {
        "keys": len(keys),
        "auto_keys": sum(takes for _, takes in keys),
        "tuning_keys": len(tuned),
        "auto_tuning_keys": sum(tuned),
    }


def _keys(spec: type, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the path of each key of a section, and whether it takes `auto`."""
    hints = typing.get_type_hints(spec)
    for field in fields(spec):
        inner = [part for part in (hints[field.name], *typing.get_args(hints[field.name])) if is_dataclass(part)]
        if inner:
            for section in inner:
                yield from _keys(typing.cast(type, section), f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", _takes_auto(hints[field.name])


def _takes_auto(hint: Any) -> bool:
    return hint == AUTO or any(map(_takes_auto, typing.get_args(hint)))


def judge_claims(given: Mapping[str, Any]) -> list[Claim]:
    values = Values(given)
    return [_judge(entry, values) for entry in given["claims"]]


def _judge(entry: Mapping[str, Any], values: Values) -> Claim:
    figures = tuple(_figure(figure, entry["claimed"], values.find) for figure in entry["figures"])
    return Claim(entry["name"], figures, entry["assumes"].strip(), entry["reason"].strip())


def _figure(figure: Mapping[str, Any], claimed: Mapping[str, Any], find: Callable[[str, str], float]) -> Figure:
    origins = dict[str, None]()

    def note(room: str, name: str) -> float:
        planned = "simulated" if name in WHOLE_RUN else "planned"
        origins[ORIGINS.get(room, planned)] = None
        return find(room, name)

    value = evaluate(figure["value"], note)
    how = " and ".join(origins)
    shown = SHOWS[figure.get("show", claimed["show"])](value)
    if not figure.get("decides", True):
        return Figure(figure["of"], how, value, shown, None)
    low, high = (claimed.get(name) for name in ("at_least", "at_most"))
    holds = (low is None or value >= float(low)) and (high is None or value <= float(high))
    return Figure(figure["of"], how, value, shown, holds)


def render(claims: list[Claim]) -> str:
    lines = INTRODUCTION.splitlines()
    for verdict in VERDICTS:
        if names := [claim.name for claim in claims if claim.verdict == verdict]:
            lines.append(f"- {verdict}: {'; '.join(names)}")
    lines.append("")
    for claim in claims:
        lines += _section(claim)
    return "\n".join([*lines, *_goodput_section(), ""])


def _section(claim: Claim) -> list[str]:
    marks = {True: "; yes", False: "; no", None: ""}
    return [
        f"## {claim.name}",
        "",
        f"**{claim.verdict[0].upper()}{claim.verdict[1:]}.** {_flat(claim.reason)}",
        "",
        *(f"- {figure.of}: {figure.shown}, {figure.how}{marks[figure.holds]}" for figure in claim.figures),
        "",
        f"*Assumed:* {_flat(claim.assumes)}",
        "",
    ]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _goodput_section() -> list[str]:
    """Return the lines that compare published goodput with a simulation at the published rates."""
    runs = [f"{100 * run.difference:+.1f} for {run.name}".replace("+0.0", "0") for run in compare_runs()]
    return [*ABOUT_GOODPUT.splitlines(), f"{', '.join(runs)}.", "", *ABOUT_OTHERS.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/claims.md")
    page = render(judge_claims(yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))))
    if parser.parse_args().write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
