"""What counting for a diagnosis takes of a step of a 30M-parameter llama.

    python -m tests.bench.diagnose.overhead [--turns 20] [--turn-steps 5]

Two runs of one process each are both alive and take turns: while one makes some steps the other is stopped (SIGSTOP).
In one of them `StepCounters.note_step` does nothing (`bare/sitecustomize.py`), so that it writes no counters and its
supervisor has nothing to conclude from. Prints with / without in the time of a step, by the median over the turns and
its quartiles; in the processor time of all steps together, which other work on the machine hardly changes; and what
the supervisor takes of a step.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir

MODEL = (
    *("model.num_layers=10", "model.hidden_size=384", "model.num_heads=6", "model.num_kv_heads=6"),
    *("model.head_dim=64", "model.ffn_size=1024", "model.vocab_size=16384"),
)
RECIPE = (
    *("recipe=tiny", *MODEL, "data.seq_len=128", "batching.global_batch_size=8", "train.max_steps=1000000"),
    *("run.preflight=false", "resilience=none", "resilience.hang_floor_s=null", "precision=fp32"),
)
WARM_STEPS = 5
START_TIMEOUT_S = 300.0
BARE = Path(__file__).parent / "bare"
"""On PYTHONPATH, a rank counts nothing."""


class Contender:
    """A run of one process that can be held."""

    def __init__(self, place: Path, name: str, ahead: Path):
        """`ahead`: a folder that stands first on PYTHONPATH."""
        self.folder = RunDir(place / name)
        command = [sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, f"run.dir={name}"]
        self._output = (place / f"{name}.log").open("w")
        path = os.pathsep.join((str(ahead), str(Path.cwd()), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._launcher = psutil.Popen(
            command, cwd=place, env=environment, stdout=self._output, stderr=subprocess.STDOUT
        )
        self.await_step(WARM_STEPS)
        (start,) = (event for event in read_events(self.folder.events(0)) if event["type"] == "start")
        self.worker = psutil.Process(start["pid"])
        self.worker.suspend()
        self._begun = self._state()

    def times_s(self) -> dict[int, float]:
        """Return the time of each step that has been made."""
        events = self.folder.events(0)
        if not events.exists():
            return {}
        return {event["step"]: event["step_time_s"] for event in read_events(events) if event["type"] == "step"}

    def counted(self) -> bool:
        """Return whether the worker has written counters in its turns."""
        events = [event for event in read_events(self.folder.events(0)) if event["type"] == "counters"]
        return any(event["step"] > self._begun[0] for event in events)

    def await_step(self, step: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while max(self.times_s(), default=0) < step:
            assert self._launcher.poll() is None and time.monotonic() < deadline, Path(self._output.name).read_text()
            time.sleep(0.05)

    def take_turn(self, steps: int) -> float:
        """Return the median step; the one in which it was stopped is not counted."""
        held = max(self.times_s()) + 1
        self.worker.resume()
        self.await_step(held + steps)
        self.worker.suspend()
        return statistics.median(time_s for step, time_s in self.times_s().items() if step > held)

    def processor_s(self) -> tuple[float, float]:
        """Return the processor time of a step, over all turns: of the worker, and of the supervisor."""
        (begun, *begun_s), (ended, *ended_s) = self._begun, self._state()
        worker_s, supervisor_s = (
            (after - before) / (ended - begun) for before, after in zip(begun_s, ended_s, strict=True)
        )
        return worker_s, supervisor_s

    def _state(self) -> tuple[int, float, float]:
        """Return the last step, and the processor time of the worker and of the supervisor until now."""
        used = [process.cpu_times() for process in (self.worker, self._launcher)]
        worker_s, supervisor_s = (one.user + one.system for one in used)
        return max(self.times_s()), worker_s, supervisor_s

    def end(self) -> None:
        for process in [*self._launcher.children(recursive=True), self._launcher]:
            process.kill()
        self._launcher.wait()
        self._output.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-steps", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    started: list[Contender] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, ahead in (("with", Path.cwd()), ("without", BARE)):
                started.append(Contender(Path(folder), name, ahead))
            measure(*started, options.turns, options.turn_steps)
        finally:
            for contender in started:
                contender.end()


def measure(observed: Contender, bare: Contender, turns: int, steps: int) -> None:
    ratios, times_s = [], []
    for turn in range(turns):
        order = (observed, bare) if turn % 2 else (bare, observed)
        taken_s = {contender.folder.root.name: contender.take_turn(steps) for contender in order}
        ratios.append(taken_s["with"] / taken_s["without"])
        times_s.append(taken_s["without"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    bare_s = statistics.median(times_s)
    print(f"load {os.getloadavg()[0]:.1f}; {turns} turns of {steps} steps each")
    print(f"without {1e3 * bare_s:.1f} ms a step; with / without {middle:.4f} ({low:.4f} to {high:.4f})")
    assert not bare.counted() and observed.counted(), "one contender counts, and the other does not"
    (observed_s, watching_s), (bare_s, resting_s) = observed.processor_s(), bare.processor_s()
    print(f"processor time without {1e3 * bare_s:.1f} ms a step; with / without {observed_s / bare_s:.4f}")
    print(f"supervisor {1e3 * watching_s:.2f} ms a step with, {1e3 * resting_s:.2f} without")


if __name__ == "__main__":
    main()
