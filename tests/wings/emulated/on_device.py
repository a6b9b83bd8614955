"""Programs for the emulated device, each in a process of its own: `python -m wings.emulated.on_device NAME [ARGUMENT]`.

A process cannot take the device back, so that no test's process may have it. Each prints what it returns, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.core.environment_names import DEVICE, STORE_FILE
from trainspec_cli.engine.accelerators import enter
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.data import loader
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models import decoder
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.emulated.engine import device, streams
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog
from trainspec_cli.wings.emulated.engine.device import MEMORY, PLUGIN
from trainspec_cli.wings.emulated.engine.rehearse import rehearse_rank, run_steps
from trainspec_cli.wings.emulated.rehearsal import MemoryMoment, RankRehearsal

MODEL = DecoderModel(2, 64, 4, 2, 16, 160, 512)
SEQ_LEN = 32
SCHEDULES = 40
ROWS = 1 << 12


def train(steps: int, on: str) -> tuple[list[float], list[Tensor]]:
    """Train a tiny decoder on a device; return the losses and the last weights."""
    with torch.device("meta"):
        model = decoder.build(MODEL, SEQ_LEN, None)
    model.to_empty(device=on)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=random) * 0.05).to(on))
    model.init_buffers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=False)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, MODEL.vocab_size, (2, SEQ_LEN + 1), generator=random)
        loss = model(tokens[:, :-1].to(on), tokens[:, 1:].to(on)) / (2 * SEQ_LEN)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return [loss.item() for loss in losses], [parameter.detach().cpu() for parameter in model.parameters()]


def bits() -> dict[str, Any]:
    """Compare with a CPU, work as soon as it may and in random orders."""
    on_cpu, weights = train(3, "cpu")
    found = {}
    for seed in (None, 1, 2, 3):
        order(seed)
        losses, there = train(3, "emulated")
        equal = all(torch.equal(one, other) for one, other in zip(weights, there, strict=True))
        found[str(seed)] = equal and losses == on_cpu
    return found


def order(seed: int | None) -> None:
    torch.accelerator.synchronize()
    streams.SCHEDULER.random = None if seed is None else device.random.Random(seed)


def mixing() -> dict[str, Any]:
    there = torch.ones(3, device="emulated")
    refused = ""
    try:
        there + torch.ones(3)
    except RuntimeError as error:
        refused = str(error)
    return {"refused": refused, "number": (there + torch.tensor(2.0)).cpu().tolist()}


def counting() -> dict[str, Any]:
    """Count what a training step does that makes the host wait."""
    model = nn.Linear(8, 8, device="emulated")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(4, 8, device="emulated")
    streams.counts.clear()
    model(x).square().mean().backward()
    optimizer.step()
    silent = dict(streams.counts)
    model(x).sum().item()
    x[torch.tensor([1, 2])]
    return {"silent": silent, "after": dict(streams.counts)}


def steady(family: str) -> dict[str, int]:
    """Return what a later training step of the engine does that makes the host wait, beyond operations."""
    plan = build_plan(Case(family), "cpu")
    there = join_alone()
    state = build_train_state(plan, there, build_mesh(plan.layout, there.type))
    tokens = torch.randint(0, 64, (4, plan.spec.data.seq_len), device=there)
    for _ in range(3):
        streams.counts.clear()
        outcome = train_step(state, [(tokens, tokens)], global_tokens=tokens.numel(), clip_norm=1.0)
    assert outcome is not None
    found = dict(streams.counts)
    outcome.on_host()
    found["to read the outcome"] = streams.counts["device to host"] - found.get("device to host", 0)
    found.pop("operations")
    return found


def allocations(families: str) -> dict[str, Any]:
    """Return, by family, every allocation of three steps with AdamW and two micro-batches, in order, in bytes."""
    there = join_alone()
    found = {}
    for family in families.split():
        plan = build_plan(Case(family, micro_batch_size=2, optimizer="adamw"), "cpu")
        log = MEMORY.log = AllocationLog()
        MEMORY.peak_bytes = 0
        state = build_train_state(plan, there, build_mesh(plan.layout, there.type))
        losses = []
        for _ in range(3):
            tokens = [torch.randint(0, 64, (2, plan.spec.data.seq_len), device=there) for _ in range(2)]
            batches = [(one, one) for one in tokens]
            outcome = train_step(state, batches, global_tokens=2 * tokens[0].numel(), clip_norm=1.0)
            assert outcome is not None
            on_host = outcome.on_host()
            losses.append((on_host.loss.item(), on_host.skipped.item()))
        found[family] = {
            "peak": MEMORY.peak_bytes,
            "reserved": MEMORY.peak_reserved_bytes,
            "sizes": [(block.nbytes, block.origin) for block in log._blocks],
            "losses": losses,
        }
        del state, tokens, batches, outcome, on_host
        gc.collect()
    return found


def without_values() -> dict[str, Any]:
    """Read what the host may read in sizes mode, and fail at what depends on values."""
    there = torch.full((3, 2), 7.0, device="emulated")
    host = torch.ones(3, 2)
    host.copy_(there)
    refused = []
    for read in (there.nonzero, lambda: there[there > 0], there.unique):
        try:
            read()
        except NotImplementedError as error:
            refused.append(str(error))
    large = torch.empty(2**38, dtype=torch.uint8, device="emulated").cpu()
    return {
        "numbers": [there.sum().item(), there.long().max().item(), bool(there.isnan().any())],
        "copies": [there.cpu().tolist(), host.tolist()],
        "large": [large.nbytes, large[-1].item()],
        "refused": refused,
        "allocated": MEMORY.allocated_bytes,
    }


def join_alone() -> torch.device:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", STORE_FILE: str(Path(tempfile.mkdtemp()) / "store")}
    return join_processes("cpu")


def rehearsed(case: str, rank: str, world: str) -> dict[str, Any]:
    """Rehearse a rank of a case of certify; `world`: `alone`, or the folder of the store of a real world."""
    family, layout, optimizer = json.loads(case)
    plan = build_plan(Case(family, Layout(**layout), optimizer=optimizer, micro_batch_size=2), "cpu")
    if world == "alone":
        return to_plain(rehearse_rank(plan, int(rank)))
    os.environ |= {"RANK": rank, "WORLD_SIZE": str(plan.world_size), STORE_FILE: f"{world}/store"}
    there = join_processes("cpu")
    log = MEMORY.log = AllocationLog()
    found = run_steps(plan, there, log, 2, RankRehearsal(int(rank), 0, 0, 0, 0, 0, MemoryMoment("", ())))
    torch.distributed.barrier()
    return to_plain(replace(found, reserved_bytes=MEMORY.peak_reserved_bytes))


def memory() -> dict[str, Any]:
    """Allocate to the end of the device's memory, free, and allocate again."""
    kept = []
    failed = ""
    while not failed:
        try:
            kept.append(torch.empty(64 * 2**20, dtype=torch.uint8, device="emulated"))
        except torch.OutOfMemoryError as error:
            failed = str(error)
    full = torch.accelerator.memory_allocated()
    number = len(kept)
    kept.clear()
    again = torch.empty(128 * 2**20, dtype=torch.uint8, device="emulated")
    free, total = torch.accelerator.get_memory_info()
    return {
        "number": number, "full": full, "failed": failed, "again": again.nbytes, "total": total, "free": free,
        "reserved": torch.accelerator.memory_reserved(), "stats": torch.accelerator.memory_stats(),
    }  # fmt: skip


