"""What compressed gradients cost in loss, and save in time: `python tests/bench/compression.py loss|step`.

`loss` trains a tiny llama on the bytes of Python's standard library, with two ranks' halves of each batch computed one
after the other in one process and their gradients summed as the ranks would sum them, in each format, on the same
samples from the same seed. It prints held-out losses, and their ratios to those of full sums. `nudged` are full sums in
which one rank's gradients are larger by a millionth: what rounding alone does to a loss.

`step --rank R --file F` is one of two processes that train a llama of some million parameters by data parallelism, and
prints the time of a step in each format, in turns. Start them where the link between them is what is to be tried:

    lab/netns.sh up 2; lab/netns.sh rate 1 100mbit; lab/netns.sh rate 2 100mbit
    for r in 0 1; do lab/netns.sh exec $((r+1)) python tests/bench/compression.py step --rank $r --file /tmp/f & done
"""

from __future__ import annotations

import argparse
import os
import statistics
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.batch import learning_rate
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.comm.compressed import CompressedSum, Feedback
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.optim.optimizer import clear_gradients, set_learning_rate
from trainspec_cli.engine.run.pipeline_run import forward_only
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, ScheduleSpec, WireFormats
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan

SEQ_LEN, HELD_OUT, RANKS = 64, 1024, 2
FORMATS = tuple(WireFormats(gradients=name) for name in ("full", "bf16", "int8", "int4"))
TIMED = {
    "replicas": (Layout(dp_replicate=RANKS), FORMATS),
    "shards": (
        Layout(dp_shard=RANKS),
        (*FORMATS, WireFormats(parameters="int8"), *(WireFormats(name, "int8") for name in ("int8", "int4"))),
    ),
}
"""Layouts and formats whose steps are timed."""
TINY = DecoderModel(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=160, vocab_size=256
)
LARGER = DecoderModel(
    num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=768, vocab_size=4096
)


