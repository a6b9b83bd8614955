"""Wrappers around rich's console, texts and tables for untrusted text. Such text is never parsed as markup, and control
characters are escaped before widths are measured, so that columns are wide enough."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich import text
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from trainspec_cli.core.printable import LastingStream, PrintableStream, printable
from trainspec_cli.run.folder.paths import RunDir


class PrintableConsole(Console):
    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    @property
    def file(self) -> IO[str]:
        """Return the stream inside a `PrintableStream`, because the wrapper would escape rich's own styles."""
        file = super().file
        return cast(IO[str], file.rich_proxied_file) if isinstance(file, PrintableStream) else file

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render_str(self, plain: str, **options: Any) -> text.Text:  # type: ignore[override]
        """Escape the text before its width is measured."""
        return super().render_str(printable(plain), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all rendered text. Control segments are not escaped, because they come from rich itself."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def show(self, drawn: RenderableType) -> None:
        """Print an object that fills the terminal's width. In a file or a pipe, there are no trailing spaces."""
        if self.is_terminal:
            self.print(drawn)
            return
        with self.capture() as captured:
            self.print(drawn)
        self.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def report(self, *lines: str) -> None:
        """Print lines without colours or wrapping."""
        self.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def report_each(self, *parts: Iterable[str]) -> None:
        """Print the lines of all parts, as `report` does. Without lines, print nothing, not even an empty line."""
        if lines := [line for part in parts for line in part]:
            self.report(*lines)


class RunConsole(PrintableConsole):
    """A console whose reader may disappear (`| head`). If so, the current run is stopped gracefully, even under
    `nohup`, and the command ends with the exit code that a shell would report."""

    reader_left = False
    _stop_run: Callable[[], None] | None = None
    """Asks the current run to stop."""

    def on_broken_pipe(self) -> None:
        self.quiet = self.reader_left = True
        if self._stop_run is None:
            raise BrokenPipeError
        self._stop_run()

    @contextmanager
    def stopping_run_without_reader(self, stop_run: Callable[[], None]) -> Iterator[None]:
        """Stop the run if the reader disappears during the block."""
        self._stop_run = stop_run
        try:
            yield
        finally:
            self._stop_run = None


def make_console(*, as_json: bool) -> RunConsole:
    """Create the console. With `--json` it writes to stderr, because stdout is read by a program."""
    return RunConsole(stderr=as_json)


def make_progress_console(progress: bool | None) -> RunConsole:
    """Create the console for a launch from Python. `progress`: whether to show progress; None shows it only on a
    terminal or in a notebook."""
    # A notebook shows stdout. Rich's own output for notebooks would be one widget per line.
    console = RunConsole(force_jupyter=False)
    in_notebook = "ipykernel" in sys.modules
    console.quiet = not (console.is_terminal or in_notebook) if progress is None else not progress
    return console


@contextmanager
def open_run_log(run: RunDir, console: Console) -> Iterator[Console | None]:
    """Open the log of all starts of the run. It receives all lines, even if a terminal shows a progress bar instead or
    is closed. Yields None if the console itself writes to that file. If the disk is full, the log ends, but the run
    continues."""
    run.logs.mkdir(parents=True, exist_ok=True)
    with run.run_log.open("a", encoding="utf-8") as file:
        is_same = False
        with suppress(OSError):  # an in-memory stream has no file descriptor
            is_same = os.path.sameopenfile(console.file.fileno(), file.fileno())
        if is_same:
            yield None
        else:
            lasting = LastingStream(file, ends_at=(errno.ENOSPC, errno.EDQUOT, errno.EIO))
            yield PrintableConsole(file=cast(IO[str], lasting), color_system=None)


class Text(text.Text):
    def __init__(self, plain: str = "", *style: Any, **options: Any):
        super().__init__(printable(plain), *style, **options)

    def append(self, more: Any, style: Any = None) -> Text:
        super().append(printable(more) if isinstance(more, str) else more, style)
        return self


def text_table(headings: Sequence[str], rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """Return a table. A heading that starts with # marks a column of numbers, as in the tables of pages
    (`page.parts.text_table`)."""
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading.lstrip("#"), justify="right" if heading.startswith("#") else "left")
    for row in rows:
        table.add_row(*row)
    return table