# Programs of two streams, right and with a wait left out


def two_streams(without: str) -> list[float]:
    """Fill in one stream, read in the other."""
    side = torch.Stream("emulated")
    values = torch.zeros(ROWS, device="emulated")
    torch.accelerator.synchronize()
    with side:
        values.fill_(3.0)
        filled = side.record_event()
    if without != "event":
        torch.accelerator.current_stream().wait_event(filled)
    total = values.sum()
    return [total.item() / ROWS]


def kept_memory(without: str) -> list[float]:
    """Free a tensor that another stream still reads; the next one gets its bytes."""
    side = torch.Stream("emulated")
    values = torch.full((ROWS,), 3.0, device="emulated")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = values.sum()
    if without != "record_stream":
        values.record_stream(side)
    del values
    torch.full((ROWS,), 7.0, device="emulated")
    torch.accelerator.current_stream().wait_stream(side)
    return [total.item() / ROWS]


def read_early(without: str) -> list[float]:
    """Copy to the host without blocking, and read."""
    there = torch.full((4,), 3.0, device="emulated")
    here = there.to("cpu", non_blocking=True)
    if without != "synchronize":
        torch.accelerator.current_stream().synchronize()
    return here.tolist()


def reused_host_memory(without: str) -> list[float]:
    """Copy from page-locked memory without blocking, and write into it again."""
    here = torch.empty(4, pin_memory=True)
    here.fill_(3.0)
    there = here.to("emulated", non_blocking=True)
    if without != "synchronize":
        torch.accelerator.current_stream().synchronize()
    here.fill_(7.0)
    return there.cpu().tolist()


