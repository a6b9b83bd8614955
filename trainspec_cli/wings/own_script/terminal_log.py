"""Write the log of a command that prints to a pseudo-terminal: `python terminal_log.py LOG`, standard library only.

Standard input is the master end of the terminal. The output is copied unchanged to standard output, and with colours
and other control sequences stripped to LOG. This runs in a separate process because the command may outlive `trainspec
run`. If `trainspec run` is killed, the command still has a terminal to print to while it saves its state."""

import contextlib
import os
import re
import signal
import sys

SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B]|[@-Z\\^_=>78])")
UNFINISHED_BYTES = 256
"""Maximum length of a control sequence. If an escape character is further back, it is treated as text."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # this process exits once no process has the terminal open
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    shows = True
    held = b""
    while True:
        try:
            data = os.read(0, 2**16)
        except OSError:  # Linux reports the end of output as EIO
            data = b""
        if data and shows:
            try:
                shown = 0
                while shown < len(data):
                    shown += os.write(1, data[shown:])
            except OSError:  # the reader is gone
                shows = False
        held = SEQUENCE.sub(b"", held + data)
        start = held.rfind(b"\x1b", max(0, len(held) - UNFINISHED_BYTES)) if data else -1
        plain, held = (held, b"") if start < 0 else (held[:start], held[start:])
        with contextlib.suppress(OSError):  # a full disk must not end the command
            os.write(log, plain)
        if not data:
            return


if __name__ == "__main__":
    main()
