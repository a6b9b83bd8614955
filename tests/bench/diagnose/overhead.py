"""What counting for a diagnosis takes of a step of a 30M-parameter llama.

    python -m tests.bench.diagnose.overhead [--pairs 100] [--block-steps 8]

One run of one process counts in every other block of steps and not in those between (`switched/sitecustomize.py`), so
that both have the same process, the same memory and the same neighbours. Prints with / without of adjacent blocks, by
the median and its 90% interval (resampled): in the time of a step; in the processor time of all threads, which other
work on the machine hardly changes; and how long the counting itself takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

MODEL = (
    *("model.num_layers=10", "model.hidden_size=384", "model.num_heads=6", "model.num_kv_heads=6"),
    *("model.head_dim=64", "model.ffn_size=1024", "model.vocab_size=16384"),
)
RECIPE = (
    *("recipe=tiny", *MODEL, "data.seq_len=128", "train.max_steps=1000000", "cluster.devices_per_node=1"),
    *("run.preflight=false", "resilience=none", "resilience.hang_floor_s=null", "precision=fp32", "run.dir=run"),
)
TIMEOUT_S = 3600.0
SWITCHED = Path(__file__).parent / "switched"
RESAMPLED = 2000


@dataclass(frozen=True)
class Step:
    """A step's end: whether counting was on, and the clocks before (`at_s`) and after it (`processor_s`)."""

    step: int
    counts: bool
    note_s: float
    """Seconds that the counting took."""
    at_s: float
    processor_s: float
    """Processor time of all threads since the process began."""


@dataclass(frozen=True)
class Block:
    counts: bool
    step_s: float
    processor_s: float
    """Of a step, as the next two."""
    note_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--block-steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="samples of 128 tokens per step")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    steps = observe(options.batch, options.block_steps, (2 * options.pairs + 2) * options.block_steps)
    report(blocks_of(steps, options.block_steps)[1:])


def observe(batch: int, block: int, steps: int) -> list[Step]:
    """Return the steps of a run that is ended after so many."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "steps.jsonl", Path(folder) / "log"
        path = os.pathsep.join((str(SWITCHED), str(Path.cwd()), os.environ.get("PYTHONPATH", "")))
        switched = {"SWITCHED_OUT": str(out), "SWITCHED_BLOCK": str(block)}
        command = [sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, f"batching.global_batch_size={batch}"]
        environment = {**os.environ, **switched, "PYTHONPATH": path}
        with log.open("w") as output:
            run = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not out.exists() or out.read_text().count("\n") < steps:
                assert run.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(2.0)
        finally:
            run.terminate()
            run.wait()
        return [Step(**json.loads(line)) for line in out.read_text().splitlines()[:steps]]


def blocks_of(steps: Sequence[Step], block: int) -> list[Block]:
    """Return whole blocks. A step is from the end of the one before to its own; a block's first, in which counting is
    switched, is left out."""
    found: dict[int, list[tuple[Step, Step]]] = defaultdict(list)
    for before, after in pairwise(steps):
        if after.step % block:
            found[after.step // block].append((before, after))
    whole = [pairs for _, pairs in sorted(found.items()) if len(pairs) == block - 1]
    return [_block(pairs) for pairs in whole]


def _block(pairs: Sequence[tuple[Step, Step]]) -> Block:
    return Block(
        counts=pairs[0][1].counts,
        step_s=statistics.median(after.at_s - before.at_s for before, after in pairs),
        processor_s=(pairs[-1][1].processor_s - pairs[0][0].processor_s) / len(pairs),
        note_s=sum(after.note_s for _, after in pairs) / len(pairs),
    )


def report(blocks: Sequence[Block]) -> None:
    adjacent = [(first, second) for first, second in zip(blocks[::2], blocks[1::2], strict=False)]
    pairs = [(first, second) if first.counts else (second, first) for first, second in adjacent]
    bare = statistics.median(without.step_s for _, without in pairs)
    noted = statistics.fmean(on.note_s for on, _ in pairs)
    print(f"load {os.getloadavg()[0]:.1f}; {len(pairs)} pairs of blocks; {1e3 * bare:.1f} ms per step without")
    print(f"with / without in time: {_median([on.step_s / without.step_s for on, without in pairs])}")
    print(f"with / without in processor time: {_median([on.processor_s / off.processor_s for on, off in pairs])}")
    print(f"counting takes {1e3 * noted:.3f} ms per step, {noted / bare:.2%} of it")


def _median(ratios: Sequence[float]) -> str:
    """Return the median with its 90% interval, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    low, high = medians[RESAMPLED // 20], medians[-RESAMPLED // 20]
    return f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


if __name__ == "__main__":
    main()
