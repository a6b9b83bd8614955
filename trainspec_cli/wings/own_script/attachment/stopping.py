"""The ranks of an attached script (from torch.distributed, JAX, TensorFlow or a launcher), and stop requests, which all
of them follow at the same step."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_FLAG = struct.Struct("<QQ")
"""A rank's step count, and the first step after which the rank wanted the run to end (0 if it does not want that)."""
_POLL_S = 0.001


def find_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: from JAX, from TensorFlow's TF_CONFIG, or from a
    launcher's environment variables; (0, 1) for a single process."""
    jax: Any = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        return int(jax.process_index()), int(jax.process_count())
    if "tensorflow" in sys.modules:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # no TF_CONFIG, or one without trainers
            config = json.loads(os.environ.get("TF_CONFIG", ""))
            counts = {kind: len(config["cluster"].get(kind, ())) for kind in ("chief", "worker")}
            trainers = [(kind, index) for kind, count in counts.items() for index in range(count)]
            return trainers.index((config["task"]["type"], int(config["task"]["index"]))), len(trainers)
    if "torch" not in sys.modules:  # a script may use torch with a launcher but train in a single process
        rank = os.environ.get("RANK", "")
        ranks = os.environ.get("WORLD_SIZE", "")
        if rank.isdigit() and ranks.isdigit():
            return int(rank), int(ranks)
    return 0, 1


class FlagFiles:
    """Agreement between the ranks on this machine, without torch. After each step, each rank writes to a separate file
    how many steps it has taken and whether it wants to end. All ranks act on the requests from the previous step, so
    they act at the same step. Ranks that are ahead wait, so no rank is more than one step ahead."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        self._paths = [folder / f"{number}.flag" for number in range(ranks)]
        self._rank = rank
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._own = os.open(self._paths[rank], flags, 0o600)
        self._made = self._wanted = 0

    def agree(self, wanted: bool) -> bool:
        """Count a step; return whether, in the previous step, any rank wanted to end."""
        before = self._made
        self._made = self._made + 1
        if wanted and not self._wanted:
            self._wanted = self._made
        os.pwrite(self._own, _FLAG.pack(self._made, self._wanted), 0)
        if before == 0:
            return False
        for path in self._paths:
            made = 0
            wanted_at = 0
            while made < before:
                with suppress(FileNotFoundError, struct.error):  # the rank has not started, or is writing its record
                    made, wanted_at = _FLAG.unpack(path.read_bytes())
                if made < before:
                    time.sleep(_POLL_S)
            if 0 < wanted_at <= before:
                return True
        return False


class StopSignal:
    """Handles SIGTERM, which `trainspec stop`, Ctrl-C and schedulers send to ask a run to end."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Install the handler. This is only possible in the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


class ScriptRanks:
    """This process's place among the training processes, according to torch.distributed if the script has initialised
    it.

    Ranks agree on a stop request through a four-byte all-reduce on the host, which starts in one step and ends in the
    next. No rank waits for it, and all ranks act at the same step. Without torch, ranks agree through files in `folder`
    (None: each rank decides alone)."""

    def __init__(self, folder: Path | None) -> None:
        self._torch: Any = None  # the torch module, if the script has loaded it
        self._group: Any = None
        self._flags: FlagFiles | None = None
        self._pending: tuple[Any, Any] | None = None
        self._figures: tuple[Any, Any] | None = None
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            self.number, self.count = find_rank()
            if folder and self.count > 1:
                self._flags = FlagFiles(folder, self.number, self.count)
            return
        self.number = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()
        if self.count > 1:
            self._torch = torch
            self._group = torch.distributed.new_group(backend="gloo")

    def agree(self, wanted: bool) -> bool:
        """Return whether, in the previous step, any rank wanted to stop. For a single process, return `wanted`
        itself."""
        if self._flags is not None:
            return self._flags.agree(wanted)
        if self._torch is None:
            return wanted
        before = self.finish_exchanges()
        flag = self._torch.tensor([int(wanted)], dtype=self._torch.int32)
        maximum = self._torch.distributed.ReduceOp.MAX
        work = self._torch.distributed.all_reduce(flag, op=maximum, group=self._group, async_op=True)
        self._pending = (work, flag)
        return before

    def finish_exchanges(self) -> bool:
        """Wait for pending exchanges, and return the result of the agreement."""
        if self._figures is not None:
            self._figures[0].wait()
        if self._pending is None:
            return False
        work, flag = self._pending
        self._pending = None
        work.wait()
        return bool(flag.item())

    def exchange(self, own: list[float]) -> list[list[float]]:
        """Return each rank's values from the previous step (empty in the first step), and start exchanging `own`. A
        single process gets its own values immediately."""
        if self._torch is None:
            return [own]
        figures = self._torch.zeros(self.count, len(own), dtype=self._torch.float64)
        figures[self.number] = self._torch.tensor(own, dtype=self._torch.float64)
        before: list[list[float]] = []
        if self._figures is not None:
            work, reported = self._figures
            work.wait()
            before = reported.tolist()
        # Each rank fills only its own row and leaves zeros elsewhere, so the sum preserves infinite values.
        self._figures = self._torch.distributed.all_reduce(figures, group=self._group, async_op=True), figures
        return before

    def gather(self, value: object) -> list[object]:
        """Return the value of each rank, in rank order. Values may be tensors, numbers, text, and lists and dicts of
        them. They are sent in `torch.save` format, and loading rejects other objects (`weights_only`)."""
        if self._torch is None:
            return [value]
        torch = self._torch
        written = io.BytesIO()
        torch.save(value, written)
        own = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
        lengths = torch.zeros(self.count, dtype=torch.int64)
        lengths[self.number] = len(own)
        torch.distributed.all_reduce(lengths, group=self._group)
        texts = torch.zeros(self.count, int(lengths.max()), dtype=torch.uint8)
        texts[self.number, : len(own)] = own
        torch.distributed.all_reduce(texts, group=self._group)
        parts = (text[:length].numpy().tobytes() for text, length in zip(texts, lengths.tolist(), strict=True))
        return [torch.load(io.BytesIO(part), map_location="cpu", weights_only=True) for part in parts]
