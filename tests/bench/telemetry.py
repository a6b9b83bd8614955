"""What measuring speeds takes of a step: `python tests/bench/telemetry.py [--steps 600] [--turns 20]`.

Speeds of ranks: one process trains a tiny llama; every other step also does what `scheduler=advise` does beside it: it
reports its figures in the step's exchange, learns its speed from them and looks for a better division. Prints the
processor time of both, so that other work on the machine hardly counts, and their ratio.

Speeds of links: two tensor-parallel ranks train it in turns of 50 steps without and with samples of their links, as
often as a run takes them. Prints the median over the turns of with / without, and its quartiles, in time and in
processor time of the first rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.balance.batch.division import OwnSamples, even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.scheduling.directives import Directives
from trainspec_cli.engine.run.scheduling.links import StepLinks
from trainspec_cli.engine.run.scheduling.step_scheduler import StepScheduler
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.step_report import StepReport
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.run.channel.worker import SupervisorConnection
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import SAMPLES

WARM_STEPS = 40
RANKS, TURN_STEPS = 2, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rank", nargs=2, metavar=("MEETING", "RANK"), help="be one of the ranks with links")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        print_links(Path(options.rank[0]), int(options.rank[1]), options.turns)
        return
    print_speeds(options)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, f"--turns={options.turns}", "--rank", f"{folder}/meeting"]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, RANKS)]
        subprocess.run([*command, "0"], check=True)
        assert [rank.wait() for rank in others] == [0] * len(others)


def print_speeds(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        times_s = measure(options.steps, Path(folder))
        dist.destroy_process_group()
    off_s, advise_s = (statistics.median(of_mode[WARM_STEPS:]) for of_mode in times_s)
    print(f"load {os.getloadavg()[0]:.1f}; processor time of a step, median of {options.steps // 2 - WARM_STEPS}")
    print(f"off {off_s * 1e3:.3f} ms, advise {advise_s * 1e3:.3f} ms, advise / off {advise_s / off_s:.4f}")


def measure(steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """-> (processor seconds of the steps with scheduler=off, with advise), in turns"""
    plan = build_plan(Case("dense"), "cpu")
    state = build_train_state(plan, torch.device("cpu"))
    own = OwnSamples((0, SAMPLES // 2), (SAMPLES // 2, SAMPLES // 2))
    batch = drawn_batch(plan.spec, state, own)
    journal: Any = SimpleNamespace()
    stop = StopRequest()
    run = TrainingRun(plan, state, RunDir(folder), "", stop, journal, group=0)  # one rank alone has nothing to do
    scheduler = StepScheduler(run, Directives(run, recalls=False), SupervisorLink(SupervisorConnection()))
    times_s: tuple[list[float], list[float]] = ([], [])
    state.clock.restart()
    for step in range(steps):
        advises = step % 2
        started_s = time.process_time()
        report = StepReport(speed=scheduler.report(0) if advises else None)
        outcome = train_step(
            state, batch, global_tokens=plan.tokens_per_step, clip_norm=1.0, make_report=lambda report=report: report
        )
        assert outcome is not None
        parts_s = state.clock.cut().parts_s()
        if advises:
            speeds = [one.speed for one in outcome.reports() if one.speed is not None]
            scheduler.note_step(step, own, parts_s, SAMPLES, speeds)
        times_s[advises].append(time.process_time() - started_s)
    return times_s


def print_links(meeting: Path, rank: int, turns: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    times_s, sampled, cost_s = measure_links(turns)
    if rank == 0:
        share = sampled * cost_s / (TURN_STEPS * sum(taken_s for taken_s, _ in times_s[1::2]))
        print(f"links: {sampled} samples in {turns * TURN_STEPS} steps; load {os.getloadavg()[0]:.1f}")
        print(f"one costs {cost_s * 1e3:.2f} ms by its own account, {share:.3%} of the time in all; of a step:")
        for number, name in enumerate(("time", "processor time")):
            off_s, on_s = ([taken[number] for taken in times_s[half::2]] for half in (0, 1))
            ratios = [on / off for on, off in zip(on_s, off_s, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            each = f"off {statistics.median(off_s) * 1e3:.3f} ms"
            print(f"{name}: {each}, sampled / off {middle:.4f} ({low:.4f} to {high:.4f})")
    leave_processes()


def measure_links(turns: int) -> tuple[list[tuple[float, float]], int, float]:
    """-> (seconds and processor seconds of a step in each turn, by turns without and with samples; samples taken;
    what one of them cost)"""
    plan = build_plan(Case("dense", Layout(tp=RANKS)), "cpu")
    state = build_train_state(plan, torch.device("cpu"))
    own = even_division_of(plan).of_rank(state.mesh.data_rank, 0, SAMPLES)
    batch = drawn_batch(plan.spec, state, own)
    journal: Any = SimpleNamespace(write=lambda event: None)
    links = StepLinks(TrainingRun(plan, state, RunDir("unused"), "", StopRequest(), journal), journal)
    times_s, sampled = [], 0

    def make_step(step: int | None) -> None:
        """Make a step; `step` None: without the links."""
        nonlocal sampled
        if step is not None:
            links.begin(step)
        report = StepReport()
        if step is not None:
            report = StepReport(steps_to_sample=links.steps_to_sample, links=links.report)
        outcome = train_step(
            state, batch, global_tokens=plan.tokens_per_step, clip_norm=1.0, make_report=lambda report=report: report
        )
        assert outcome is not None
        if step is not None:
            links.finish(batch)
            sampled += links.report is not None and not outcome.figures.numel()
        step_s = sum(state.clock.cut().parts_s().values())
        if step is not None:
            said = int(outcome.steps_to_sample)
            reported = [one.links for one in outcome.reports() if one.links is not None]
            links.note_step(step + 1, step_s, reported, said)

    state.clock.restart()
    for step in range(WARM_STEPS):
        make_step(step)
    sampled = 0
    for turn in range(2 * turns):
        first = WARM_STEPS + turn // 2 * TURN_STEPS
        started_s = time.perf_counter(), time.process_time()
        for step in range(first, first + TURN_STEPS):
            make_step(step if turn % 2 else None)
        ended_s = time.perf_counter(), time.process_time()
        taken_s, processor_s = (after - before for before, after in zip(started_s, ended_s, strict=True))
        times_s.append((taken_s / TURN_STEPS, processor_s / TURN_STEPS))
    return times_s, sampled, statistics.median(links._costs_s)


if __name__ == "__main__":
    main()
