"""Which starts of a run were asked to stop: RUN/stops/00000003.json is there when the third was.

The process that asks the workers to stop notes it first. Workers also write a checkpoint and end when a signal comes
from elsewhere, or torchrun dies and its workers are ended; the run has then failed, since nothing asked it to stop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from trainspec_cli.environment_names import GENERATION
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir


def note_stop(run: RunDir, generation: int) -> None:
    """A full disk does not keep the workers from being asked; the supervisor knows of its own requests without this."""
    with contextlib.suppress(OSError):
        write_json(run.stop(generation), {"generation": generation, "host": socket.gethostname(), "at": time.time()})


def was_stop_noted(run: RunDir, generation: int) -> bool:
    return run.stop(generation).is_file()


def may_stop(run: RunDir) -> bool:
    """Return True if this worker's start was asked to stop. Where no launch started it, a signal is request enough."""
    generation = os.environ.get(GENERATION)
    return generation is None or was_stop_noted(run, int(generation))
