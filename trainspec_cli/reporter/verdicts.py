"""Format verdicts on a run: one line for the live view, and the text for `diagnose` and `report`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trainspec_cli.core.printable import format_duration, format_seconds
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.collect import Report
from trainspec_cli.reporter.console import Text
from trainspec_cli.reporter.page.parts import (
    PageOrigin,
    heading,
    note,
    origin_line,
    plain_list,
    render_page,
    section,
    shorten,
    text_table,
)
from trainspec_cli.reporter.text import status_line, title_of
from trainspec_cli.run.folder.event_types.events import VerdictEvent

NO_VERDICTS = "too few steps for a diagnosis"
NO_VERDICTS_WITHOUT_PLAN = (
    "no hang, memory leak or twofold slowdown was detected; a command's steps reveal nothing else"
)


def describe_verdict(verdict: RunVerdict) -> str:
    """`slow device, rank 2, since step 120: 35 ms per step (93% sure)`."""
    places = []
    if verdict.rank is not None:
        places.append(f"rank {verdict.rank}")
    if verdict.node is not None:
        places.append(f"node {verdict.node}")
    if verdict.link is not None:
        places.append(f"link of ranks {', '.join(map(str, verdict.link))}")
    place = ", ".join(places)
    # Although no cause was found, the steps may take longer than planned.
    cause = "no single cause stands out" if verdict.cause == "as_planned" else verdict.cause.replace("_", " ")
    words = [cause, *([place] if place else []), f"since step {verdict.since_step}"]
    if verdict.until_step is not None:
        words[-1] = f"steps {verdict.since_step} to {verdict.until_step}"
    cost = f"{format_duration(verdict.cost_s)} per step, " if verdict.cost_s and verdict.cause != "hang" else ""
    full = f", memory runs out at about step {verdict.full_step:,}" if verdict.full_step is not None else ""
    return f"{', '.join(words)}: {cost}{verdict.confidence:.0%} sure{full}"


def describe_event(event: VerdictEvent) -> str:
    """Describe a verdict that was found, or that no longer holds, during a run."""
    verdict = event.verdict
    place = f", at {verdict.code}" if verdict.code else ""
    return f"{'over: ' if event.is_over else ''}{describe_verdict(verdict)}{place}"


def render_verdicts(verdicts: Sequence[RunVerdict]) -> Text:
    """Show verdicts with their evidence and advice, the most expensive first."""
    text = Text()
    if not verdicts:
        return text.append(f"{NO_VERDICTS}\n")
    for verdict in verdicts:
        text.append(f"{describe_verdict(verdict)}\n", style="bold")
        if verdict.code:
            text.append(f"  line of code: {verdict.code}\n")
        for sentence in verdict.evidence:
            text.append("".join(f"  {line}\n" for line in sentence.splitlines()))
        for one in verdict.what_if:
            text.append(f"  {one.change}: {format_seconds(one.step_s)} per step, {format_seconds(one.saved_s)} less\n")
        if verdict.advice:
            text.append(f"  what to do: {verdict.advice}\n", style="dim")
    return text


# The verdicts on a run as a page, and as a section of the run's page.


MOST_VERDICTS = 40
MOST_CHARACTERS = 4000
"""Maximum number of characters of a text to show. The stack of a hanging rank is shorter."""
FOOTER = "Diagnosed by trainspec. The cost of a cause is the time that it adds to a step."


def render_verdicts_page(report: Report, origin: PageOrigin | None = None) -> str:
    title = f"Diagnosis of {title_of(report)}"
    body = heading(title, status_line(report)) + origin_line(origin) + verdicts_section(report.verdicts)
    return render_page(title, body, FOOTER)


def verdicts_section(verdicts: Sequence[RunVerdict]) -> str:
    """Render each verdict with its evidence and advice, the most expensive first."""
    left = len(verdicts) - MOST_VERDICTS
    text = "Most expensive first." if verdicts else f"{NO_VERDICTS[0].upper()}{NO_VERDICTS[1:]}."
    more = f" {left:,} less expensive ones are left out." if left > 0 else ""
    return section("Diagnosis", text + more, "".join(map(_verdict, verdicts[:MOST_VERDICTS])))


def _verdict(verdict: RunVerdict) -> str:
    evidence = [shorten(sentence, MOST_CHARACTERS) for sentence in verdict.evidence]
    changes = [(one.change, format_seconds(one.step_s), format_seconds(one.saved_s)) for one in verdict.what_if]
    advice = f"What to do: {shorten(verdict.advice, MOST_CHARACTERS)}" if verdict.advice else ""
    parts = [
        f"<h3>{escape(describe_verdict(verdict))}</h3>",
        note(f"Line of code: {shorten(verdict.code, MOST_CHARACTERS)}") if verdict.code else "",
        plain_list(evidence) if evidence else "",
        text_table(("with", "#step", "#shorter by"), changes) if changes else "",
        note(advice),
    ]
    return "".join(parts)
