"""Programs for the emulated device, each in a process of its own: `python -m wings.emulated.on_device NAME [ARGUMENT]`.

A process cannot take the device back, so that no test's process may have it. Each prints what it returns, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from trainspec_cli.core.environment_names import DEVICE, STORE_FILE
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.accelerators import emulated_peak_flops, enter, host_work
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.joining import join_processes, leave_processes
from trainspec_cli.engine.data import loader
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models import decoder
from trainspec_cli.engine.observe import clock
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.trace import fake_batch, fake_world
from trainspec_cli.planner.hardware.rates import build_accelerator, load_group
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.emulated import KIND, DeviceDisturbance
from trainspec_cli.wings.emulated.engine import streams
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog
from trainspec_cli.wings.emulated.engine.costs import TIME
from trainspec_cli.wings.emulated.engine.device import MEMORY, PLUGIN
from trainspec_cli.wings.emulated.engine.rehearse import rehearse_rank, run_steps
from trainspec_cli.wings.emulated.rehearsal import MemoryMoment, RankRehearsal

MODEL = DecoderModel(2, 64, 4, 2, 16, 160, 512)
SEQ_LEN = 32
SCHEDULES = 40
LAYOUTS_OF_MARKS = {"dp": Layout(dp_replicate=2), "zero3": Layout(dp_shard=2, zero_stage=3), "tp": Layout(tp=2)}
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
    for seed in (None, 1, 2):
        order(seed)
        losses, there = train(3, "emulated")
        equal = all(torch.equal(one, other) for one, other in zip(weights, there, strict=True))
        found[str(seed)] = equal and losses == on_cpu
    return found


def order(seed: int | None) -> None:
    streams.SCHEDULER.start_order(seed)


def mixing() -> dict[str, Any]:
    there = torch.ones(3, device="emulated")
    refused = ""
    try:
        there + torch.ones(3)
    except RuntimeError as error:
        refused = str(error)
    plans = {
        "compile": build_plan(Case("dense", compile=True), "cpu"),
        "kernels.swiglu": build_plan(Case("dense", kernel=("swiglu", "compiled")), "cpu"),
    }
    uncompiled = {}
    for key, plan in plans.items():
        try:
            build_train_state(plan, there.device)
        except RecipeError as error:
            uncompiled[key] = (error.problems[0].code, error.problems[0].path)
    number = (there + torch.tensor(2.0)).cpu().tolist()
    return {"refused": refused, "number": number, "uncompiled": uncompiled}


def gathering() -> dict[str, Any]:
    """Copy shards to their place in FSDP2's buffer, and free it once the wait for its exchange is queued."""
    shards = [torch.full((2,), 3.0, device="emulated"), torch.full((1,), 4.0, device="emulated")]
    buffer = torch.zeros(9, device="emulated")
    allocated = MEMORY.allocated_bytes
    own, _ = torch.ops.fsdp.all_gather_copy_in(shards, buffer, [2, 1], 3, 1)
    values = [] if not MEMORY.has_values else buffer.tolist()
    found = {"values": values, "own": [own.storage_offset(), *own.shape], "new": MEMORY.allocated_bytes - allocated}
    join_alone()
    order(1)  # nothing runs before the host waits
    allocated = MEMORY.allocated_bytes
    exchanged = torch.empty(1000, device="emulated")
    dist.all_reduce(exchanged)
    del exchanged
    return found | {"held": MEMORY.allocated_bytes - allocated}


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


def rehearsed(case: str, rank: str, world: str, chip: str = "") -> dict[str, Any]:
    """Rehearse a rank of a case of certify; `world`: `alone`, or the folder of the store of a real world. `chip`: that
    of a rank alone."""
    family, layout, optimizer = json.loads(case)
    plan = plan_of(family, Layout(**layout), optimizer, chip)
    if world == "alone":
        return to_plain(rehearse_rank(plan, int(rank)))
    os.environ |= {"RANK": rank, "WORLD_SIZE": str(plan.world_size), STORE_FILE: f"{world}/store"}
    there = join_processes("cpu")
    log = MEMORY.log = AllocationLog()
    found = run_steps(plan, there, log, 2, RankRehearsal(int(rank), 0, 0, 0, 0, 0, MemoryMoment("", ())))
    torch.distributed.barrier()
    return to_plain(replace(found, reserved_bytes=MEMORY.peak_reserved_bytes))


