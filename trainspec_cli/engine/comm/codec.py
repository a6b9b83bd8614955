"""Encode numbers in fewer bits for transfer: as bf16, or as 8-bit or 4-bit integers in blocks with one scale each.

Eight bits: a block's scale is its largest magnitude divided by the largest integer, in bf16. The error of a value is at
most half a scale; if the scale was rounded down, the largest value is clipped by up to 127 / 2**9 of the scale. The
scale is bf16 and not fp16, because the smallest number in fp16, 6e-8, is larger than many gradients of a mean loss.

Four-bit codes encode values rotated by a 32 x 32 Hadamard matrix, as in SDP4Bit (arXiv:2410.15526), which spreads an
outlier over its neighbours. The rotation is its own inverse and preserves Euclidean norms.

Shapes: R rows, one for each rank; N values; K blocks; V values per block; B bytes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainspec_cli.core.environment_names import RENDEZVOUS

ROTATED = 32
GRADIENT_BLOCK = 128
WEIGHT_BLOCK = 2048
SCALE_BYTES = 2
STEP_BYTES = 4
HALF = 8
NIBBLE = 15
NO_STEP, LARGEST_STEP, NOT_FINITE = 0, 254, 255
"""Special codes for a block's step in the four-bit format: a block of zeros, the row's largest step, a block with
non-finite values."""
STEPS_OF_AN_OCTAVE = 8
TOO_SMALL = torch.finfo(torch.float32).tiny
"""Scales below this are treated as 0, because dividing by them may overflow."""


class Codec(Protocol):
    """A wire format. Each row can be decoded without the others."""

    @property
    def block(self) -> int:
        """Number of values that are encoded together. Rows need no padding if their length is a multiple of this."""
        ...

    @property
    def feeds_back(self) -> bool:
        """Return whether the error of an encoded gradient is so large that it must be added to the next gradient."""
        ...

    @property
    def splits_rows(self) -> bool:
        """Return whether a row can be split between blocks into parts that are encoded separately."""
        ...

    def ranges(self, values: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the byte ranges of the values from `start` to `end` in an encoded row of `values` values.
        Concatenated, these bytes form a valid row. `start` is a multiple of `block`, and so is `end` unless it is the
        end of the row."""
        ...

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the rows as bytes, (R, B) of uint8; `x_RN` is fp32. A block that contains a non-finite value is
        non-finite when decoded."""
        ...

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        """Return (R, `values`) in fp32."""
        ...

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        """Return the sum of the decoded rows, (`values`,) in fp32, in the order of the rows."""
        ...


@dataclass(frozen=True)
class Bf16:
    block: int = 1
    feeds_back: bool = False
    """False, because rounding to an 8-bit mantissa is unbiased and its error is at most 1/256 of each value."""
    splits_rows: bool = True

    def ranges(self, values: int, start: int, end: int) -> list[tuple[int, int]]:
        return [(2 * start, 2 * end)]

    def encode(self, x_RN: Tensor) -> Tensor:
        return x_RN.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        return wire_RB.view(torch.bfloat16)[:, :values].float()

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        return self.decode(wire_RB, values).sum(0)


@dataclass(frozen=True)
class EightBits:
    """A row consists of the scales of its blocks, followed by their integers."""

    block: int
    feeds_back: bool = True
    splits_rows: bool = True

    def ranges(self, values: int, start: int, end: int) -> list[tuple[int, int]]:
        blocks, first, last = (-(-place // self.block) for place in (values, start, end))
        codes = SCALE_BYTES * blocks
        return [
            (SCALE_BYTES * first, SCALE_BYTES * last),
            (codes + first * self.block, codes + last * self.block),
        ]

    def encode(self, x_RN: Tensor) -> Tensor:
        rows, values = x_RN.shape
        x_RKV = pad(x_RN, (0, -values % self.block)).view(rows, -1, self.block)
        scale_RK = (x_RKV.abs().amax(-1) / 127).to(torch.bfloat16)
        scale_RK = torch.where(scale_RK < TOO_SMALL, 0.0, scale_RK)
        codes_RKV = (x_RKV * _inverse(scale_RK.float())[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale_RK.view(torch.uint8), codes_RKV.view(rows, -1).view(torch.uint8)], dim=1)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        rows = len(wire_RB)
        blocks = -(-values // self.block)
        scales, codes = wire_RB.split([SCALE_BYTES * blocks, blocks * self.block], dim=1)
        scale_RK = scales.contiguous().view(torch.bfloat16).float()
        codes_RKV = codes.view(torch.int8).reshape(rows, blocks, -1)
        return (codes_RKV * scale_RK[..., None]).view(rows, -1)[:, :values]

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        return self.decode(wire_RB, values).sum(0)


@dataclass(frozen=True)
class FourBits:
    """Sixteen evenly spaced levels: -7.5, -6.5 ... 7.5 times the block's step.

    A block's step is at least an eighth of its largest magnitude and at most 2**(1/8) times that. The error of a
    rotated value is at most half a step. A row consists of its largest step in fp32, a byte per block for the block's
    step (in eighths of an octave below the largest), and then the integers, two per byte. A block whose step is less
    than 2**-31 of the row's largest step is sent as zeros.
    """

    block: int = 64
    feeds_back: bool = True
    splits_rows: bool = False
    """Rows cannot be split, because all blocks depend on the row's largest step."""

    def ranges(self, values: int, start: int, end: int) -> list[tuple[int, int]]:
        blocks, first, last = (-(-place // self.block) for place in (values, start, end))
        packed = STEP_BYTES + blocks
        return [
            (0, STEP_BYTES),
            (STEP_BYTES + first, STEP_BYTES + last),
            (packed + first * self.block // 2, packed + last * self.block // 2),
        ]

    def encode(self, x_RN: Tensor) -> Tensor:
        rows, values = x_RN.shape
        x_RKV = _rotate(pad(x_RN, (0, -values % self.block))).view(rows, -1, self.block)
        needed_RK = x_RKV.abs().amax(-1) / HALF
        finite_RK = needed_RK.isfinite()
        largest_R1 = torch.where(finite_RK, needed_RK, 0.0).amax(-1, keepdim=True)
        below_RK = (torch.log2(needed_RK * _inverse(largest_R1)) * STEPS_OF_AN_OCTAVE).ceil()
        codes_RK = torch.where(finite_RK, (LARGEST_STEP + below_RK).clamp(NO_STEP, LARGEST_STEP), NOT_FINITE)
        codes_RK = codes_RK.to(torch.uint8)
        per_step_RK = _inverse(_steps(codes_RK, largest_R1))
        integers_RKV = (x_RKV * per_step_RK[..., None]).floor_().clamp_(-HALF, HALF - 1)
        low, high = (integers_RKV + HALF).to(torch.uint8).chunk(2, dim=-1)
        packed_RB = (low | (high << 4)).view(rows, -1)
        return torch.cat([largest_R1.view(torch.uint8), codes_RK, packed_RB], dim=1)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        return _rotate(self._decode_rotated(wire_RB, values))[:, :values]

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        """Only the sum is rotated back, not the individual rows."""
        return _rotate(self._decode_rotated(wire_RB, values).sum(0))[:values]

    def _decode_rotated(self, wire_RB: Tensor, values: int) -> Tensor:
        rows = len(wire_RB)
        blocks = -(-values // self.block)
        largest, codes_RK, packed = wire_RB.split([STEP_BYTES, blocks, blocks * self.block // 2], dim=1)
        steps_RK = _steps(codes_RK, largest.flatten().clone().view(torch.float32)[:, None])
        pairs = packed.reshape(rows, blocks, -1)
        middles_RKV = torch.cat([pairs & NIBBLE, pairs >> 4], dim=-1) - (HALF - 0.5)
        return (middles_RKV * steps_RK[..., None]).view(rows, -1)


GRADIENT_CODECS: dict[str, Codec] = {
    "bf16": Bf16(),
    "int8": EightBits(GRADIENT_BLOCK),
    "int4": FourBits(),
}
"""Maps a value of `comm.gradients` to its codec."""
PARAMETER_CODECS: dict[str, Codec] = {"bf16": Bf16(), "int8": EightBits(WEIGHT_BLOCK, feeds_back=False)}


def _inverse(x: Tensor) -> Tensor:
    """Return 1 / x, or 0 for an x that is NaN or too small to divide by."""
    return torch.where(x >= TOO_SMALL, 1 / x, 0.0)


def _steps(codes_RK: Tensor, largest_R1: Tensor) -> Tensor:
    """Return the steps of the blocks; 0 for a block of zeros, NaN for a block with non-finite values."""
    steps_RK = _fractions(codes_RK.device)[codes_RK.int()] * largest_R1
    return torch.where(steps_RK < TOO_SMALL, 0.0, steps_RK)


@cache
def _fractions(device: torch.device) -> Tensor:
    """Return the step of each code, as a fraction of the row's largest step."""
    parts = [2.0 ** ((code - LARGEST_STEP) / STEPS_OF_AN_OCTAVE) for code in range(NOT_FINITE)]
    return torch.tensor([0.0, *parts[1:], torch.nan], device=device)


def _rotate(x: Tensor) -> Tensor:
    return (x.reshape(-1, ROTATED) @ _hadamard(x.device)).view(x.shape)


@cache
def _hadamard(device: torch.device) -> Tensor:
    """Return the Hadamard matrix of order `ROTATED` (Sylvester's construction), scaled to be orthonormal. It is
    symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATED:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / ROTATED**0.5).to(device)


# Count the bytes that this process has written to its peers, as reported by the kernel for the process's TCP sockets.
#
# gloo carries every collective of a CPU run over TCP, even between ranks of one node. For each connection, the kernel
# counts the bytes sent, those retransmitted, and those still waiting in its buffer (`TCP_INFO`, linux/tcp.h): the first
# minus the second plus the third is the number of bytes written to the connection, without TCP and IP headers. NCCL's
# traffic does not use these sockets, so nothing is counted in a run on GPUs.


NOT_SENT_OFFSET, SENT_OFFSET, RETRANSMITTED_OFFSET, INFO_BYTES = 144, 200, 208, 216
"""Offsets in `struct tcp_info`. All three fields exist since Linux 4.19."""
LARGEST_INFO_BYTES = 512
ESTABLISHED = 1
"""The first byte of `struct tcp_info`, the state (`TCP_ESTABLISHED`, net/tcp_states.h)."""
LIBC = ctypes.CDLL(None)
OTHER = "other"
Connection = tuple[int, int]
"""A descriptor and its inode, which together distinguish a connection from later ones."""


@dataclass
class WireMeter:
    """Breaks down the written bytes by purpose; `other` is the remainder. Connections are read through their
    descriptors and never kept open, because a peer must notice when gloo closes one."""

    counted: Counter[str] = field(default_factory=Counter)
    _written: dict[Connection, int] = field(default_factory=dict)
    _reserved: dict[Connection, str] = field(default_factory=dict)
    """Maps each connection whose bytes all count for one purpose to that purpose."""

    def find_connections(self) -> None:
        """Find connections that have been opened or closed. The bytes that new connections have written so far count as
        `other`."""
        self._count(OTHER)
        self._written = {connection: self._written.get(connection, 0) for connection in open_connections()}
        self._count(OTHER)

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Count the bytes written during the block as `name`."""
        self._count(OTHER)
        try:
            yield
        finally:
            self._count(name)

    def reserve(self, connections: Iterable[Connection], purpose: str) -> None:
        """Count the bytes written to `connections` as `purpose` until `release`, in addition to the bytes of other
        connections with this purpose."""
        self._count(OTHER)
        self._reserved |= dict.fromkeys(connections, purpose)

    def release(self, connections: Iterable[Connection]) -> None:
        self._count(OTHER)
        for connection in connections:
            self._reserved.pop(connection, None)

    def totals(self) -> dict[str, int]:
        self._count(OTHER)
        return dict(self.counted)

    def _count(self, name: str) -> None:
        for connection, before in self._written.items():
            info = read_tcp_info(connection)
            if info is None:
                continue
            (waiting,) = struct.unpack_from("=I", info, NOT_SENT_OFFSET)
            sent, again = struct.unpack_from("=QQ", info, SENT_OFFSET)
            written = int(sent - again + waiting)
            if written >= before:  # the count is lower if the kernel has given the descriptor to a new connection
                self.counted[self._reserved.get(connection, name)] += written - before
                self._written[connection] = written


def open_connections() -> Iterator[Connection]:
    """Yield the process's TCP connections, except those to the rendezvous server, which do not carry collectives."""
    server = os.environ.get(RENDEZVOUS, "").rpartition(":")[2]
    with suppress(OSError):  # for example if the process has run out of descriptors
        for entry in list(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else ():
            with suppress(OSError):  # closed in the meantime, or not a socket
                with borrow(int(entry.name)) as end:
                    end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)  # raises OSError if it is not a TCP socket
                    is_of_peer = str(end.getpeername()[1]) != server
                if is_of_peer:
                    yield int(entry.name), entry.stat().st_ino


def end_connections() -> None:
    """Shut down the process's connections to its peers, so that every wait on them, at either end, fails with an
    error."""
    for descriptor, _ in open_connections():
        with suppress(OSError), borrow(descriptor) as end:  # the connection was closed in the meantime
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def borrow(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket for a file descriptor; the descriptor remains open afterwards. Raises OSError if it is not a
    socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def is_established(connection: Connection) -> bool:
    """Return False once either end has closed the connection."""
    info = read_tcp_info(connection)
    return info is not None and info[0] == ESTABLISHED


def read_tcp_info(connection: Connection) -> bytes | None:
    """Return the kernel's `struct tcp_info` of a connection, whose length depends on the kernel. None if the connection
    is closed, even if another one now has its descriptor, or if the kernel is older than 4.19."""
    descriptor, inode = connection
    info = ctypes.create_string_buffer(LARGEST_INFO_BYTES)
    size = ctypes.c_uint(LARGEST_INFO_BYTES)
    failed = LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < INFO_BYTES:
        return None
    with suppress(OSError):  # the connection was closed in the meantime
        return info.raw[: size.value] if os.fstat(descriptor).st_ino == inode else None
    return None
