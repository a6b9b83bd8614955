"""What `trainspec diagnose` finds in generated telemetry, how long it takes, and what recording takes of a step.

`python tests/bench/diagnosis.py [--ranks 16384] [--steps 64] [--cases 20]`: one rank of so many is slow, at a random
place, from a random step on, by a random factor; every part of a step has noise of its own: it differs by 2%, and 1% of
them take half as long again. Prints how many were named with cause and place, after how many
disturbed steps that would have been known, and the processor time to conclude.
`--recording 400`: reads and writes the counters so often, and prints the processor time of each, beside a window of
half a second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lab.telemetry import Telemetry

from trainspec_cli.engine.observe.clock import QueuedTime, StepClock
from trainspec_cli.engine.observe.counters import WINDOW_S, StepCounters
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.conclude import conclude
from trainspec_cli.reporter.diagnosis.evidence import RunEvidence
from trainspec_cli.run.folder.event_types.events import PARTS
from trainspec_cli.run.folder.events import EventWriter

CASES = ("slow_device", "slow_loader", "host_bound", "slow_node")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--compute-s", type=float, default=0.2, help="what a rank computes in a step")
    parser.add_argument("--recording", type=int, default=400)
    options = parser.parse_args()
    print_found(options)
    print_recording(options.recording)


def print_found(options: argparse.Namespace) -> None:
    random = np.random.default_rng(0)
    right, times_s, named_after = 0, [], []
    for number in range(options.cases):
        cause, rank = CASES[number % len(CASES)], int(random.integers(options.ranks))
        first, factor = int(random.integers(5, options.steps // 2)), float(random.uniform(1.25, 3))
        sizes = {"ranks": options.ranks, "steps": options.steps, "ranks_of_node": 8}
        telemetry = Telemetry(**sizes, compute_s=options.compute_s, transfer_s=options.compute_s / 4, seed=number)
        place = disturb(telemetry, cause, rank, first, factor)
        evidence = telemetry.evidence()
        began_s = time.process_time()
        found = conclude(evidence)
        times_s.append(time.process_time() - began_s)
        is_right = _is_named(found, cause, place)
        right += is_right
        if is_right:
            named_after.append(steps_until_named(evidence, cause, place, first))
        if not is_right:
            print(f"{cause} at {place}, {factor:.2f} times: {[(one.cause, one.rank, one.node) for one in found][:3]}")
    print(f"{options.ranks} ranks, {options.steps} steps, load {os.getloadavg()[0]:.1f}")
    print(f"{right} of {options.cases} named with cause and place, and nothing else")
    if named_after:
        print(f"disturbed steps until named: median {statistics.median(named_after):g}, at most {max(named_after)}")
    print(f"to conclude: median processor time {statistics.median(times_s):.2f} s, longest {max(times_s):.2f} s")


def _is_named(found: Sequence[RunVerdict], cause: str, place: tuple[int | None, int | None]) -> bool:
    return [(one.cause, one.rank, one.node) for one in found] == [(cause, *place)]


def steps_until_named(evidence: RunEvidence, cause: str, place: tuple[int | None, int | None], first: int) -> int:
    """Return after how many disturbed steps the right verdict, and no other, is found; `first` counts from 0."""
    later = range(first + 1, len(evidence.steps) + 1)
    return next(made for made in later if _is_named(conclude(_until(evidence, made)), cause, place)) - first


def _until(evidence: RunEvidence, steps: int) -> RunEvidence:
    """Return what was known after so many steps of a run whose connections are not counted."""
    parts_s = {name: series[:steps] for name, series in evidence.parts_s.items()}
    counters = {name: series[:steps] for name, series in evidence.counters.items()}
    return replace(evidence, steps=evidence.steps[:steps], parts_s=parts_s, counters=counters)


def disturb(telemetry: Telemetry, cause: str, rank: int, first: int, factor: float) -> tuple[int | None, int | None]:
    """Disturb a run; return the (rank, node) that is to be named."""
    seconds = (factor - 1) * telemetry.compute_s
    if cause == "slow_loader":
        telemetry.add("data_wait", rank, seconds, first)
    elif cause == "host_bound":
        telemetry.add("other", rank, seconds, first)
    elif cause == "slow_device":
        telemetry.slow(rank, factor, first, cpu_s=seconds)
    else:
        node = telemetry.nodes[rank]
        for one in range(node * telemetry.ranks_of_node, (node + 1) * telemetry.ranks_of_node):
            telemetry.slow(one, factor, first, cpu_s=seconds)
        return None, node
    return rank, None


def print_recording(windows: int) -> None:
    """Print what a window's counters take, with their line on disk, and what a step's own readings take."""
    batch = [(torch.zeros(8, 512, dtype=torch.int64), torch.zeros(8, 512, dtype=torch.int64))]
    counters, clock = StepCounters(torch.device("cpu")), StepClock(torch.device("cpu"))
    parts_s = dict.fromkeys(PARTS, WINDOW_S)
    with tempfile.TemporaryDirectory() as folder:
        writer = EventWriter(Path(folder) / "rank00000.jsonl", 0)
        taken_s = []
        for step in range(windows):
            began_s = time.thread_time()
            event = counters.note_step(step, parts_s, QueuedTime(0.0, 0.0), batch, (1e-4, time.time()))
            assert event is not None, "every step ends a window"
            writer.write(event)
            taken_s.append(time.thread_time() - began_s)
        writer.close()
    exchanges_s = []
    for _ in range(windows):
        began_s = time.thread_time()
        with clock.collective():
            pass
        exchanges_s.append(time.thread_time() - began_s)
    each_s = statistics.median(taken_s)
    print(f"a window's counters: {each_s * 1e3:.3f} ms of processor time, {each_s / WINDOW_S:.3%} of {WINDOW_S} s")
    print(f"an exchange's own readings: {statistics.median(exchanges_s) * 1e6:.1f} us")
    counters.close()


if __name__ == "__main__":
    main()