STAGES = Case("dense", Layout(dp_shard=2, pp=2, pipeline_schedule="interleaved", virtual_stages=2))


def pools() -> int:
    """Return the number of the allocator's pools for a rank with two stages."""
    rehearse_rank(build_plan(STAGES, "cpu"), 0)
    return len(MEMORY._allocators)


def several_stages() -> list[list[float]]:
    """Train a pipeline with two stages per rank, sharded, in several orders of the streams; return the last loss and
    the sums of squares of this rank's weights for each."""
    plan = build_plan(STAGES, "cpu")
    there = join_processes("cpu")
    mesh = build_mesh(plan.layout, there.type)
    found = []
    for seed in (None, 1):
        order(seed)
        state = build_train_state(plan, there, mesh)
        generator = torch.Generator().manual_seed(mesh.data_rank)
        for _ in range(2):
            tokens = torch.randint(0, 64, (4, plan.spec.data.seq_len), generator=generator).to(there)
            batches = [(one, one) for one in tokens.split(1)]
            outcome = train_step(state, batches, global_tokens=2 * tokens.numel(), clip_norm=1.0)
        assert outcome is not None
        weights = [share.local.double().square().sum().item() for share in state.shares]
        found.append([outcome.loss.item(), *weights])
    torch.accelerator.synchronize()
    dist.barrier()  # no rank leaves before the others have ended their exchanges
    return found


def marks() -> dict[str, int]:
    """Count the moments that a step records for its times, by layout, layers and micro-batches."""
    there = enter("cpu")
    found = {}
    for name, layout in LAYOUTS_OF_MARKS.items():
        for layers, micro_batches in ((2, 1), (3, 2)):
            plan = build_plan(Case("dense", layout, micro_batch_size=1), "cpu")
            plan = replace(plan, spec=replace(plan.spec, model=replace(plan.spec.model, num_layers=layers)))
            with fake_world(0, plan.world_size, f"cpu:fake,{KIND}:fake"):
                state = build_train_state(plan, there, build_mesh(layout, there.type))
                recorded = state.clock.mark
                seen: list[None] = []
                state.clock.mark = lambda: (seen.append(None), recorded())[1]  # type: ignore # noqa: B023
                with there:
                    batches = [fake_batch(plan, state)] * micro_batches
                train_step(state, batches, global_tokens=plan.tokens_per_step, clip_norm=1.0)
                found[f"{name} {layers} {micro_batches}"] = len(seen)
    return found


def plan_of(family: str, layout: Layout, optimizer: Any, chip: str) -> Plan:
    plan = build_plan(Case(family, layout, optimizer=optimizer, micro_batch_size=2), "cpu")
    if not chip:
        return plan
    accelerator = load_group("accelerator", build_accelerator)[chip]
    cluster = replace(plan.spec.cluster, accelerator=accelerator, devices_per_node=layout.world_size)
    return replace(plan, spec=replace(plan.spec, cluster=cluster))


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


# Virtual time