def loading(without: str) -> list[float]:
    """Stage batches as the engine's loader does, and sum them."""
    staging = loader.Staging(torch.device("emulated", 0))
    totals = []
    for number in range(6):
        batch = (torch.full((2, 64), number), torch.full((2, 64), -number))
        ((tokens, targets),) = staging.take(staging.stage([batch]))
        totals += [tokens.sum(), (targets * 2).sum()]
    return [total.item() for total in totals]


LEFT_OUT = {
    "copied.synchronize": "            self.copied.synchronize()\n",
    "used.wait": "            self.used.wait()\n",
    "copied.wait": "            slot.copied.wait(torch.accelerator.current_stream(self._device))\n",
    "copied.record": "            self.copied.record()\n",
    "used.record": "            slot.used.record(torch.accelerator.current_stream(self._device))\n",
}
"""Lines of the loader without which a batch may be overwritten or read too early."""


def plant(line: str) -> None:
    """Leave a line of the engine's loader out."""
    source = loader.__file__
    text = Path(source).read_text()
    assert text.count(line) == 1
    exec(compile(text.replace(line, line[: -len(line.lstrip())] + "pass\n"), source, "exec"), vars(loader))


PROGRAMS: dict[str, Callable[[str], list[float]]] = {
    one.__name__: one for one in (two_streams, kept_memory, read_early, reused_host_memory, loading)
}


def wrong_orders(name: str, without: str) -> dict[str, Any]:
    """Run a program in many random orders; return how many gave other values than the first, made in order."""
    run = PROGRAMS[name]
    order(None)
    expected = run("")
    if name == "loading" and without:
        plant(LEFT_OUT[without])
    wrong = 0
    for seed in range(SCHEDULES):
        order(seed)
        wrong += run(without) != expected
    return {"expected": expected, "wrong": wrong}


def random_numbers() -> list[list[float]]:
    """Draw in several orders."""
    drawn = []
    for seed in (None, 1, 2):
        order(seed)
        torch.manual_seed(5)
        tensors = [torch.randn(3, device="emulated"), torch.rand(3, device="emulated")]
        tensors.append(torch.zeros(3, device="emulated").normal_())
        drawn.append([value for tensor in reversed(tensors) for value in tensor.cpu().tolist()])
    return drawn


if __name__ == "__main__":
    os.environ |= {DEVICE: PLUGIN.name, "LOCAL_RANK": "0"}
    enter("cpu")
    assert MEMORY.allocated_bytes == 0
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
