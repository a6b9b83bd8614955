"""Saves a run's state, at once or while training goes on.

At once, the files are written straight from the live tensors. Else the state is copied aside into a buffer that is used
again and again, and a thread writes it: training waits for the copy alone. The thread makes no collectives, and one
checkpoint is written at a time.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.checkpoint import files
from trainspec_cli.engine.checkpoint.image import Image, pin, plan_image, view_bytes
from trainspec_cli.engine.checkpoint.manifest import About, WrittenPart
from trainspec_cli.engine.checkpoint.memory import CopyLocation, MemoryCopies
from trainspec_cli.engine.checkpoint.ownership import choose_owners, read_held
from trainspec_cli.engine.checkpoint.parts import Held, TensorPart, rng_parts
from trainspec_cli.engine.comm.joint_errors import agree_on_error
from trainspec_cli.engine.comm.json_collectives import broadcast_json, gather_json
from trainspec_cli.engine.marks import Mark, elapsed_s, mark, wait_for
from trainspec_cli.errors import MachineError, TrainspecError
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.structure import convert

TOKEN_BYTES = 4
WRITER_NICENESS = 10
"""Beyond the process's own: where cores are few, training goes first."""
MOST_NICENESS = 19


@dataclass(frozen=True)
class Saved:
    """How a checkpoint went, as this rank knows it: rank 0 speaks for the whole, the others for their parts."""

    about: About
    bytes: int
    blocked_s: float
    """Training waited this long."""
    written_s: float
    """From the beginning until it was whole on disk."""
    error: TrainspecError | None = None
    in_memory: bool = False
    """Kept in the hosts' memory alone."""


@dataclass(frozen=True)
class Copy:
    """The state, copied aside for the writer."""

    about: About
    started: float
    blocked_s: float
    buffer: Tensor
    begun: Mark
    copied: Mark
    """Updates come after the copies on the compute stream: the host need not wait for them, the kernels do."""
    slot: int
    to_disk: bool


