"""Rich's console for text from anywhere: nothing in it is markup, and nothing in it reaches the terminal unescaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from trainspec_cli.printable import PrintableStream, printable


class PrintableConsole(Console):
    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    @property
    def file(self) -> IO[str]:
        """The stream below a `PrintableStream`, which would escape rich's own styles."""
        file = super().file
        return file.rich_proxied_file if isinstance(file, PrintableStream) else file

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before the width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape every text that is drawn; what moves the cursor is rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
