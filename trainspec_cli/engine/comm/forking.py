"""Let torchrun import the engine once and then fork its workers, instead of starting Python for each of them.

Importing torch and the engine takes about three seconds of CPU time per process, and many reads from a shared file
system. A forked worker starts in milliseconds, and a node's ranks share the memory of the imported modules. Nothing may
start a thread or use a GPU before the fork, so the parent only imports modules.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from trainspec_cli.core.environment_names import RANK, rank_title
from trainspec_cli.engine.accelerators import on_chip, own_stream, started_kind, synchronise_stream
from trainspec_cli.engine.digest import Mark, mark, wait_for

# A forked child that runs a program like a separate process, with the parent's imports already loaded.


POLL_S = 0.01


class ForkedProcess:
    """A forked child with the part of the `subprocess.Popen` interface that torchrun uses."""

    def __init__(self, program: Callable[[], None], environment: Mapping[str, str], stdout: int, stderr: int):
        """Run `program` with this environment in a child of this process that leads a new session; its output goes to
        these descriptors. Returns once the child is a session leader and has its rank's process title."""
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
        """Return the exit code, negative for a signal; None while the process is alive."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired if the process is still alive after `timeout`
        seconds."""
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
    """Run `program` like a new process, without the parent's signal handlers and files, and exit."""
    code = 1
    try:
        os.setsid()
        Path("/proc/self/comm").write_text(rank_title(environment[RANK]))
        for descriptor, own in zip(outputs, (sys.stdout, sys.stderr), strict=True):
            os.dup2(descriptor, own.fileno())
            own.reconfigure(write_through=True)  # type: ignore[union-attr]
        # Close the other descriptors: the parent waits on one of them, and a peer must be able to detect that the
        # parent has exited.
        os.closerange(3, 1 + max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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


def _exit_code_of(program: Callable[[], None]) -> int:
    """Run a program until it ends. As in any Python process, an exception is written to stderr."""
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


ENGINE = "trainspec_cli.engine"
TOOLS = "trainspec_cli.engine.tools"
WITHOUT_CUDA_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""The environment variable that keeps GPU queries from initialising CUDA, which would not survive a later fork."""


def fork_workers(module: str, arguments: Sequence[str]) -> None:
    """Let torchrun fork its workers if `module` is part of the engine; it starts any other program as usual. This works
    only on Linux, because the system libraries of other systems do not survive a fork."""
    if sys.platform != "linux" or module not in (ENGINE, TOOLS):
        return
    import_program(module, arguments)
    assert started_kind() is None, "an accelerator's context does not survive a fork"
    gc.freeze()  # prevent the workers' garbage collection from writing to shared memory
    api.get_subprocess_handler = _ForkingHandler  # type: ignore[assignment]  # torch passes every argument by name


def import_program(module: str, arguments: Sequence[str]) -> None:
    """Import what the workers of a program of the engine import."""
    os.environ.setdefault(WITHOUT_CUDA_CONTEXT, "1")
    with contextlib.suppress(Exception):  # the workers will encounter the same error and report it as usual
        import_module(f"{ENGINE}.run.worker" if module == ENGINE else f"{TOOLS}.{arguments[0]}")


class _ForkingHandler(SubprocessHandler):
    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> ForkedProcess:  # type: ignore[override]
        assert self._stdout and self._stderr, "torchrun was configured to write stdout and stderr to files"
        module = args.index("-m") + 1

        def program() -> None:
            sys.argv = list(args[module:])
            runpy.run_module(args[module], run_name="__main__", alter_sys=True)

        return ForkedProcess(program, env, self._stdout.fileno(), self._stderr.fileno())


# Run tasks in another thread, one after another, while the main thread computes.


UNHEARD_S = 10.0


class Background:
    """Runs tasks in order in a separate thread. The process does not wait for them when it ends."""

    def __init__(
        self,
        device: torch.device,
        note: Callable[[float, float], None],
        most_waiting: int = 0,
        give_up: Callable[[], object] | None = None,
    ):
        """`note` is called with the times at which each task began and ended, on the host's clock. `start` waits while
        `most_waiting` tasks have not begun; 0 means that it never waits. `give_up` is called if the main thread has not
        picked up an error after `UNHEARD_S`, because it may be waiting for other ranks, which in turn wait for a task
        that was not run."""
        self._device = device
        self._note = note
        self._give_up = give_up
        self._unheard: threading.Timer | None = None
        self._given: Queue[Callable[[], None] | None] = Queue(most_waiting)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], None], after: Callable[[], object] = lambda: None) -> None:
        """Run `act` after all earlier tasks, once the device has finished the work of the current stream and `after`
        has returned. Raises the first error of an earlier task."""
        if self._error is not None:
            self.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
            self._thread.start()
        reached = mark(on_gpu=on_chip(self._device))
        self._given.put(lambda: self._run(act, reached, after))

    def wait(self) -> None:
        """Wait until all tasks are done. Raises the first error; tasks queued after the failed one are not run."""
        self._given.join()
        if (error := self.take_error()) is not None:
            raise error

    def take_error(self) -> BaseException | None:
        """Return the first error, which is then considered handled."""
        error = self._error
        self._error = None
        if self._unheard is not None:
            self._unheard.cancel()
        return error

    def close(self) -> None:
        """End the thread once all tasks are done."""
        if self._thread is not None:
            self._given.put(None)
            self._thread = None

    def _work(self) -> None:
        with own_stream(self._device):
            while (act := self._given.get()) is not None:
                try:
                    if self._error is None:
                        act()
                except BaseException as error:  # the main thread raises this error
                    self._error = error
                    if self._give_up is not None:
                        self._unheard = threading.Timer(UNHEARD_S, self._give_up)
                        self._unheard.daemon = True
                        self._unheard.start()
                del act  # drop the task's references to tensors
                self._given.task_done()

    def _run(self, act: Callable[[], None], reached: Mark, after: Callable[[], object]) -> None:
        wait_for(reached)
        after()
        started_s = time.perf_counter()
        act()
        synchronise_stream(self._device)
        self._note(started_s, time.perf_counter())
