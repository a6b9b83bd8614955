"""`python -m trainspec_cli.launch.guard LAUNCH_ID GRACE_S`: nothing outlives a supervisor that was killed.

Reads its standard input, whose other end only the supervisor holds. A supervisor that has seen its job end writes
`DONE`; when the input ends without it, the supervisor is dead (`kill -9`, out of memory) and the workers are asked to
stop, then killed. Works alike on Linux and macOS, and outside torchrun, which may itself be stuck.
"""

from __future__ import annotations

import signal
import sys

from trainspec_cli.launch import processes

DONE = b"done"


def main() -> None:
    launch_id, grace_s = sys.argv[1], float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DONE:
        processes.stop(launch_id, grace_s)


if __name__ == "__main__":
    main()
