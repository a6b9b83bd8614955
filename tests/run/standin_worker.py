"""Stands in for the engine in tests of the supervision: keeps its contract, without torch and without training.

`standin_worker.py MODE RUNDIR`, where MODE is one of
  train        20 quick steps, or a checkpoint when asked to stop
  endless      steps until asked to stop
  deaf         endless, and ignores SIGTERM; so does the process it starts
  raise        rank 1 fails with an exception and its last words, rank 0 loses its connection
  import_error every rank fails before its own code begins
  mute         says nothing for a long time, and leaves a file when it hears requests to stop
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

MODE, ROOT = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])

if MODE == "import_error":
    import no_such_module_anywhere  # noqa: F401

from trainspec_cli.run.folder.event_types.events import StartEvent, StepEvent  # noqa: E402
from trainspec_cli.run.folder.events import EventWriter, read_events  # noqa: E402
from trainspec_cli.run.folder.files import write_json  # noqa: E402
from trainspec_cli.run.folder.paths import RunDir  # noqa: E402

RUN = RunDir(ROOT)
STEPS = 20
ABOUT = {"device_name": "a stand-in", "params": 1, "peak_flops": 1e9, "peak_source": "made up", "flops_per_token": 1e3}
STEP = {"tokens": 64, "step_time_s": 0.02, "time_s": {"forward": 0.02}, "grad_norm": 1.0, "skipped": False}
stop_asked = False


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "deaf" else ask_to_stop)
    if MODE == "mute":
        (ROOT / f"listening{RANK}").touch()
        time.sleep(600)
    if MODE == "deaf":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    events = EventWriter(RUN.events(RANK), RANK)
    events.write(StartEvent(world_size=2, step=0, pid=os.getpid(), host="here", **ABOUT))
    step = 0
    while not stop_asked and (step < STEPS or MODE != "train"):
        step += 1
        time.sleep(0.02)
        events.write(StepEvent(step=step, loss=4.0 / step, **STEP))
        if MODE == "raise" and step == 3:
            fail(events, step)
    finish(step)


def ask_to_stop(*_: object) -> None:
    global stop_asked
    stop_asked = True


def fail(events: EventWriter, step: int) -> None:
    if RANK == 1:
        wait_until(
            lambda: step in [event.get("step") for event in read_events(RUN.events(0)) if event["type"] == "step"]
        )
        raise ValueError(f"the loss is not finite at step {step}")
    wait_until(RUN.error(1).exists)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def finish(step: int) -> None:
    if RANK == 0:
        RUN.checkpoint(step).mkdir(parents=True, exist_ok=True)
        status = "stopped" if stop_asked else "done"
        write_json(RUN.result_json, {"status": status, "exit_code": 6 if stop_asked else 0, "steps": step})


def last_words(error: Exception) -> None:
    write_json(
        RUN.error(RANK),
        {
            "rank": RANK,
            "host": "here",
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "step": 3,
        },
    )


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        last_words(error)
        raise
