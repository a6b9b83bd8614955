"""Rich's Text of values that come from elsewhere: escaped before it is measured, so that a table leaves room for it."""

from __future__ import annotations

from typing import Any

from rich import text

from trainspec_cli.core.printable import printable


class Text(text.Text):
    def __init__(self, plain: str = "", *style: Any, **options: Any):
        super().__init__(printable(plain), *style, **options)

    def append(self, more: Any, style: Any = None) -> Text:
        super().append(printable(more) if isinstance(more, str) else more, style)
        return self
