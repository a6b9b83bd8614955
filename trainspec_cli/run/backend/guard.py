"""`python -m trainspec_cli.run.backend.guard LAUNCH_ID GRACE_S RUN GENERATION SPOKEN_BYTES`: end a job whose
supervisor was killed.

Its standard input is a pipe whose write end only the supervisor holds. When the job has ended, the supervisor writes
`DONE`. If the pipe closes without `DONE`, the supervisor is dead (`kill -9`, out of memory). The workers are then asked
to stop, and killed after GRACE_S. Workers that have not started training (their event files are still SPOKEN_BYTES
long) have nothing to save and are killed immediately. It works the same on Linux and macOS, and independently of
torchrun, which may itself be stuck.
"""

from __future__ import annotations

import signal
import sys

from trainspec_cli.run.backend import processes
from trainspec_cli.run.folder.events import spoken_bytes
from trainspec_cli.run.folder.generations import note_stop
from trainspec_cli.run.folder.paths import RunDir

DONE = b"done"


def main() -> None:
    launch_id, grace_s, root, generation, spoken_before = sys.argv[1:]
    run = RunDir(root)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):  # Slurm warns with SIGUSR2
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    if float(grace_s) and spoken_bytes(run) > int(spoken_before):
        note_stop(run, int(generation))
        processes.stop(launch_id, float(grace_s))
    else:
        processes.kill(launch_id)


if __name__ == "__main__":
    main()
