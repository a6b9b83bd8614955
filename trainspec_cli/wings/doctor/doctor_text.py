"""What the doctor found, for people."""

from __future__ import annotations

from collections.abc import Iterator

from trainspec_cli.recipe.results.doctor import Check, Diagnosis
from trainspec_cli.reporter.rich_text import Text

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}
NAME_WIDTH = 15


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
