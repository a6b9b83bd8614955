"""The entry point: run a command and exit with its code. User and machine errors are shown without a traceback.

Besides the exit codes of `errors.py`: 1 for a bug in the program (the traceback goes to a file), and 141 if the reader
of a pipe has closed it, as in a shell.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from trainspec_cli.cli.main import dispatch
from trainspec_cli.core.errors import Interrupted, MachineError, Stopped, TrainspecError
from trainspec_cli.core.printable import printing_safely
from trainspec_cli.reporter.problems import render_json, render_problems
from trainspec_cli.reporter.style import Style

EXIT_FAULT = 1
EXIT_BROKEN_PIPE = 141
SHOWN_CHARS = 200
NEW_OBJECTS = 50_000
"""Objects that are made before Python looks for circles among them: a plan makes many, and hardly any circle."""


def main() -> None:
    gc.set_threshold(NEW_OBJECTS)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Errors are reported as text that is safe on a terminal."""
    try:
        with printing_safely(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(arguments)
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE


def _run(arguments: Sequence[str]) -> int:
    try:
        code = dispatch(arguments, Style.of(sys.stdout))
        sys.stdout.flush()
        return code
    except TrainspecError as error:
        _report(error, as_json="--json" in arguments)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            _report_bug(error)
            return EXIT_FAULT
        refused = MachineError(f"{_show(error.filename)}: {error.strerror}", code="refused_by_the_system")
        _report(refused, as_json="--json" in arguments)
        return refused.exit_code
    except Exception as error:
        _report_bug(error)
        return EXIT_FAULT


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as errors are printed; where in trainspec it was raised is nothing to its user."""
    print(f"{Style.of(sys.stderr).bold('warning')}: {message}", file=sys.stderr)


def _drop_output() -> None:
    """Redirect closed streams to /dev/null; otherwise Python would report the closed pipe again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show(name: str | bytes | int) -> str:
    """Return a file's name, shortened to fit on a line."""
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _report(error: TrainspecError, *, as_json: bool) -> None:
    if as_json:
        print(render_json(error.problems))
        return
    label = "stopped" if isinstance(error, (Stopped, Interrupted)) else "error"
    print(render_problems(error.problems, Style.of(sys.stderr), label), file=sys.stderr)


def _report_bug(error: Exception) -> None:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="trainspec-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    summary = "".join(traceback.format_exception_only(error)).strip()
    print(f"trainspec failed because of a bug: {summary}\nthe traceback is in {file.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
