"""What observing takes of a step of a 30M-parameter llama.

    git worktree add /tmp/before COMMIT
    python -m tests.bench.diagnose.overhead --before /tmp/before [--turns 20] [--turn-steps 5]

Observation cannot be switched off, so a checkout of a commit that lacks it is the other contender. Two runs of one
process each are both alive and take turns: while one makes some steps the other is stopped (SIGSTOP). Prints with /
without in the time of a step, by the median over the turns and its quartiles, and in the processor time of all steps
together, which other work on the machine hardly changes.
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


class Contender:
    """A run of one process that can be held."""

    def __init__(self, place: Path, name: str, checkout: Path):
        self.folder = RunDir(place / name)
        command = [sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, f"run.dir={name}"]
        self._output = (place / f"{name}.log").open("w")
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
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

    def processor_s(self) -> float:
        """Return the processor time of a step, over all turns."""
        (begun_s, begun), (ended_s, ended) = self._begun, self._state()
        return (ended_s - begun_s) / (ended - begun)

    def _state(self) -> tuple[float, int]:
        used = self.worker.cpu_times()
        return used.user + used.system, max(self.times_s())

    def end(self) -> None:
        for process in [*self._launcher.children(recursive=True), self._launcher]:
            process.kill()
        self._launcher.wait()
        self._output.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, type=Path, help="a checkout that does not observe")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-steps", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    started: list[Contender] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, checkout in (("with", Path.cwd()), ("without", options.before.resolve())):
                started.append(Contender(Path(folder), name, checkout))
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
    ratio = observed.processor_s() / bare.processor_s()
    print(f"processor time without {1e3 * bare.processor_s():.1f} ms a step; with / without {ratio:.4f}")


if __name__ == "__main__":
    main()
