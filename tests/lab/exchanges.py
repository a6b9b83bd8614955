"""Real exchanges on the devices of an emulated fabric, timed: gloo's and the engine's, as a run makes them.

Every device is a process in its own network namespace. All groups of an exchange communicate at the same time, as in a
run.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from lab.fabric import enter, namespace_of
from trainspec_cli.engine.comm.exchange import Tiers, all_gather, reduce_scatter, swap_rows
from trainspec_cli.recipe.results.blueprint import Algorithm, Operation

SETTLE_S = 0.05
"""Time from the agreement on a start to the start, beyond the delays of the fabric."""
TIMEOUT_S = 300.0

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Trial:
    """One exchange by one algorithm, in all groups of an axis."""

    operation: Operation
    algorithm: Algorithm
    message_bytes: int
    """Bytes of the whole message; for sends, of each of them."""
    levels: tuple[Groups, ...]
    """The groups of devices of each tier, innermost first; one level where the exchange is flat."""
    sends: int = 0
    """Micro-batches of a pipeline."""


def time_trials(devices: int, trials: Sequence[Trial], repeats: int) -> list[float]:
    """Return the seconds of each trial's quickest turn, from the common start to the end of the last device.

    Trials take turns, so that another program's load, which only adds time, falls on all alike; a first turn, which
    opens the connections' windows, does not count. Raises TimeoutError.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_be_device, args=(device, devices, store, trials, repeats, sender), daemon=True)
            for device in range(devices)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not receiver.poll(TIMEOUT_S):
                raise TimeoutError(f"{devices} devices made no {len(trials)} exchanges within {TIMEOUT_S:g} s")
            found = list(receiver.recv())
            for process in processes:
                process.join(TIMEOUT_S)
            return found
        finally:
            for process in processes:
                process.kill()
                process.join()


def _be_device(
    device: int, devices: int, store: str, trials: Sequence[Trial], repeats: int, results: Connection
) -> None:
    os.nice(-10)  # what else runs here is no part of the fabric
    enter(namespace_of(device))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=device, world_size=devices)
    groups: dict[Groups, dist.ProcessGroup] = {}
    for level in (level for trial in trials for level in trial.levels):
        if level not in groups:
            groups[level], _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in level])
    exchanges = [_exchange_of(trial, [groups[level] for level in trial.levels]) for trial in trials]
    turns = [[_timed(exchange) for exchange in exchanges] for _ in range(repeats + 1)][1:]
    if device == 0:
        results.send([min(times) for times in zip(*turns, strict=True)])
    dist.barrier()


def _timed(exchange: Callable[[], None]) -> float:
    """Return the seconds from a start that all devices await to the end of the last, by the machine's clock."""
    began = time.monotonic()
    dist.barrier()
    start = torch.tensor([time.monotonic() + time.monotonic() - began + SETTLE_S], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    time.sleep(max(0.0, float(start) - time.monotonic()))
    exchange()
    took = torch.tensor([time.monotonic() - float(start)], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _exchange_of(trial: Trial, levels: Sequence[dist.ProcessGroup]) -> Callable[[], None]:
    """Return what makes one exchange, with buffers of its own."""
    ranks = 1
    for level in trial.levels:
        ranks *= len(level[0])
    part = torch.ones(max(1, trial.message_bytes // 4 // ranks))
    whole = torch.ones(len(part) * ranks)
    if trial.operation == "send":
        return lambda: _pipeline(torch.ones(max(1, trial.message_bytes // 4)), trial.sends, levels[0])
    if trial.operation == "all_reduce":
        return lambda: Tiers(tuple(levels)).sum_(whole)
    if trial.operation == "all_gather":
        return lambda: _gather(part, levels)
    return lambda: _scatter(whole, levels)


def _gather(part: torch.Tensor, levels: Sequence[dist.ProcessGroup]) -> None:
    if len(levels) == 1:
        all_gather(part.new_empty(len(part) * levels[0].size()), part, group=levels[0])
        return
    for level in reversed(levels):
        whole = part.new_empty(len(part) * level.size())
        swap_rows(whole.view(level.size(), -1), part.view(1, -1).expand(level.size(), -1), level)
        part = whole


def _scatter(whole: torch.Tensor, levels: Sequence[dist.ProcessGroup]) -> None:
    for level in levels:
        part = whole.new_empty(len(whole) // level.size())
        reduce_scatter(part, whole, level)
        whole = part


def _pipeline(message: torch.Tensor, micro_batches: int, group: dist.ProcessGroup) -> None:
    """The sends of 1F1B (arXiv:2104.04473), between which nothing is computed."""
    stage, stages = group.rank(), group.size()
    warm = min(micro_batches, stages - stage)
    forwards = backwards = 0
    sent = list[dist.Work]()
    while backwards < micro_batches:
        is_forward = forwards < min(micro_batches, warm + backwards)
        source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if 0 <= source < stages:
            dist.recv(message, group=group, group_src=source)
        if 0 <= target < stages:
            work = dist.isend(message, group=group, group_dst=target)
            assert work is not None
            sent.append(work)
        forwards, backwards = forwards + is_forward, backwards + (not is_forward)
    for work in sent:
        work.wait()
