"""Findings for people: a certificate, one line a clause and then what was broken; and what the doctor found."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.reporter.rich_text import Text
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, ClauseSummary, Figure, Finding
from trainspec_cli.spec.results.doctor import Check, Diagnosis

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}
NAME_WIDTH = 15


def render_certificate(certificate: Certificate) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "what it says"):
        table.add_column(name, no_wrap=name != "what it says")
    for name in ("cases", "failed", "worst", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for clause in certificate.clauses:
        if clause.cases:
            table.add_row(*_row(clause), style="red" if clause.failed else "")
    broken = [_describe_broken(finding) for finding in certificate.findings if not finding.passed]
    return Group(table, *([Text(), *broken] if broken else []), Text(), _verdict(certificate))


def _row(clause: ClauseSummary) -> list[str]:
    if clause.bound is not None and clause.worst is not None:
        figures = [_short(clause.worst), _short(clause.bound)]
    else:
        figures = ["differs" if clause.failed else "exact", "exact"]
    return [clause.id, clause.level, clause.title, str(clause.cases), str(clause.failed), *figures]


def _short(value: Figure) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value < 0.1 else f"{float(value):.2f}"


def _describe_broken(finding: Finding) -> Text:
    shown = {name: f"{figure:.2e}" if isinstance(figure, float) else figure for name, figure in finding.figures.items()}
    figures = ", ".join(f"{name} {figure}" for name, figure in shown.items())
    return Text(f"{finding.clause} broken by {finding.case}: {figures}", style="red")


def _verdict(found: Certificate) -> Text:
    measured = [clause for clause in found.clauses if clause.cases]
    cases = sum(clause.cases for clause in measured)
    what = f"the training spec {found.spec_version}" if found.whole else f"{len(measured)} clauses of the spec"
    words = f"{what}: {found.verdict}, {cases} cases on {_place(found.machine)}; digest {found.digest[:16]}"
    return Text(words, style="bold red" if found.verdict == "broken" else "bold")


def _place(machine: Machine) -> str:
    gpus = machine.gpu_names
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.cpu_cores} CPU cores"


def render_diagnosis(diagnosis: Diagnosis) -> Text:
    text = Text()
    for report in diagnosis.hosts:
        text.append(f"{report.host}\n", style="bold")
        for check in report.checks:
            text.append_text(_check_line(check))
    if diagnosis.between:
        text.append("between the processes\n", style="bold")
        for check in diagnosis.between:
            text.append_text(_check_line(check))
    text.append("\n".join(_summary(diagnosis)))
    return text


def _check_line(check: Check) -> Text:
    mark, colour = MARKS[check.status]
    line = Text("  ").append(mark, style=colour).append(f"  {check.name:<{NAME_WIDTH}} {check.found}\n")
    if check.advice:
        line.append(f"        {'':<{NAME_WIDTH}} {check.advice}\n", style="dim")
    return line


def _summary(diagnosis: Diagnosis) -> Iterator[str]:
    nodes = len(diagnosis.hosts)
    checks = [check for report in diagnosis.hosts for check in report.checks] + list(diagnosis.between)
    count = {status: sum(check.status == status for check in checks) for status in MARKS}
    found = f"{count['ok']} ok, {count['warn']} to look at, {count['fail']} failed"
    yield f"{nodes} node{'s' if nodes > 1 else ''}: {found}"
    if diagnosis.slowest and nodes > 1:
        yield f"slowest node: {diagnosis.slowest}"