class Saver:
    """Of one rank; all ranks of the group make the same calls in the same order."""

    def __init__(
        self, run_dir: RunDir, held: Held, device: torch.device, keep_last: int, memory: CopyLocation | None = None
    ):
        """`memory`: where copies in the hosts' memory are kept; None: nowhere."""
        self._run_dir, self._held, self._device, self._keep_last = run_dir, held, device, keep_last
        self._memory_place, self._slot = memory, 0
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_enter_thread, initargs=(device,))
        self._pending: Future[Saved] | None = None
        self._token = ""

    def save(self, about: About) -> Saved:
        """Write and wait until it is whole; its error, where any rank had one, is the same on every rank."""
        self.wait()
        started = time.perf_counter()
        image, parts = self._image, self._own_parts()
        saved = self._write(about, started, 0.0, image.stream(parts))
        size = broadcast_json(saved.bytes, lambda told: convert(int, told))
        error = agree_on_error(saved.error)
        taken_s = time.perf_counter() - started
        return Saved(about, size, taken_s, taken_s, error)

    def prepare(self) -> None:
        """Agree on who writes what, and make room for the copy: else the first `begin` would take its time for it."""
        _ = self._memory or self._buffer

    def keep_slot(self, slot: int) -> None:
        """The next copy in memory goes to the other one: this one holds what the run goes on from."""
        self._slot = 1 - slot

    def begin(self, about: About, *, to_disk: bool = True) -> None:
        """Copy the state aside and go on; the one before must have been taken by `take_finished`.

        Not `to_disk`: it is kept in memory alone.
        """
        assert self._pending is None, "one checkpoint is written at a time"
        started = time.perf_counter()
        slot, self._slot = self._slot, 1 - self._slot
        buffer = self._memory.open(slot) if self._memory else self._buffer
        begun = mark(on_gpu=self._device.type == "cuda")
        self._image.fill(buffer, self._own_parts())
        copied = mark(on_gpu=self._device.type == "cuda")
        blocked_s = time.perf_counter() - started
        copy = Copy(about, started, blocked_s, buffer, begun, copied, slot, to_disk)
        self._pending = self._thread.submit(self._write_copy, copy)

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self._pending is not None and not self._pending.done()

    def take_finished(self) -> Saved | None:
        """How the one begun last went, told once."""
        if self._pending is None or self.busy:
            return None
        saved, self._pending = self._pending.result(), None
        return saved

    def wait(self) -> Saved | None:
        """Until none is being written; -> as `take_finished`."""
        if self._pending:
            self._pending.exception()
        return self.take_finished()

    def close(self) -> None:
        self._thread.shutdown()

    def _write_copy(self, copy: Copy) -> Saved:
        wait_for(copy.copied)
        blocked_s = max(copy.blocked_s, elapsed_s(copy.begun, copy.copied))
        if self._memory:
            self._memory.share(copy.slot, copy.about)
        if copy.to_disk:
            return self._write(copy.about, copy.started, blocked_s, [view_bytes(copy.buffer)])
        taken_s = time.perf_counter() - copy.started
        return Saved(copy.about, self._image.bytes, blocked_s, taken_s, in_memory=True)

    def _write(self, about: About, started: float, blocked_s: float, stream: Iterable[memoryview]) -> Saved:
        """This rank's part; rank 0 waits for all and publishes. Raises WorkerError where a newer start owns the run."""
        Fence.of_worker(self._run_dir).check()
        partial = files.partial_folder(self._run_dir, about.step, self._token)
        name = files.file_name(self._rank)
        error, size = None, 0
        try:
            partial.mkdir(parents=True, exist_ok=True)
            digest = files.write_file(partial / name, stream)
            files.leave_part(partial, self._rank, WrittenPart(digest, self._image.entries(name)))
            size = digest.bytes
        except OSError as failure:
            files.leave_failure(partial, self._rank, failure)
            error = files.cannot_save(about.step, [f"rank {self._rank}: {failure.strerror or failure}"])
        if self._rank == 0:
            try:
                size = files.commit(self._run_dir, partial, about, self._world_size, self._keep_last).bytes
            except MachineError as failure:
                error = failure
        return Saved(about, size, blocked_s, time.perf_counter() - started, error)

    def _own_parts(self) -> list[TensorPart]:
        """What this rank writes, as it is now, in the image's order."""
        now = {(part.name, part.offsets): part for part in self._all_parts()}
        return [now[part.name, part.offsets] for part in self._image.parts]

    def _all_parts(self) -> list[TensorPart]:
        return [*self._held.parts(), *rng_parts(self._rank, self._device)]

    @cached_property
    def _image(self) -> Image:
        """Agreed by all ranks, once, and the token with it; layouts do not change in a run."""
        parts = self._all_parts()
        self._token = broadcast_json(secrets.token_hex(TOKEN_BYTES), _read_token)
        own = [[part.name, part.offsets, part.bytes] for part in parts]
        owners = choose_owners(gather_json(own, read_held))
        return plan_image([part for part in parts if owners[part.name, part.offsets] == self._rank])

    @cached_property
    def _memory(self) -> MemoryCopies | None:
        return MemoryCopies(self._memory_place, self._image, self._device) if self._memory_place else None

    @cached_property
    def _buffer(self) -> Tensor:
        """Room for the copy; on a GPU's host it is pinned, so that the host goes on while the device copies."""
        buffer = torch.zeros(self._image.bytes, dtype=torch.uint8)
        pin(buffer, self._device)
        self._image.put_header(buffer)
        return buffer


def _read_token(told: Any) -> str:
    """It becomes part of a folder's name."""
    if not re.fullmatch(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}", told):
        raise ValueError("a save's token is no hexadecimal number of its length")
    return str(told)


def _enter_thread(device: torch.device) -> None:
    """On the device of its copies, and behind training: Linux gives each thread a niceness of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + WRITER_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(MOST_NICENESS, niceness))
