"""The verdicts on a run as a page, and as a section of the run's page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trainspec_cli.core.units import format_seconds
from trainspec_cli.recipe.results.verdict import RunVerdict, WhatIf
from trainspec_cli.report.collect import Report
from trainspec_cli.report.page.parts import (
    PageOrigin,
    heading,
    note,
    number_row,
    origin_line,
    plain_list,
    render_page,
    section,
    shorten,
    table,
)
from trainspec_cli.report.run_lines import standing_of, title_of
from trainspec_cli.report.verdicts import NO_VERDICTS, describe_verdict

MOST_VERDICTS = 40
MOST_CHARACTERS = 4000
"""The stack of a rank that hangs is shorter."""
FOOTER = "Diagnosed by trainspec. What a cause costs is what a step takes longer while it lasts."


def render_verdicts_page(report: Report, origin: PageOrigin | None = None) -> str:
    title = f"Diagnosis of {title_of(report)}"
    body = heading(title, standing_of(report)) + origin_line(origin) + verdicts_section(report.verdicts)
    return render_page(title, body, FOOTER)


def verdicts_section(verdicts: Sequence[RunVerdict]) -> str:
    """Draw each verdict with its evidence and what to do, heaviest first."""
    left = len(verdicts) - MOST_VERDICTS
    text = "Heaviest first." if verdicts else f"{NO_VERDICTS[0].upper()}{NO_VERDICTS[1:]}."
    more = f" {left:,} lighter ones are left out." if left > 0 else ""
    return section("Diagnosis", text + more, "".join(map(_verdict, verdicts[:MOST_VERDICTS])))


def _verdict(verdict: RunVerdict) -> str:
    evidence = [shorten(sentence, MOST_CHARACTERS) for sentence in verdict.evidence]
    advice = f"What to do: {shorten(verdict.advice, MOST_CHARACTERS)}" if verdict.advice else ""
    parts = [
        f"<h3>{escape(describe_verdict(verdict))}</h3>",
        note(f"Line of code: {shorten(verdict.code, MOST_CHARACTERS)}") if verdict.code else "",
        plain_list(evidence) if evidence else "",
        _what_if(verdict.what_if) if verdict.what_if else "",
        note(advice),
    ]
    return "".join(parts)


def _what_if(changes: Sequence[WhatIf]) -> str:
    rows = [number_row((one.change, format_seconds(one.step_s), format_seconds(one.saved_s))) for one in changes]
    return table(("with", "#step", "#shorter by"), rows)
