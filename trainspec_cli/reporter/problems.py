"""Render problems, either as text with the source line or as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.printable import Style, on_one_line
from trainspec_cli.recipe.json_text import json_text

SHOWN_BEFORE, SHOWN = 60, 160
"""Numbers of characters of a long line to show: before the column, and in total."""
POINTED_AT_ONE_CHARACTER = frozenset({"bad_yaml"})
"""Codes of problems whose column is a single position, and not the start of an entry."""


def render_problems(problems: Sequence[Problem], style: Style, label: str = "error") -> str:
    """Render one paragraph per problem, followed by the number of problems if there are several."""
    paragraphs = []
    for problem in problems:
        lines = [f"{style.bold(style.red(label))}: {style.bold(problem.message)}"]
        if problem.file:
            lines.append(style.cyan(f"  --> {problem.where()}"))
        if problem.excerpt:
            line = problem.excerpt.rstrip().replace("\t", " ")
            column = (problem.column or 1) - 1
            before, after = _cut(line, column)
            text = before + after
            start = len(before)
            number = f"{problem.line:>5}"
            width = 1 if problem.code in POINTED_AT_ONE_CHARACTER else max(1, len(text) - start)
            lines.append(f"{style.dim(f'{number} |')} {text}")
            lines.append(f"{style.dim(' ' * len(number) + ' |')} {' ' * start}{style.red('^' * width)}")
        if problem.hint:
            lines.append(f"  {style.green('hint')}: {problem.hint}")
        paragraphs.append("\n".join(lines))
    if len(problems) > 1:
        paragraphs.append(style.bold(f"{len(problems)} problems"))
    return "\n\n".join(paragraphs)


def render_json(problems: Sequence[Problem]) -> str:
    return json_text({"errors": [problem.as_json() for problem in problems]})


def _cut(line: str, column: int) -> tuple[str, str]:
    """Return the parts of the line before and after the column; a long line is truncated on both sides."""
    if len(line) <= SHOWN:
        return on_one_line(line[:column]), on_one_line(line[column:])
    start = max(0, column - SHOWN_BEFORE)
    end = start + SHOWN
    before = on_one_line(line[start:column])
    after = on_one_line(line[column:end])
    return f"{'…' if start else ''}{before}", f"{after}{'…' if end < len(line) else ''}"
