"""What of a step's exchanges is exposed: `python tests/bench/overlap.py [--steps 12] [--only groups,dp,fsdp3]`.

Processes train a tiny llama in each layout. Its blocks take a while in the backward, and an exchange takes as long as
its bytes do on a slow link: both sleep, so that other work on the machine hardly counts. Steps that go on with the
backward while gradients are exchanged, and steps that wait for each exchange, take turns in one run. Prints the time of
both, and the exposed part of the exchanges that the intervals of rank 0 show: also of what no gradient is in, such as
the tensors of tensor parallelism, the parameters that ZeRO gathers, and waiting for another stage of a pipeline.

`groups`: the packets of one process to other replica groups, whose links alone are slow; its exposed part is set beside
what it has to be by the sleeps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples, even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.comm.exchange import sent_bytes
from trainspec_cli.engine.comm.forking import Background
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.elastic import cross_group
from trainspec_cli.engine.elastic.cross_group import GradientPackets, names_outside_blocks, packets_in_order
from trainspec_cli.engine.observe.clock import Segments
from trainspec_cli.engine.parallel import data_parallel, gradient_sums
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import SAMPLES

BLOCK_S = 0.15
"""Of a block's backward."""
LINK_BYTES_PER_S = 1e6
PACKET_BYTES = 2**14
LAYOUTS = {
    "dp": Layout(dp_replicate=2),
    "fsdp1": Layout(dp_shard=2, zero_stage=1),
    "fsdp2": Layout(dp_shard=2, zero_stage=2),
    "fsdp3": Layout(dp_shard=2),
    "tp": Layout(dp_replicate=2, tp=2),
    "pp": Layout(dp_replicate=2, pp=2),
}
Seen = dict[bool, list[tuple[float, float]]]
"""(time of a step, exposed part of its exchanges), of steps that wait for each exchange and of those that do not."""
MICRO_BATCH_SAMPLES = 2
"""Two micro-batches per rank: ZeRO-2 and 3 exchange gradients after each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default=",".join(["groups", *LAYOUTS]))
    parser.add_argument("--rank", nargs=2, metavar=("MEETING", "RANK"), help="be one of the ranks of the layout --only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        be_rank(options.only, options.rank[0], int(options.rank[1]), options.steps)
        return
    print(f"load {os.getloadavg()[0]:.1f}; medians of {options.steps // 2 - 1} steps each, in turns")
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if name == "groups":
                measure_alone(f"{folder}/meeting", options.steps)
                continue
            command = [sys.executable, __file__, f"--steps={options.steps}", f"--only={name}", "--rank", folder]
            ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(LAYOUTS[name].world_size)]
            if any(rank.wait() for rank in ranks):
                raise SystemExit(f"{name}: a rank has failed")


def measure_alone(meeting: str, steps: int) -> None:
    cross_group.LARGE_BYTES = PACKET_BYTES
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    measure(steps)
    dist.destroy_process_group()


# Ranks of one layout


class Link:
    """Every exchange of a rank takes as long as the bytes that it sends do on a slow link."""

    def __init__(self) -> None:
        self._inside = threading.local()
        """Exchanges that another one is made of are no others."""
        exchange.all_gather = self._slowed(exchange.all_gather, 1)
        data_parallel.all_gather = exchange.all_gather  # type: ignore[attr-defined]
        exchange.reduce_scatter = self._slowed(exchange.reduce_scatter, 1)
        gradient_sums.reduce_scatter = exchange.reduce_scatter  # type: ignore[attr-defined]
        gradient_sums.all_reduce_ = self._slowed(exchange.all_reduce_, 2)  # type: ignore[attr-defined]
        dist.all_reduce = self._slowed(dist.all_reduce, 2)

    def _slowed(self, collective: Callable[..., Any], passes: int) -> Callable[..., Any]:
        def slowed(*tensors: Any, **options: Any) -> Any:
            if getattr(self._inside, "is_busy", False):
                return collective(*tensors, **options)
            self._inside.is_busy = True
            try:
                whole = max((one for one in tensors if isinstance(one, Tensor)), key=torch.numel)
                ranks = dist.get_world_size(options.get("group") or next(iter(tensors[2:]), None))
                time.sleep(passes * sent_bytes(whole.nbytes, ranks) / LINK_BYTES_PER_S)
                return collective(*tensors, **options)
            finally:
                self._inside.is_busy = False

        return slowed


def be_rank(name: str, folder: str, rank: int, steps: int) -> None:
    layout = LAYOUTS[name]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=layout.world_size)
    Link()
    plan = build_plan(Case("dense", layout, micro_batch_size=MICRO_BATCH_SAMPLES), "cpu")
    state = build_train_state(plan, torch.device("cpu"))
    for part in state.parts:
        for block in part.block_modules():
            block.register_full_backward_hook(lambda *_: time.sleep(BLOCK_S))
    batch = drawn_batch(plan.spec, state, even_division_of(plan).of_rank(state.mesh.data_rank, 0, SAMPLES))
    seen: Seen = {False: [], True: []}
    assert state.sums is not None
    state.clock.restart()
    for step in range(steps):
        state.sums.holds_back = bool(step % 2)
        train_step(state, batch, global_tokens=plan.tokens_per_step, clip_norm=1.0)
        seen[state.sums.holds_back].append(exposed_in(state.clock.cut()))
        dist.barrier()
        state.clock.restart()
    if rank == 0:
        print_turns(name, seen)
    leave_processes()


def exposed_in(segments: Segments) -> tuple[float, float]:
    """Return the time of a step, and the exposed part of its exchanges."""
    exchanged, parts_s = segments.exchange_time(), segments.parts_s()
    return sum(parts_s.values()), exchanged[1] / exchanged[0] if exchanged else 1.0


def print_turns(name: str, seen: Seen, truths: dict[bool, float] | None = None) -> None:
    times_s = {}
    for holds_back, kind in ((True, "waited for"), (False, "overlapped")):
        of_kind = seen[holds_back][1:]
        times_s[holds_back], exposed = (statistics.median(values) for values in zip(*of_kind, strict=True))
        line = f"{name:6}  {kind:10}  {times_s[holds_back]:.3f} s per step, exposed {exposed:.1%}"
        if truths:
            worst = max(abs(one - truths[holds_back]) for _, one in of_kind)
            line += f", by the sleeps {truths[holds_back]:.1%}, at most {100 * worst:.1f} points off"
        print(line)
    print(f"{name:6}  overlapped / waited for {times_s[False] / times_s[True]:.3f}", flush=True)


# Replica groups


class Groups:
    """Other groups behind a slow link."""

    def __init__(self, state: TrainState):
        self.exchanged_s = 0.0
        ordered = packets_in_order(state.shares, names_outside_blocks(state.parts), ())
        self.sizes_s = [sum(share.local.nbytes for share in packet.shares) / LINK_BYTES_PER_S for packet in ordered]
        self.packets = GradientPackets(ordered, (), self._sum, Background(state.device, state.clock.note_beside))
        self.holds_back = False

    def _sum(self, _number: int, flat: Tensor) -> None:
        time.sleep(flat.nbytes / LINK_BYTES_PER_S)

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        self.packets.begin(0 if self.holds_back else micro_batches)

    def abandon_passes(self, state: TrainState) -> None:
        self.packets.abandon()

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        with state.clock.collective():
            self.packets.finish()

    def commit(self) -> bool:
        return True


def measure(steps: int) -> None:
    plan = build_plan(Case("dense"), "cpu")
    state = build_train_state(plan, torch.device("cpu"))
    (part,) = state.parts
    blocks = part.block_modules()
    for block in blocks:
        block.register_full_backward_hook(lambda *_: time.sleep(BLOCK_S))
    groups, batch = Groups(state), drawn_batch(plan.spec, state, OwnSamples((0,), (SAMPLES,)))
    seen: Seen = {False: [], True: []}
    state.clock.restart()
    for step in range(steps):
        groups.holds_back = bool(step % 2)
        train_step(state, batch, global_tokens=plan.tokens_per_step, clip_norm=1.0, groups=groups)
        seen[groups.holds_back].append(exposed_in(state.clock.cut()))
    print_turns("groups", seen, {True: 1.0, False: true_share(state, groups, len(blocks))})


def true_share(state: TrainState, groups: Groups, blocks: int) -> float:
    """Return the exposed part by the sleeps: a block's packets can go when its backward is done, one after another."""
    outside, ready_s = names_outside_blocks(state.parts), []
    for packet in groups.packets._packets:
        first = min(_block_of(share.name, blocks, outside) for share in packet.shares)
        ready_s.append(BLOCK_S * (blocks - first))
    ready_s = list(accumulate(ready_s, max))
    done_s = going_s = exposed_s = 0.0
    computed_s = BLOCK_S * blocks
    for ready, size_s in zip(ready_s, groups.sizes_s, strict=True):
        begun_s = max(done_s, ready)
        done_s = begun_s + size_s
        going_s += size_s
        exposed_s += max(0.0, done_s - max(begun_s, computed_s))
    return exposed_s / going_s


def _block_of(name: str, blocks: int, outside: Any) -> int:
    return 0 if name in outside else int(name.split(".")[1])


if __name__ == "__main__":
    main()