def timed(run: Callable[[], Any]) -> float:
    """Return the virtual seconds that the current stream takes for `run`, on a device with nothing else to do."""
    torch.accelerator.synchronize()
    events = [torch.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    run()
    events[1].record()
    torch.accelerator.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


def durations() -> dict[str, Any]:
    """Return the virtual seconds of operations."""
    bf16 = {"dtype": torch.bfloat16, "device": "emulated"}
    products = {}
    for count in (1, 3):
        one = torch.ones(count, 256, 512, **bf16)
        other = torch.ones(count, 512, 128, **bf16)
        products[count] = timed(lambda one=one, other=other: one @ other)
    sums = {}
    for mib in (64, 128):
        values = torch.zeros(mib * 2**20 // 4, device="emulated")
        sums[mib] = timed(lambda values=values: values + 1.0)
    here = torch.empty(2**22, pin_memory=True)
    query = torch.zeros(2, 4, 256, 64, **bf16)
    attention = []
    for causal in (False, True):
        attend = partial(nn.functional.scaled_dot_product_attention, query, query, query, is_causal=causal)
        attention.append(timed(attend))
    return {
        "products": products,
        "sums": sums,
        "view": timed(lambda: values.view(-1, 2)[::2].t()),
        "empty": timed(lambda: torch.empty(1000, device="emulated")),
        "to itself": timed(lambda: values[1:].copy_(values[1:])),
        "copy": timed(lambda: here.to("emulated", non_blocking=True)),
        "attention": attention,
    }


def overlap() -> dict[str, float]:
    """Run a long operation, and a short one in another stream; then wait for the long one."""
    values = torch.zeros(2**22, device="emulated")
    few = values[: 2**18]
    side = torch.Stream("emulated")
    beside = [torch.Event(enable_timing=True) for _ in range(2)]

    def both() -> None:
        with side:
            values.mul_(2.0)
            done = side.record_event()
        beside[0].record()
        few.add_(1.0)
        beside[1].record()
        torch.accelerator.current_stream().wait_event(done)

    return {
        "long": timed(lambda: values.mul_(2.0)),
        "short": timed(lambda: few.add_(1.0)),
        "both": timed(both),
        "before the wait": beside[0].elapsed_time(beside[1]) / 1e3,
    }


def host_times() -> list[float]:
    """Return the virtual host time after: nothing, a queued operation, a view, and reading a value."""
    values = torch.zeros(2**20, device="emulated")
    torch.accelerator.synchronize()
    start_s = streams.HOST.now_s
    found = []
    for run in (lambda: None, lambda: values.add_(1.0), lambda: values.view(-1), lambda: values[0].item()):
        run()
        found.append(streams.HOST.now_s - start_s)
    return found


def virtual_time() -> dict[str, Any]:
    host = {"launching": host_times()}
    streams.HOST.launch_s = 0.0
    host["not launching"] = host_times()
    assert TIME.costs is not None
    plain = durations()
    found = {"host": host, "durations": plain, "overlap": overlap()}
    TIME.costs.disturbances = (DeviceDisturbance(slowness=2.0),)
    slow = durations()
    TIME.costs.disturbances = (DeviceDisturbance(read_ms=4.0),)
    found |= {"slow": slow, "host work": host_work_times(), "peak": peak(), "documents": documents()}
    return {**found, "retries": retries()}


def peak() -> list[float]:
    """Return the peak of the emulated chip, and how far the host's clock moves to find it."""
    before_s = streams.HOST.now_s
    found = emulated_peak_flops(torch.device("emulated"), torch.bfloat16)
    return [found or 0.0, streams.HOST.now_s - before_s]


def documents() -> dict[str, float]:
    """Return how long attention lasts with masks that allow all pairs of tokens, half and a quarter of them, on a chip
    whose attention is 1,000 times slower, and with the first and the last of them on the chip as it is."""
    query, key, value = (torch.randn(1, 4, 64, 16, device="emulated") for _ in range(3))
    places = torch.arange(64, device="emulated")
    masks = {}
    for name, number in (("all", 1), ("half", 2), ("quarter", 4)):
        document = places // (64 // number)
        masks[name] = (document[:, None] == document[None, :])[None, None]

    def attend(name: str) -> float:
        return timed(lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=masks[name]))

    assert TIME.costs is not None
    TIME.costs.disturbances = (DeviceDisturbance(attention_slowness=1000.0),)
    found = {name: attend(name) for name in masks}
    TIME.costs.disturbances = ()
    return {**found, "usual": attend("all"), "usual quarter": attend("quarter")}


def retries() -> dict[str, list[float]]:
    """Return how far the host's clock moves for each of four allocations behind a long operation, and how often the
    allocator has released its cache: at each allocation, and at most once per 30 ms."""
    found = {}
    assert TIME.costs is not None
    for every_ms in (0.0, 30.0):
        TIME.costs.disturbances = (DeviceDisturbance(retry_ms=20.0, retry_every_ms=every_ms),)
        TIME.costs.retried_s = -1.0
        torch.accelerator.synchronize()
        torch.get_device_module("emulated")._sleep(10**9)
        before = MEMORY.retries
        times = [streams.HOST.now_s]
        for _ in range(4):
            torch.empty(2**20, device="emulated")
            times.append(streams.HOST.now_s)
        found[f"{every_ms:g}"] = [*(after - before_s for before_s, after in pairwise(times)), MEMORY.retries - before]
    TIME.costs.disturbances = ()
    return found


def host_work_times() -> list[float]:
    """Return how far the host's clock moves: while it reads, while it sleeps, and when it uses an event that another
    thread has recorded after 1.5 s of work."""
    device = torch.device("emulated")
    times = [streams.HOST.now_s]
    host_work(device, "read")
    times.append(streams.HOST.now_s)
    host_work(device, seconds=0.25)
    times.append(streams.HOST.now_s)
    begun = torch.Event()
    begun.record()
    ended = torch.Event()

    def work() -> None:
        begun.wait()
        host_work(device, seconds=1.5)
        ended.record()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ended.wait()
    times.append(streams.HOST.now_s)
    return [after - before for before, after in pairwise(times)]


# Exchanges: one process per rank


def join() -> tuple[int, int]:
    join_processes("cpu")
    return dist.get_rank(), dist.get_world_size()


def late_rank() -> dict[str, Any]:
    """Run exchanges for which the last rank comes late; return the seconds that the compute stream waits for each."""
    rank, size = join()
    late = torch.zeros(2**22, device="emulated")
    own = torch.full((2**18,), float(rank), device="emulated")
    whole = torch.zeros(size * 2**18, device="emulated")
    found: dict[str, Any] = {}
    dist.all_reduce(torch.zeros(1, device="emulated"))
    torch.accelerator.synchronize()  # from here on, the clocks of all ranks agree

    def exchange(name: str, act: Callable[[], Any]) -> None:
        events = [torch.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        if rank == size - 1:
            late.mul_(2.0)
        events[1].record()
        act()
        events[2].record()
        torch.accelerator.synchronize()
        found[name] = [one.elapsed_time(other) / 1e3 for one, other in pairwise(events)]

    exchange("all_reduce", lambda: dist.all_reduce(own))
    exchange("all_gather", lambda: dist.all_gather_into_tensor(whole, own))
    exchange("functional", lambda: functional.wait_tensor(functional.all_gather_tensor(own, 0, dist.group.WORLD)))
    exchange("reduce_scatter", lambda: dist.reduce_scatter_tensor(own, whole))
    exchange("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(whole), whole))
    exchange("message", lambda: dist.send(own, 0) if rank == size - 1 else dist.recv(own, size - 1) if not rank else 0)
    found["value"] = own[0].item()
    found["host"] = streams.HOST.now_s
    return found


def exposed(case: str) -> list[dict[str, float]]:
    """Make steps of a case of certify; return, as shares of each step, the exposed communication that the engine
    reports and the true one: the time in which the compute stream does nothing while an exchange is in progress, or a
    copy into or out of its buffers in another stream. `transfers`: the same without these copies."""
    family, layout = json.loads(case)
    plan = build_plan(Case(family, Layout(**layout), micro_batch_size=2), "cpu")
    there = join_processes("cpu")
    exchanging: list[clock.Interval] = []
    copying: list[clock.Interval] = []
    computing: list[clock.Interval] = []
    run_first = streams.Stream.step

    def note(stream: streams.Stream) -> bool:
        work = stream._queue[0] if stream._queue else None
        done = stream.done
        changed = run_first(stream)
        if work is not None and stream.done > done:
            if work.handle is not None:
                exchanging.append((work.handle._mine.at_s, stream.now_s))
            elif work.duration_s:
                of_stream = computing if stream is streams.DEFAULT else copying
                of_stream.append((stream.now_s - work.duration_s, stream.now_s))
        return changed

    state = build_train_state(plan, there, build_mesh(plan.layout, there.type))
    batches = [torch.randint(0, 64, (2, plan.spec.data.seq_len), device=there) for _ in range(plan.grad_accum_steps)]
    streams.Stream.step = note
    state.clock.restart()
    found = []
    for _ in range(4):
        pairs = [(tokens, tokens) for tokens in batches]
        outcome = train_step(state, pairs, global_tokens=4 * len(pairs) * batches[0].numel(), clip_norm=1.0)
        assert outcome is not None
        outcome.on_host()
        segments = state.clock.cut()
        parts_s = segments.parts_s()
        reported = segments.exchange_time()
        torch.accelerator.synchronize()
        bounds = [one.at.device_s for one in (segments.marks[0][1], segments.end)]

        def inside(intervals: list[clock.Interval], low: float, high: float) -> list[clock.Interval]:
            return [(max(begin, low), min(end, high)) for begin, end in intervals if end > low and begin < high]

        busy = inside(computing, *bounds)
        _, exposed_s = clock.exchange_time(inside([*exchanging, *copying], *bounds), busy)
        _, transfers_s = clock.exchange_time(inside(exchanging, *bounds), busy)
        step_s = bounds[1] - bounds[0]
        found.append(
            {
                "true": exposed_s / step_s,
                "transfers": transfers_s / step_s,
                "reported": (reported[1] if reported else parts_s["exposed_comm"]) / step_s,
                "part": parts_s["exposed_comm"] / step_s,
            }
        )
    return found


def fail(act: Callable[[], Any]) -> str:
    try:
        act()
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def mismatched() -> str:
    """Rank 1 gathers while the others sum; the error names both."""
    rank, size = join()
    own = torch.ones(8, device="emulated")
    dist.all_reduce(own)

    def act() -> None:
        if rank == 1:
            dist.all_gather_into_tensor(torch.empty(8 * size, device="emulated"), own)
        else:
            dist.all_reduce(own)

    error = fail(act)
    dist.all_reduce(torch.zeros(1, device="cpu"))  # no rank leaves before the others have failed, too
    return error


def other_size() -> str:
    """Rank 0 sends fewer values than rank 1 receives."""
    rank, _ = join()
    own = torch.ones(8 if rank else 4, device="emulated")
    return fail(lambda: dist.recv(own, 0) if rank else dist.send(own, 1))


def leaving() -> float:
    """Rank 1 leaves before rank 0 comes to the exchange that it has queued."""
    rank, _ = join()
    own = torch.ones(8, device="emulated")
    dist.all_reduce(own)
    torch.accelerator.synchronize()
    if rank:
        dist.all_reduce(own)
        print("0", flush=True)
        leave_processes()
    time.sleep(0.5)
    dist.all_reduce(own)
    return own.sum().item()


def missing() -> str:
    """The last rank does not come."""
    rank, size = join()
    own = torch.ones(8, device="emulated")
    dist.all_reduce(own)
    torch.accelerator.synchronize()
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:
        store.wait([f"failed {other}" for other in range(rank)])
        return ""
    message = fail(lambda: dist.all_reduce(own))
    store.set(f"failed {rank}", message)
    return message


if __name__ == "__main__":
    os.environ |= {DEVICE: PLUGIN.name, "LOCAL_RANK": "0"}
    enter("cpu")
    assert MEMORY.allocated_bytes == 0
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
    if dist.is_initialized():
        os._exit(0)  # gloo's threads may abort a process that ends after an error
