"""What measuring speeds takes of a step: `python tests/bench/telemetry.py [--steps 600]`.

One process trains a tiny llama; every other step also does what `scheduler=advise` does beside it: it reports its
figures in the step's exchange, learns its speed from them and looks for a better division. Prints the processor time of
both, so that other work on the machine hardly counts, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.certify.families import SAMPLES
from trainspec_cli.engine.build.train_state import build_train_state
from trainspec_cli.engine.run.directives import Directives
from trainspec_cli.engine.run.scheduling import StepScheduler
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.engine.tools.certify_batches import drawn_batch
from trainspec_cli.policy.division import OwnSamples
from trainspec_cli.rundir.paths import RunDir

WARM_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
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
    run_dir = RunDir(folder)
    directives = Directives(run_dir, journal, plan.layout, recalls=False)
    link = SupervisorLink(run_dir, journal)
    scheduler = StepScheduler(plan, state, directives, 0, link)  # of one rank alone there is nothing to do
    times_s: tuple[list[float], list[float]] = ([], [])
    state.clock.restart()
    for step in range(steps):
        advises = step % 2
        started_s = time.process_time()
        figures = scheduler.figures(0) if advises else ()
        outcome = train_step(state, batch, global_tokens=plan.tokens_per_step, clip_norm=1.0, figures=figures)
        assert outcome is not None
        parts_s = state.clock.cut().parts_s()
        if advises:
            scheduler.note_step(step, own, parts_s, SAMPLES, outcome.figures)
        times_s[advises].append(time.process_time() - started_s)
    return times_s


if __name__ == "__main__":
    main()
