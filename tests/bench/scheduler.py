"""What the scheduler wins and costs: `python tests/bench/scheduler.py won|telemetry|solve [options]`.

won        one process of four becomes half as fast: the share of the lost time that is won back, by layout, beside what
           the speeds and whole samples allow; passes sleep, so that the machine's own speed hardly counts
telemetry  step time with scheduler=advise against off, runs in turns
solve      processor time to divide samples over thousands of ranks
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.balance import best_division, solve_counts
from trainspec_cli.balance.decisions.speeds import CONFIRMING_STEPS, Speed
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

PROCESSES, SAMPLES, SLOWED, STEPS, SETTLED_STEPS = 4, 64, 14, 50, 10
SLOW_FACTOR = 2.0
RECIPE = ("recipe=tiny", f"cluster.devices_per_node={PROCESSES}", "precision=fp32", "train.log_interval_steps=1000")


@dataclass(frozen=True)
class Case:
    name: str
    changes: tuple[str, ...]
    slow_process: int
    data_ranks: int
    stages: int = 1


CASES = (
    Case("dp=4, ZeRO-1", ("layout=fsdp", "layout.zero_stage=1"), 2, 4),
    Case("dp=4, ZeRO-3", ("layout=fsdp", "layout.zero_stage=3"), 2, 4),
    Case("pp=2 x dp=2", ("layout.pp=2", "layout.dp_shard=2", "batching.micro_batch_size=4"), 3, 2, stages=2),
    Case("tp=2 x dp=2", ("layout.tp=2", "layout.dp_shard=2"), 3, 2),
)


def launch(place: Path, name: str, *changes: str) -> RunDir:
    command = [sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, *changes, f"run.dir={name}"]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    return RunDir(place / name)


def step_times_s(run: RunDir) -> dict[int, float]:
    return {e["step"]: e["step_time_s"] for e in read_events(run.events(0)) if e["type"] == "step"}


def won(options: argparse.Namespace) -> None:
    print(f"load {os.getloadavg()[0]:.1f}; {options.sample_s:g} s per sample, {SAMPLES} samples per step")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            if options.only in case.name:
                report(case, options.sample_s, *run_case(case, options.sample_s, Path(folder), f"run{number}"))


def run_case(case: Case, sample_s: float, place: Path, name: str) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """-> (step times, directives)"""
    throttles = [f"throttle(step=0,rank={rank},seconds={sample_s},steps={STEPS})" for rank in range(PROCESSES)]
    extra_s = sample_s * (SLOW_FACTOR - 1)
    throttles.append(f"throttle(step={SLOWED},rank={case.slow_process},seconds={extra_s},steps={STEPS})")
    settings = (f"train.max_steps={STEPS}", f"batching.global_batch_size={SAMPLES}", "scheduler=auto")
    run = launch(place, name, *settings, *case.changes, f"fault={';'.join(throttles)}")
    return step_times_s(run), [line for line in read_events(run.directives) if line["type"] == "directive"]


def report(case: Case, sample_s: float, times_s: dict[int, float], directives: list[dict[str, Any]]) -> None:
    """What a healthy step takes beyond its sleeps is taken to be the same in all others."""
    if not directives:
        print(f"{case.name:14} no directive")
        return
    own_s = sample_s / case.stages
    healthy_s = statistics.median(times_s[step] for step in range(4, SLOWED + 1))
    slow_s = statistics.median(times_s[step] for step in range(SLOWED + 1, directives[0]["step"] + 1))
    settled_s = statistics.median(times_s[step] for step in range(STEPS - SETTLED_STEPS + 1, STEPS + 1))
    other_s = healthy_s - SAMPLES / case.data_ranks * own_s
    speeds = [Speed(0.0, own_s * (SLOW_FACTOR if rank == 0 else 1.0)) for rank in range(case.data_ranks)]
    real_s = SAMPLES / sum(1 / speed.per_sample_s for speed in speeds) + other_s
    counts = solve_counts(SAMPLES, 1, speeds, SAMPLES)
    whole_s = max(speed.time_s(count, 1) for speed, count in zip(speeds, counts, strict=True)) + other_s
    by_speeds, by_samples = ((slow_s - settled_s) / (slow_s - ideal_s) for ideal_s in (real_s, whole_s))
    delay = directives[0]["step"] - (SLOWED + CONFIRMING_STEPS)
    shares = "; ".join(f"step {line['step']}: {line['counts']}" for line in directives)
    print(
        f"{case.name:14} healthy {healthy_s:.3f} s, slow {slow_s:.3f} s, settled {settled_s:.3f} s: won back "
        f"{by_speeds:.0%} of what speeds allow, {by_samples:.0%} of what whole samples allow; first directive {delay} "
        f"steps after the change could be confirmed ({shares})",
        flush=True,
    )


def telemetry(options: argparse.Namespace) -> None:
    print(f"load {os.getloadavg()[0]:.1f}")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            medians_s = {}
            modes = ("off", "advise") if turn % 2 else ("advise", "off")
            for mode in modes:
                run = launch(Path(folder), f"{mode}{turn}", "train.max_steps=300", f"scheduler={mode}")
                medians_s[mode] = statistics.median(list(step_times_s(run).values())[20:])
            ratios.append(medians_s["advise"] / medians_s["off"])
            print(f"off {medians_s['off'] * 1e3:.2f} ms, advise {medians_s['advise'] * 1e3:.2f} ms", flush=True)
    print(f"advise / off: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def solve(_options: argparse.Namespace) -> None:
    draw = random.Random(0)
    for ranks in (256, 4096, 16384):
        speeds = [Speed(0.1, draw.lognormvariate(0, 0.3)) for _ in range(ranks)]
        for samples in (8, 64):
            even = Division((1.0,) * ranks, samples)
            counts_s = best_s(partial(solve_counts, ranks * samples, 1, speeds, 2 * samples))
            division_s = best_s(partial(best_division, even, ranks * samples, speeds, 2 * samples, 0.0))
            print(
                f"{ranks} ranks x {samples} samples: counts {counts_s * 1e3:.1f} ms, division {division_s * 1e3:.1f} ms"
            )


def best_s(divide: Callable[[], object], tries: int = 5) -> float:
    times_s = []
    for _ in range(tries):
        started = time.process_time()
        divide()
        times_s.append(time.process_time() - started)
    return min(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["won", "telemetry", "solve"])
    parser.add_argument("--sample-s", type=float, default=0.04, help="what all passes of a sample sleep")
    parser.add_argument("--only", default="", help="layouts whose name has this in it")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    {"won": won, "telemetry": telemetry, "solve": solve}[options.what](options)


if __name__ == "__main__":
    main()
