"""A command's output: unchanged on a terminal, and as plain text in the log."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from lab.waiting import wait_for

from trainspec_cli.wings.own_script.terminal import PassedOutput

PROGRAM = r"""
import os, sys
print(*os.get_terminal_size(1), sys.stdout.isatty() and sys.stderr.isatty(), flush=True)
for step in range(3):
    print(f"\r\x1b[32m{step}/3\x1b[0m", end="", file=sys.stderr, flush=True)
print("\n\x1b]0;title\x07last")
"""
SHOWN = b"100 40 True\n\r\x1b[32m0/3\x1b[0m\r\x1b[32m1/3\x1b[0m\r\x1b[32m2/3\x1b[0m\n\x1b]0;title\x07last\n"


@pytest.fixture
def terminal():
    """A terminal of 100 columns that leaves line ends alone: (what a person sees, what programs open)."""
    master, slave = pty.openpty()
    modes = termios.tcgetattr(slave)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    yield master, slave
    os.close(master)
    os.close(slave)


def read_shown(master: int, expected_bytes: int) -> bytes:
    """What a person sees. The kernel passes on what a pseudo-terminal gets in pieces, some time later."""
    shown = b""
    while len(shown) < expected_bytes:
        shown += os.read(master, 2**16)
    return shown


def start(passed: PassedOutput, log: Path, program: str) -> subprocess.Popen[bytes]:
    output = passed.open(log)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=output, start_new_session=True)
    os.close(output)
    return process


def test_a_terminal_gets_every_byte_and_the_log_plain_text(terminal, tmp_path: Path) -> None:
    master, slave = terminal
    first: list[int] = []
    passed = PassedOutput(slave)
    passed.on_first = lambda: first.append(1)
    for number in (1, 2):
        log = tmp_path / f"{number}.log"
        assert start(passed, log, PROGRAM).wait() == 0
        passed.finish()
        assert log.read_bytes() == b"100 40 True\n\r0/3\r1/3\r2/3\nlast\n", "the log is complete after the end"
        passed.look()
        assert read_shown(master, len(SHOWN)) == SHOWN
    assert first == [1]
    passed.close()


def test_an_unfinished_line_is_ended_before_other_output(terminal, tmp_path: Path) -> None:
    master, slave = terminal
    passed = PassedOutput(slave)
    start(passed, tmp_path / "log", "print('30%', end='')").wait()
    passed.finish()
    passed.look()
    passed.begin_line()
    passed.begin_line()
    assert read_shown(master, 4) == b"30%\n"


def test_a_command_outlives_its_supervisor(terminal, tmp_path: Path) -> None:
    """Its log is written although nothing shows its output any more."""
    passed = PassedOutput(terminal[1])
    program = "import time\nfor step in range(20):\n  print(step, flush=True)\n  time.sleep(0.01)\n"
    log = tmp_path / "log"
    process = start(passed, log, program)
    os.close(passed._reader)
    os.close(passed._master)
    assert process.wait() == 0
    wait_for(lambda: log.read_text().endswith("19\n"))
