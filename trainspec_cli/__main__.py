"""argv -> command -> exit code. No traceback reaches a person for a fault of theirs, or of the machine.

Beside the exit codes of `errors.py`: 1 for a fault of the program itself (the traceback goes to a file),
141 when the reader of a pipe has gone, as the shell has it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainspec_cli.cli.main import dispatch
from trainspec_cli.errors import Interrupted, MachineError, Stopped, TrainspecError
from trainspec_cli.printable import printing_safely
from trainspec_cli.report.problems import render_json, render_problems
from trainspec_cli.report.style import Style

EXIT_FAULT = 1
EXIT_BROKEN_PIPE = 141
SHOWN_CHARS = 200


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """The exit code; everything that can go wrong has been told by then, in text that is safe on a terminal, or its
    reader has gone."""
    try:
        with printing_safely():
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
        _tell(error, as_json="--json" in arguments)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            _tell_fault(error)
            return EXIT_FAULT
        refused = MachineError(f"{_show(error.filename)}: {error.strerror}", code="refused_by_the_system")
        _tell(refused, as_json="--json" in arguments)
        return refused.exit_code
    except Exception as error:
        _tell_fault(error)
        return EXIT_FAULT


def _drop_output() -> None:
    """Python would complain of the closed pipe once more at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show(name: str | bytes | int) -> str:
    """A file's name, short enough for a line."""
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _tell(error: TrainspecError, *, as_json: bool) -> None:
    if as_json:
        print(render_json(error.problems))
        return
    label = "stopped" if isinstance(error, (Stopped, Interrupted)) else "error"
    print(render_problems(error.problems, Style.of(sys.stderr), label), file=sys.stderr)


def _tell_fault(error: Exception) -> None:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="trainspec-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    summary = "".join(traceback.format_exception_only(error)).strip()
    print(f"trainspec failed, by a fault of its own: {summary}\nthe traceback is in {file.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
