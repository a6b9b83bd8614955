"""A certificate for people: one line a clause, then what was broken."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.report.rich_text import Text


def render_certificate(body: dict[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "what it says"):
        table.add_column(name, no_wrap=name != "what it says")
    for name in ("cases", "failed", "worst", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for clause in body["clauses"]:
        if clause["cases"]:
            table.add_row(*_row(clause), style="red" if clause["failed"] else "")
    broken = [_describe_broken(finding) for finding in body["findings"] if not finding["passed"]]
    return Group(table, *([Text(), *broken] if broken else []), Text(), _verdict(body))


def _row(clause: dict[str, Any]) -> list[str]:
    figures = [_short(clause["worst"]), _short(clause["bound"])] if clause["bound"] is not None else ["exact", "exact"]
    if clause["failed"] and clause["bound"] is None:
        figures[0] = "differs"
    return [clause["id"], clause["level"], clause["title"], str(clause["cases"]), str(clause["failed"]), *figures]


def _short(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value < 0.1 else f"{float(value):.2f}"


def _describe_broken(finding: dict[str, Any]) -> Text:
    shown = {
        name: f"{figure:.2e}" if isinstance(figure, float) else figure for name, figure in finding["figures"].items()
    }
    figures = ", ".join(f"{name} {figure}" for name, figure in shown.items())
    return Text(f"{finding['clause']} broken by {finding['case']}: {figures}", style="red")


def _verdict(body: dict[str, Any]) -> Text:
    measured = [clause for clause in body["clauses"] if clause["cases"]]
    cases = sum(clause["cases"] for clause in measured)
    what = f"the training spec {body['spec_version']}" if body["whole"] else f"{len(measured)} clauses of the spec"
    words = f"{what}: {body['verdict']}, {cases} cases on {_place(body['machine'])}; digest {body['digest'][:16]}"
    return Text(words, style="bold red" if body["verdict"] == "broken" else "bold")


def _place(machine: dict[str, Any]) -> str:
    gpus = machine["gpu_names"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine['cpu_cores']} CPU cores"