def plan_of(model: DecoderModel, options: argparse.Namespace, seed: int, layout: Layout, comm: WireFormats) -> Plan:
    rate = ScheduleSpec(kind="cosine", warmup_steps=options.steps // 20, final_lr_ratio=0.02)
    plan = build_plan(Case("dense", layout), "cpu")
    spec = replace(
        plan.spec,
        model=model,
        optim=OptimSpec(lr=options.lr, schedule=rate),
        batching=BatchingSpec(global_batch_size=options.batch),
        train=replace(plan.spec.train, max_steps=options.steps, seed=seed),
    )
    return replace(plan, spec=spec, comm=comm)


# Loss


@dataclass
class Hall:
    """A wire between threads."""

    sent: dict[int, Tensor] = field(default_factory=dict)
    barrier: Barrier = field(default_factory=lambda: Barrier(RANKS))

    def all(self, rank: int, sent: Tensor) -> Tensor:
        self.sent[rank] = sent
        self.barrier.wait()
        everything = torch.stack([self.sent[one] for one in range(RANKS)])
        self.barrier.wait()
        return everything


@dataclass(frozen=True)
class ThreadWire:
    hall: Hall
    rank: int
    size: int = RANKS

    def swap_rows(self, sent: Tensor) -> Tensor:
        return self.hall.all(self.rank, sent)[:, self.rank]

    def gather_rows(self, own: Tensor) -> Tensor:
        return self.hall.all(self.rank, own)


class TwoHalves:
    """The other rank's half of each batch, and the sum of both."""

    def __init__(self, name: str, pool: ThreadPoolExecutor):
        self.codec, self.pool, self.hall = GRADIENT_CODECS.get(name), pool, Hall()
        self.nudge = 1 + 1e-6 * (name == "nudged")
        self.feedbacks: list[Feedback] = []
        self.other: list[MicroBatch] = []
        self.tokens = 0

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        own = self._flat(state)
        clear_gradients(state.shares)
        loss += compute_gradients(state, self.other, self.tokens)
        both = [own, self._flat(state)]
        summed = self._sum(both)
        for share, part in zip(state.shares, summed.split([s.local.numel() for s in state.shares]), strict=True):
            assert share.gradient is not None
            share.gradient.copy_(part.view_as(share.gradient))

    def _flat(self, state: TrainState) -> Tensor:
        return torch.cat([share.gradient.flatten() for share in state.shares if share.gradient is not None])

    def _sum(self, own: list[Tensor]) -> Tensor:
        if self.codec is None:
            return own[0] * self.nudge + own[1]
        codec = self.codec
        self.feedbacks = self.feedbacks or [Feedback(len(own[0]), own[0].device) for _ in own]

        def of_rank(rank: int) -> None:
            feedback = self.feedbacks[rank] if codec.feeds_back else None
            CompressedSum(codec, feedback).all_reduce_(own[rank], ThreadWire(self.hall, rank))

        list(self.pool.map(of_rank, range(RANKS)))
        for feedback in self.feedbacks:
            feedback.end_step(torch.zeros(()))
        assert torch.equal(own[0], own[1])
        return own[0]

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        pass

    def abandon_passes(self, state: TrainState) -> None:
        pass

    def commit(self) -> bool:
        return True


def read_windows() -> Tensor:
    """(N, SEQ_LEN + 1) of int64: the modules' bytes in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    whole = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    count = len(whole) // (SEQ_LEN + 1)
    return torch.from_numpy(np.frombuffer(whole, np.uint8, count * (SEQ_LEN + 1)).reshape(count, -1).astype(np.int64))


def train(plan: Plan, name: str, windows: Tensor, held_out: Tensor, pool: ThreadPoolExecutor) -> float:
    """Return the held-out loss, in nats a byte."""
    steps, samples = plan.spec.train.max_steps, plan.spec.batching.global_batch_size
    order = torch.from_numpy(np.random.default_rng(plan.spec.train.seed).permutation(len(windows)))
    state, halves = build_train_state(plan, torch.device("cpu")), TwoHalves(name, pool)
    halves.tokens = samples * SEQ_LEN
    for step in range(steps):
        taken = windows[order[step * samples : (step + 1) * samples]]
        assert len(taken) == samples, "the standard library is too small for so many samples"
        first, second = [(half[:, :-1].contiguous(), half[:, 1:].contiguous()) for half in taken.chunk(RANKS)]
        halves.other = [second]
        set_learning_rate(state.optimizer, learning_rate(plan.spec.optim.schedule, plan.spec.optim.lr, step, steps))
        train_step(state, [first], global_tokens=halves.tokens, clip_norm=1.0, groups=halves)
    loss = forward_only(state.stages, held_out[:, :-1].contiguous(), held_out[:, 1:].contiguous())
    assert loss is not None, "there is one stage"
    return loss.item() / held_out[:, 1:].numel()


def compare_losses(options: argparse.Namespace) -> None:
    windows = read_windows()
    chosen = torch.from_numpy(np.random.default_rng(7).permutation(len(windows)))
    held_out, windows = windows[chosen[:HELD_OUT]], windows[chosen[HELD_OUT:]]
    formats = tuple(options.formats.split(","))
    ratios: dict[str, list[float]] = {name: [] for name in formats}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as pool:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        for seed in range(options.seeds):
            plan = plan_of(TINY, options, seed, Layout(), WireFormats())
            losses = {name: train(plan, name, windows, held_out, pool) for name in formats}
            for name, loss in losses.items():
                ratios[name].append(loss / losses["full"] - 1)
            print(
                f"seed {seed}:", *(f"{n} {loss:.4f} ({ratios[n][-1]:+.2%})" for n, loss in losses.items()), flush=True
            )
        dist.destroy_process_group()
    print("means:", *(f"{name} {statistics.mean(found):+.2%}" for name, found in ratios.items()))


# Time


def time_steps(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", init_method=f"file://{options.file}", rank=options.rank, world_size=RANKS)
    tokens = torch.randint(0, LARGER.vocab_size, (options.batch // RANKS, SEQ_LEN + 1))
    samples = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    states = {
        (kind, comm): build_train_state(plan_of(LARGER, options, 0, layout, comm), torch.device("cpu"))
        for kind, (layout, formats) in TIMED.items()
        for comm in formats
        if kind in options.layouts.split(",")
    }
    times: dict[tuple[str, WireFormats], list[float]] = {key: [] for key in states}
    for turn in range(options.turns + 1):
        for key, state in states.items():
            state.wire.find_connections()
            dist.barrier()
            started = time.perf_counter()
            train_step(state, samples, global_tokens=options.batch * SEQ_LEN, clip_norm=1.0)
            if turn:
                times[key].append(time.perf_counter() - started)
    if options.rank == 0:
        params = sum(part.numel() for model in next(iter(states.values())).parts for part in model.parameters())
        print(f"{params / 1e6:.1f}M parameters, {options.batch} samples of {SEQ_LEN} tokens, {options.turns} turns")
        for (kind, comm), state in states.items():
            seconds, full_s = (statistics.median(times[kind, one]) for one in (comm, WireFormats()))
            moved = [state.wire.counted[purpose] / (options.turns + 1) / 1e6 for purpose in ("gradients", "parameters")]
            print(
                f"{kind}, gradients {comm.gradients}, parameters {comm.parameters}: {seconds:.3f} s per step, "
                f"{full_s / seconds:.2f} times full, {moved[0]:.2f} + {moved[1]:.2f} MB per rank"
            )
    dist.barrier()
    leave_processes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "step"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="samples of 64 tokens")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--formats", default="full,nudged,bf16,int8,int4", help="for the loss")
    parser.add_argument("--layouts", default="replicas,shards", help="for the time")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--file", help="where the two processes meet; there must be none yet")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; {vars(options)}", flush=True)
    torch.set_num_threads(1)
    compare_losses(options) if options.what == "loss" else time_steps(options)


if __name__ == "__main__":
    main()
