"""A forked child that runs a program as a process of its own would, with the parent's imports at hand."""

from __future__ import annotations

import atexit
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from trainspec_cli.core.environment_names import RANK, rank_title

POLL_S = 0.01


class ForkedProcess:
    """A forked child with what torchrun uses of `subprocess.Popen`."""

    def __init__(self, program: Callable[[], None], environment: Mapping[str, str], stdout: int, stderr: int):
        """Run `program` in a child of this process that leads a session of its own, with this environment and these
        descriptors for its output. Returns when the child is a session's leader and bears its rank's title."""
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        ready, is_ready = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _run_as_process(program, environment, (stdout, stderr), mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(is_ready)
        os.read(ready, 1)
        os.close(ready)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired where the process outlives `timeout`, in seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(POLL_S)
        return code


def _run_as_process(
    program: Callable[[], None],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    mask: set[int | signal.Signals],
) -> NoReturn:
    """Run `program` as a new process would, with nothing left of the parent's signal handlers and files, and exit."""
    code = 1
    try:
        os.setsid()
        Path("/proc/self/comm").write_text(rank_title(environment[RANK]))
        _redirect(outputs)
        _reset_signals(mask)
        os.environ.clear()
        os.environ.update(environment)
        code = _exit_code_of(program)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(code)


def _redirect(outputs: tuple[int, int]) -> None:
    """Write to the two descriptors from now on, and close all others: the parent waits for one, and the other end of a
    connection is to see that the parent is gone."""
    for descriptor, own in zip(outputs, (sys.stdout, sys.stderr), strict=True):
        os.dup2(descriptor, own.fileno())
        own.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.closerange(3, 1 + max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()))


def _reset_signals(mask: set[int | signal.Signals]) -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _exit_code_of(program: Callable[[], None]) -> int:
    """Run a program to its end; an exception is written to stderr, as Python does."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0
