"""Record which part of the engine makes each allocation on the emulated device, to explain peaks of its memory use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ENGINE = str(Path(__file__).parents[3] / "engine") + "/"
TOOLS = ENGINE + "tools/"
FSDP = "/torch/distributed/fsdp/"

_forward: dict[int, str] = {}
"""Sequence number of an autograd node -> the engine line that created the node. Only nodes of the main thread are
included. Autograd's threads have separate counters, and the nodes that they create while recomputing are never run."""


def find_origin() -> str:
    """Return the engine line, or the function of FSDP2, that runs the current operation. In a backward pass, this is
    the corresponding line of the forward pass."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if FSDP in file:
            return f"FSDP2 {frame.f_code.co_name}"
        if file.startswith(ENGINE) and not file.startswith(TOOLS):
            return f"{file[len(ENGINE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    if node is None:
        return "outside the engine"
    return f"backward of {_forward.get(node._sequence_nr(), node.name())}"


def note_forward() -> None:
    """Remember the current engine line for the autograd node of the operation that is running."""
    if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
        _forward[torch._C._autograd._get_sequence_nr() - 1] = find_origin()


@dataclass
class LoggedBlock:
    """A memory block, from its allocation to its release."""

    nbytes: int
    """The block's size in the allocator, rounded up to 512 bytes."""
    shape: str
    origin: str
    part: str
    """The part of the step that allocated the block."""
    total_bytes: int
    """Total allocated bytes directly after the allocation."""
    ended: int | None = None
    """Number of blocks that the log contained when the block was released; None while it is live."""


class AllocationLog:
    """The live and released blocks of a device's memory, to find those that are live at the peak."""

    def __init__(self) -> None:
        self.part = "build"
        """The part of the step that is running."""
        self.failed: LoggedBlock | None = None
        """The allocation that did not fit."""
        self.live_at_failure: list[LoggedBlock] = []
        self._blocks: list[LoggedBlock] = []
        self._total_bytes = 0

    def add(self, nbytes: int, shape: str) -> LoggedBlock:
        self._total_bytes += nbytes
        self._blocks.append(LoggedBlock(nbytes, shape, find_origin(), self.part, self._total_bytes))
        return self._blocks[-1]

    def fail(self, nbytes: int, shape: str) -> None:
        self.failed = LoggedBlock(nbytes, shape, find_origin(), self.part, self._total_bytes)
        self.live_at_failure = self.live

    def end(self, block: LoggedBlock) -> None:
        self._total_bytes -= block.nbytes
        block.ended = len(self._blocks)

    def begin(self) -> None:
        """Forget the released blocks. From now on, the peak covers only later allocations."""
        self._blocks = self.live
        for block in self._blocks:
            block.total_bytes = 0
        if self._blocks:
            self._blocks[-1].total_bytes = self._total_bytes

    @property
    def live(self) -> list[LoggedBlock]:
        return [block for block in self._blocks if block.ended is None]

    @property
    def at_peak(self) -> list[LoggedBlock]:
        """The blocks that were live at the peak. The last of them caused it."""
        place = max(range(len(self._blocks)), key=lambda number: self._blocks[number].total_bytes)
        return [block for block in self._blocks[: place + 1] if block.ended is None or block.ended > place]
