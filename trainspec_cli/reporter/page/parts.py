"""Building blocks of all pages: page, sections, tables, tiles and bars. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from trainspec_cli.core.printable import printable

STYLE = Path(__file__).with_name("page.css")


@dataclass(frozen=True)
class PageOrigin:
    """The origin of a page or of its data."""

    date: str
    """The date, for example 2026-11-23."""
    version: str
    command: str
    """The command as typed."""


def render_page(title: str, body: str, footer: str) -> str:
    """Return a complete page with the rendered body. The page contains no invisible characters, regardless of the
    values."""
    # Run folders may be untrusted, and a name with invisible characters could imitate another one.
    return printable(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{STYLE.read_text()}</style></head>\n"
        f"<body><main>{body}<footer>{footer}</footer></main></body></html>\n"
    )


def heading(title: str, text: str = "") -> str:
    return f"<h1>{escape(title)}</h1>{note(text)}"


def note(text: str) -> str:
    """Return a paragraph in a muted colour; an empty string if there is no text."""
    return f'<p class="soft">{escape(text)}</p>' if text else ""


def origin_line(origin: PageOrigin | None) -> str:
    if origin is None:
        return ""
    text = f"{origin.date}, trainspec {origin.version}:"
    return f'<p class="soft">{escape(text)} <code>{escape(origin.command)}</code></p>'


def section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{note(text)}{content}</section>"


def details(summary: str, content: str) -> str:
    """Return a collapsed section."""
    return f"<section><details><summary>{escape(summary)}</summary>{content}</details></section>"


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Render (name, value, detail) as tiles."""
    drawn = (
        f"<div class=tile><span>{escape(n)}</span><b>{escape(v)}</b><span>{escape(b)}</span></div>"
        for n, v, b in figures
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def bar_rows(rows: Sequence[tuple[str, str, str]]) -> str:
    """Render rows of (name, bar as SVG, value)."""
    drawn = (
        f'<div class="row"><span>{escape(name)}</span>{bar}<span class="number">{escape(value)}</span></div>'
        for name, bar, value in rows
    )
    return f'<div class="rows">{"".join(drawn)}</div>'


def table(headings: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table. A heading that starts with # marks a column of numbers."""
    heads = "".join(f"<th{' class=number' if h.startswith('#') else ''}>{escape(h.lstrip('#'))}</th>" for h in headings)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def cell(text: str, kind: str = "") -> str:
    return f"<td{f' class={kind}' if kind else ''}>{escape(text)}</td>"


def text_row(cells: Sequence[str], kinds: Sequence[str] = ()) -> str:
    """Return a row of texts; `kinds` are the CSS classes of the first cells."""
    padded = [*kinds, *[""] * (len(cells) - len(kinds))]
    return f"<tr>{''.join(map(cell, cells, padded))}</tr>"


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts. Columns whose heading starts with # are aligned as numbers."""
    kinds = ["number" if heading.startswith("#") else "" for heading in headings]
    return table(headings, [text_row(row, kinds) for row in rows])


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without alignment; a leading # in headings has no special meaning."""
    return table([heading.lstrip("#") for heading in headings], list(map(text_row, rows)))


def preformatted(text: str) -> str:
    """Return text with its line breaks and indentation preserved."""
    return f"<pre>{escape(text)}</pre>"


def shorten(text: str, most_characters: int) -> str:
    """Truncate overlong text. (trainspec itself never writes such text.)"""
    if len(text) <= most_characters:
        return text
    return f"{text[:most_characters]}... ({len(text):,} characters)"


def plain_list(lines: Sequence[str]) -> str:
    return f'<ul class="plain">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'
