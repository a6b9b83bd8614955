"""Text and tables for rich: untrusted values are escaped before they are measured, so that columns are wide enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import text
from rich.console import RenderableType
from rich.table import Table

from trainspec_cli.core.printable import printable


class Text(text.Text):
    def __init__(self, plain: str = "", *style: Any, **options: Any):
        super().__init__(printable(plain), *style, **options)

    def append(self, more: Any, style: Any = None) -> Text:
        super().append(printable(more) if isinstance(more, str) else more, style)
        return self


def text_table(headings: Sequence[str], rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """Return a table; a heading that begins with # marks a column of numbers, as on a page
    (`page.parts.text_table`)."""
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading.lstrip("#"), justify="right" if heading.startswith("#") else "left")
    for row in rows:
        table.add_row(*row)
    return table
