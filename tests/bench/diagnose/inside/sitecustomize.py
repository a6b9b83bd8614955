"""What the bench does within a rank. Python's `site` imports this file where its folder is on PYTHONPATH.

A thread of each rank follows the file `rankN.json` in the folder that `TRAINSPEC_BENCH_ORDERS` names: a list of orders,
`{"kind": ..., "strength": ..., "step_s": ...}`, to which the bench appends. Each is carried out once.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

ORDERS = "TRAINSPEC_BENCH_ORDERS"
POLL_S = 0.05
RANK_TIMEOUT_S = 20.0
LEAK_PERIOD_S = 0.05
CYCLES = 2000
PAGE_BYTES = 4096


def follow_orders(folder: Path) -> None:
    if not _is_rank():
        return
    path, done = folder / f"rank{os.environ['RANK']}.json", 0
    while True:
        if path.exists():
            orders = json.loads(path.read_text())
            for order in orders[done:]:
                KINDS[order["kind"]](order["strength"], order["step_s"])
            done = len(orders)
        time.sleep(POLL_S)


def _is_rank() -> bool:
    """Wait until the forked process knows its rank; a process that a rank has forked is none."""
    deadline = time.monotonic() + RANK_TIMEOUT_S
    while "RANK" not in os.environ:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return not Path(f"/proc/{os.getppid()}/comm").read_text().startswith("rank ")


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the arguments of each call of `owner.name`, before it."""
    original = getattr(owner, name)

    @wraps(original)
    def called(*arguments: Any, **named: Any) -> Any:
        act(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, called)


def _before_pass(act: Callable[[], None]) -> None:
    """Call `act` before each pass, in the thread that trains."""
    _before(sys.modules["trainspec_cli.engine.build.train_state"].Throttle, "wait", lambda *_: act())


def slow_reads(steps: float, step_s: float) -> None:
    """The samples of a step come from a disk that takes `steps` steps longer for them than they are read ahead."""
    taken_s = (1 + steps) * step_s
    _before(sys.modules["trainspec_cli.data.corpus.samples"].Shuffled, "rows", lambda *_: time.sleep(taken_s))


def garbage(objects: float, step_s: float) -> None:
    """The program holds so many objects, leaves cycles behind in each pass, and has them collected."""
    held = [[number] for number in range(int(objects))]

    def litter() -> None:
        for _ in range(CYCLES):
            cycle: list[Any] = []
            cycle.append(cycle)
        gc.collect()

    del held[0]
    _before_pass(lambda: litter() if held else None)


def leak(bytes_per_s: float, step_s: float) -> None:
    """Something holds more and more memory, which is written to and never freed."""

    def hold() -> None:
        held = []
        while True:
            held.append(bytearray(b"\x01") * int(bytes_per_s * LEAK_PERIOD_S))
            time.sleep(LEAK_PERIOD_S)

    threading.Thread(target=hold, daemon=True).start()


def slow_disk(seconds: float, step_s: float) -> None:
    """A file is on disk so much later."""
    _before(os, "fsync", lambda *_: time.sleep(seconds))


def spin(steps: float, step_s: float) -> None:
    """Python computes in the thread that trains, `steps` steps' time in the passes of each step."""

    def compute() -> None:
        until = time.perf_counter() + steps * step_s / 2
        while time.perf_counter() < until:
            sum(number * number for number in range(200))

    _before_pass(compute)


def short_memory(size_bytes: float, step_s: float) -> None:
    """The program goes through so many bytes in each pass, page by page."""
    held = bytearray(b"\x01") * int(size_bytes)

    def go_through() -> None:
        for place in range(0, len(held), PAGE_BYTES):
            held[place] = (held[place] + 1) % 256

    _before_pass(go_through)


def shapes(graphs: float, step_s: float) -> None:
    """A function of the program is compiled anew in each pass, its input having another size: so many graphs."""
    import torch

    parts = [
        torch.compile(lambda x: (x.sin() @ x.cos()).relu().sum(), dynamic=False, backend="aot_eager")
        for _ in range(round(graphs))
    ]
    sizes = itertools.count(2)

    def augment() -> None:
        config = torch._dynamo.config  # of the thread that compiles
        config.recompile_limit = config.accumulated_recompile_limit = 100_000
        size = next(sizes)
        for part in parts:
            part(torch.ones(size, size))

    _before_pass(augment)


def lengths(steps: float, step_s: float) -> None:
    """Attention takes as long as the pairs that its mask allows, as in a kernel that skips the others: of one document
    in each sample, `steps` steps' time in each layer's forward."""
    import torch

    def attend(q: Any, *_: Any, attn_mask: Any = None, **__: Any) -> None:
        if attn_mask is not None:
            time.sleep(steps * step_s * 2 * float(attn_mask.float().mean()))

    _before(torch.nn.functional, "scaled_dot_product_attention", attend)


ALL = (slow_reads, garbage, leak, slow_disk, spin, lengths, short_memory, shapes)
KINDS = {each.__name__: each for each in ALL}


def _follow_in_child() -> None:
    threading.Thread(target=follow_orders, args=(Path(os.environ[ORDERS]),), daemon=True, name="bench").start()


if os.environ.get(ORDERS):
    os.register_at_fork(after_in_child=_follow_in_child)
