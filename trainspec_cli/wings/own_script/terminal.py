"""Pass a command's output to this terminal unchanged through a pseudo-terminal, so that progress bars and colours
work."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainspec_cli.wings.own_script import terminal_log

PIPE_BYTES = 2**20
"""Buffer size. A command that prints more than this between two polls blocks, as on a slow terminal."""
LAST_S = 2.0
"""Time limit in seconds for the last output of a command that has ended."""


class PassedOutput:
    """Shows output on the terminal with this `descriptor`. `on_first` is called before the first byte is shown."""

    def __init__(self, descriptor: int):
        self.on_first: Callable[[], None] = lambda: None
        self._terminal = descriptor
        self._master = self._reader = -1
        self._held = b""
        self._keeper: subprocess.Popen[bytes] | None = None
        """The process that writes the log."""
        self._shows = self._is_within_line = False
        self._size = b""

    def open(self, log: Path) -> int:
        """Return the pseudo-terminal for one start of the command. The caller closes it. `log` receives plain text."""
        self.close()
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.OPOST  # the real terminal converts line ends to CR LF
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self._size = b""
        self._copy_size()
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        with suppress(AttributeError, OSError):  # only Linux supports larger pipes
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        # Run isolated (-I, -S), so that the process loads neither the user's modules nor the step-counting hook.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(terminal_log.__file__), str(log)],
            stdin=self._master,
            stdout=writer,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Now only the log process holds the write end, so its exit closes the pipe.
        os.close(writer)
        return slave

    def look(self) -> None:
        """Show the output that has appeared since the last call."""
        self._copy_size()
        self._read()
        if self._held:
            if not self._shows:
                self._shows = True
                self.on_first()
            self._is_within_line = not self._held.endswith(b"\n")
            self._write(self._held)
            self._held = b""

    def begin_line(self) -> None:
        """End the command's current line before something else is printed."""
        if self._is_within_line:
            self._is_within_line = False
            self._write(b"\n")

    def finish(self) -> None:
        """Wait until all output of the command, which has ended, is in the log."""
        deadline_s = time.monotonic() + LAST_S
        while self._reader >= 0 and (left_s := deadline_s - time.monotonic()) > 0:
            select.select([self._reader], [], [], left_s)
            self._read()

    def close(self) -> None:
        for descriptor in (self._master, self._reader):
            if descriptor >= 0:
                os.close(descriptor)
        self._master = self._reader = -1
        if self._keeper:
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(LAST_S)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while self._reader >= 0:
                data = os.read(self._reader, 2**16)
                self._held += data
                if not data:
                    self.close()

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the command must survive if the terminal is closed
            while data:
                data = data[os.write(self._terminal, data) :]

    def _copy_size(self) -> None:
        with suppress(OSError):
            size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, b"\0" * 8)
            if self._master >= 0 and size != self._size:
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
                self._size = size
