"""Show a run in progress: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.changes import advises_shares
from trainspec_cli.reporter.progress import Progress
from trainspec_cli.reporter.text import describe_event, describe_progress, first_text_parts
from trainspec_cli.run.folder.event_types.events import DirectiveEvent, EvalEvent, Event, FirstTextEvent
from trainspec_cli.run.folder.events import EventTail
from trainspec_cli.run.folder.paths import RunDir

REFRESH_PER_S = 4
"""Maximum refresh rate, because on a small machine, rendering takes processor time away from the workers."""
LINE_S = 10.0
QUICK_S = 1.0
"""Work after the last step gets a separate line if it takes longer than this many seconds."""
XZ = "xz: size of the same held-out text under `xz -9e`; a model that has learned the language needs fewer bits"
"""A line that is printed once, with the first evaluation on text."""


class ShowProgress(Protocol):
    def __call__(self, phase: str, done: float, rows: int = 0) -> None:
        """Show a phase, the completed fraction of all work (0 to 1), and the number of rows in this phase so far."""


@contextmanager
def showing_progress(console: Console) -> Iterator[ShowProgress]:
    """Show the progress of work that reports its phase and completed fraction. Without a terminal, print a line for
    each phase, and a line with the rows and their rate every `LINE_S` seconds."""
    phase_now = ""
    began_s = 0.0
    shown_s = 0.0

    def describe_rows(phase: str, rows: int) -> str:
        nonlocal phase_now, began_s
        now_s = time.monotonic()
        if phase != phase_now:
            phase_now = phase
            began_s = now_s
        took_s = now_s - began_s
        return f"{rows:,} rows" + (f", {rows / took_s:,.0f}/s" if took_s else "") if rows else ""

    if not console.is_terminal:
        reported: set[str] = set()

        def report(phase: str, done: float, rows: int = 0) -> None:
            nonlocal shown_s
            is_new = phase not in reported
            text = describe_rows(phase, rows)
            # A log keeps all lines, so printing every report would flood it.
            if is_new or (text and time.monotonic() - shown_s >= LINE_S):
                reported.add(phase)
                shown_s = time.monotonic()
                console.print(phase if is_new else f"{phase}: {text}", markup=False, highlight=False)

        yield report
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[rows]}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=1.0, rows="")
        yield lambda phase, done, rows=0: bar.update(
            task, description=phase, completed=done, rows=describe_rows(phase, rows)
        )


class LiveView:
    """Reads rank 0's events and shows them. Call `watch` repeatedly during the run. `log` receives the lines that a
    console without a terminal would print."""

    def __init__(
        self, run: RunDir, plan: Plan | None, console: Console, log: Console | None = None, *, last_bytes: int = 0
    ):
        """`plan`: None for a user command. `last_bytes`: number of bytes at the end of the existing events to show
        first."""
        interval_steps = plan.spec.train.log_interval_steps if plan else None
        self._tail = EventTail(run.events(0), last_bytes)
        self._progress = Progress(plan.total_steps if plan else None)
        self._next_advice_step = 0
        self._explains_xz = True
        self._has_plan = plan is not None
        self._before_first_step = "compiling" if plan and plan.spec.compile else "first step"
        self._screens: list[TerminalScreen | PlainScreen] = [
            TerminalScreen(console) if console.is_terminal else PlainScreen(console, interval_steps)
        ]
        if log:
            self._screens.append(PlainScreen(log, interval_steps))

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_raised: object) -> None:
        for screen in self._screens:
            screen.close()

    def watch(self, stop_requested: bool) -> None:
        for event in self._tail.read():
            self._progress.add(event)
            if isinstance(event, FirstTextEvent):
                self.show_message(describe_event(event), Text.assemble(*first_text_parts(event)))
            elif self._is_due(event) and (text := describe_event(event)):
                self.show_message(text)
            # Explain the metric only once.
            if self._explains_xz and isinstance(event, EvalEvent) and isinstance(event.xz_bits_per_byte, float):
                self.show_message(XZ)
                self._explains_xz = False
            self._show(stop_requested)
        # The phase may change without new events, for example when a stop is requested.
        self._show(stop_requested)

    def _is_due(self, event: Event) -> bool:
        """Return whether to show an event now. The first advice on sample shares is shown immediately, and later advice
        at intervals that double each time."""
        if not (isinstance(event, DirectiveEvent) and advises_shares(event)):
            return True
        # Advice on sample shares varies with the machine's load.
        if event.step < self._next_advice_step:
            return False
        self._next_advice_step = 2 * event.step
        return True

    def show_message(self, text: str, styled: Text | None = None) -> None:
        """Show a message, such as one from the supervisor; on a terminal as `styled`."""
        for screen in self._screens:
            screen.show_message(styled if styled and isinstance(screen, TerminalScreen) else text)

    def note(self, text: str) -> None:
        """Write a line only to the log."""
        for screen in self._screens[1:]:
            screen.show_message(text)

    def yield_terminal(self) -> None:
        """Stop drawing, because another program is about to print to the terminal."""
        self._screens[0].close()

    def _show(self, stop_requested: bool) -> None:
        for screen in self._screens:
            screen.show(self._phase(stop_requested), self._progress)

    def _phase(self, stop_requested: bool) -> str:
        """Return the name of the phase; empty while the run is training."""
        if stop_requested and not self._has_plan:
            return "stopping (Ctrl-C again stops at once)"
        if stop_requested:
            return "stopping after a checkpoint (Ctrl-C again stops at once)" if self._progress.begin else "stopping"
        if self._progress.has_stepped:
            return self._progress.after_last_step
        if not self._has_plan:
            return "no step yet"
        return self._before_first_step if self._progress.begin else "starting workers"


def _place(progress: Progress) -> str:
    of = "" if progress.max_steps is None else f"/{progress.max_steps}"
    return f"step {progress.step}{of}"


class TerminalScreen:
    def __init__(self, console: Console):
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            # Remove the bar, because the final summary replaces it.
            transient=True,
            refresh_per_second=REFRESH_PER_S,
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self._phase, self._since = "", time.monotonic()
        self._bar.start()

    def show_message(self, text: str | Text) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def show(self, phase: str, progress: Progress) -> None:
        if phase != self._phase:
            self._phase, self._since = phase, time.monotonic()
        where = _place(progress)
        self._bar.update(
            self._task,
            description=f"{phase}, {time.monotonic() - self._since:.0f} s" if phase else where,
            total=progress.max_steps if progress.has_stepped else None,
            completed=progress.step,
            figures="" if phase else describe_progress(progress),
        )

    def close(self) -> None:
        self._bar.stop()


class PlainScreen:
    """Prints a line every `interval_steps` steps (if None: every `LINE_S` seconds), and a line when a phase starts."""

    def __init__(self, console: Console, interval_steps: int | None):
        self._console = console
        self._interval_steps = interval_steps
        self._phase = ""
        self._phase_s = 0.0
        self._is_shown = False
        self._step, self._printed_s = 0, time.monotonic()

    def show_message(self, text: str | Text) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, phase: str, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.has_stepped and progress.step != self._step and self._is_due(progress):
            self._step = progress.step
            self._printed_s = now_s
            self.show_message(f"{_place(progress)}: {describe_progress(progress)}".removesuffix(": "))
        if phase != self._phase:
            self._phase = phase
            self._phase_s = now_s
            self._is_shown = False
        # Most runs end soon after the last step, so a separate line would be noise.
        is_quick = phase == progress.after_last_step and now_s - self._phase_s < QUICK_S
        if phase and not self._is_shown and not is_quick:
            self._is_shown = True
            self.show_message(phase)

    def _is_due(self, progress: Progress) -> bool:
        if self._interval_steps is None:
            return time.monotonic() - self._printed_s >= LINE_S
        return progress.step % self._interval_steps == 0 or progress.step == progress.max_steps

    def close(self) -> None:
        """Do nothing, because lines that were printed need no clearing."""
