"""What a batch that grows in place of a falling learning rate saves and costs: `python tests/bench/seesaw.py`.

Trains a tiny llama on the bytes of Python's standard library, one process on one thread, with a constant batch and a
cosine, and with `batching=seesaw` (arXiv:2510.14717) on the same samples from the same seed, in turns. Prints the steps
and the held-out loss of each, and their ratios; and how large the batch is beside the gradient noise scale, measured on
the constant batch: Seesaw keeps the loss while the batch stays well below it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.batch import (
    BatchSchedule,
    NoiseAverage,
    NoiseMeasurement,
    PartSquares,
    measure_noise,
    schedule_batches,
)
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.optim.optimizer import clear_gradients, set_learning_rate, squared_norm
from trainspec_cli.engine.run.pipeline_run import forward_only
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.engine.run.training_run import TrainProgress
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, ScheduleSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan

SEQ_LEN, HELD_OUT, MICRO_BATCH = 64, 1024, 64
PARTS, PART_SAMPLES = 8, 32
"""What the noise of the gradients is measured on: windows that are drawn from all of them."""
PROBED = 4
"""Steps in a row, about which the noise is averaged."""
MODEL = DecoderModel(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=160, vocab_size=256
)


@dataclass(frozen=True)
class Trained:
    steps: int
    loss: float
    """Of what was held out, in nats a byte."""
    noise_scales: tuple[float, ...]
    """In samples, about each of the places where it was asked for."""


def read_windows() -> Tensor:
    """(N, SEQ_LEN + 1) of int64: the modules' bytes in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    whole = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    count = len(whole) // (SEQ_LEN + 1)
    cut = np.frombuffer(whole, np.uint8, count * (SEQ_LEN + 1)).reshape(count, -1)
    return torch.from_numpy(cut.astype(np.int64))


def plan_of(options: argparse.Namespace, seed: int, schedule: BatchScheduleSpec) -> Plan:
    rate = ScheduleSpec(kind="cosine", warmup_steps=options.steps // 20, final_lr_ratio=options.final)
    plan = build_plan(Case("dense"), "cpu")
    spec = replace(
        plan.spec,
        model=MODEL,
        optim=OptimSpec(lr=options.lr, schedule=rate),
        batching=BatchingSpec(global_batch_size=options.batch, schedule=schedule),
        train=replace(plan.spec.train, max_steps=options.steps, seed=seed),
    )
    return replace(plan, spec=spec)


def train(plan: Plan, windows: Tensor, held_out: Tensor, probed: Sequence[int] = ()) -> Trained:
    """Train on the windows in an order that the seed says, each once; measure the noise from `probed` samples on."""
    order = torch.from_numpy(np.random.default_rng(plan.spec.train.seed).permutation(len(windows)))
    state, pace, progress = build_train_state(plan, torch.device("cpu")), StepPace(plan.spec), TrainProgress()
    noise, chance = [NoiseAverage() for _ in probed], np.random.default_rng(plan.spec.train.seed)
    while batch := pace.batch(progress):
        for place, start in enumerate(probed):
            if start <= progress.samples < start + PROBED * batch.samples:
                drawn = windows[chance.integers(len(windows), size=PARTS * PART_SAMPLES)]
                noise[place] = noise[place].updated(measure_gradients(state, drawn), PROBED)
        taken = windows[order[progress.samples : progress.samples + batch.samples]]
        assert len(taken) == batch.samples, "the standard library is too small for so many samples"
        set_learning_rate(state.optimizer, batch.lr)
        parts = [split(part) for part in taken.split(MICRO_BATCH)]
        train_step(state, parts, global_tokens=batch.samples * SEQ_LEN, clip_norm=plan.spec.optim.grad_clip_norm)
        progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)
    loss = forward_only(state.stages, *split(held_out))
    assert loss is not None, "there is one stage"
    return Trained(
        progress.step,
        loss.item() / held_out[:, 1:].numel(),
        tuple(average.noise_scale or 0.0 for average in noise),
    )


def split(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, SEQ_LEN) of inputs and as much of what follows each."""
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def measure_gradients(state: TrainState, windows: Tensor) -> NoiseMeasurement:
    """Measure the noise between the gradients of equal parts of the windows; nothing is updated."""
    squares, summed = 0.0, [torch.zeros_like(share.local) for share in state.shares]
    for part in windows.split(PART_SAMPLES):
        compute_gradients(state, [split(part)], PART_SAMPLES * SEQ_LEN)
        squares += squared_norm(state.shares).item()
        for total, share in zip(summed, state.shares, strict=True):
            assert share.gradient is not None
            total += share.gradient
        clear_gradients(state.shares)
    square = sum((total / PARTS).double().square().sum().item() for total in summed)
    return measure_noise(len(windows), [PartSquares(squares / PARTS, square, PARTS)])


def places_to_probe(schedule: BatchSchedule) -> list[tuple[int, int]]:
    """Return (samples trained, samples of a step) where each size begins, and at the end."""
    stages = [(stage.from_samples, stage.step_samples) for stage in schedule.stages[1:]]
    return [*stages, (schedule.run_samples - PROBED * schedule.start_samples, stages[-1][1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=3200, help="of the constant batch")
    parser.add_argument("--batch", type=int, default=4, help="samples of 64 bytes")
    parser.add_argument("--final", type=float, default=0.1, help="the last learning rate, as a fraction of the peak")
    parser.add_argument("--growth", type=float, default=1.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; {vars(options)}", flush=True)
    torch.set_num_threads(1)
    windows = read_windows()
    chosen = torch.from_numpy(np.random.default_rng(7).permutation(len(windows)))
    held_out, windows = windows[chosen[:HELD_OUT]], windows[chosen[HELD_OUT:]]
    seesaw = BatchScheduleSpec(kind="seesaw", growth=options.growth)
    fewer, losses = [], []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        for seed in range(options.first, options.first + options.seeds):
            plan = plan_of(options, seed, seesaw)
            places = places_to_probe(schedule_batches(plan.spec))
            asked = [samples for samples, _ in places]
            constant = train(plan_of(options, seed, BatchScheduleSpec()), windows, held_out, asked)
            grown = train(plan, windows, held_out)
            fewer.append(1 - grown.steps / constant.steps)
            losses.append(grown.loss / constant.loss)
            print(
                f"seed {seed}: steps {constant.steps} and {grown.steps} ({fewer[-1]:.1%} fewer), "
                f"held-out loss {constant.loss:.4f} and {grown.loss:.4f} ({losses[-1] - 1:+.2%})",
                flush=True,
            )
            beside = [f"{size} of {scale:.0f}" for (_, size), scale in zip(places, constant.noise_scales, strict=True)]
            print(f"  the batch beside the noise scale, as it grows and at the end: {', '.join(beside)}", flush=True)
        dist.destroy_process_group()
    print(f"{statistics.mean(fewer):.1%} fewer steps, loss {statistics.mean(losses) - 1:+.2%} (means)")


if __name__ == "__main__":
    main()
