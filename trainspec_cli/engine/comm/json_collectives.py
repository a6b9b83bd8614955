"""Collectives for JSON: ranks exchange small values and errors as UTF-8 text in byte tensors.

Data from peers is never unpickled. A reader function converts the parsed JSON to the caller's type and rejects anything
else. The tensors are on the CPU, because every process group includes gloo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.core.errors import ERRORS_OF_RUNS, Problem, TrainspecError, WorkerError
from trainspec_cli.recipe.records import from_plain, to_plain

T = TypeVar("T")

MAX_BYTES = 2**26
"""Maximum size of a rank's message in bytes. For a very large model, the list of a rank's parts takes a few MiB."""
REFUSALS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, TrainspecError)
"""Errors that a reader raises for a malformed message."""


def gather_json(value: Any, read: Callable[[Any], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return, on every rank of `group` (None: all ranks), the values of its ranks, in the group's order.

    Called collectively by all ranks of the group. `read` converts the output of `json.loads`, which contains no tuples,
    no bytes, and only string keys. Raises the same WorkerError on every rank if a message is too long, not JSON, or
    rejected by `read`.
    """
    own = _encode(value)
    ranks = range(dist.get_world_size(group))
    lengths = torch.empty(len(ranks), dtype=torch.int64)
    dist.all_gather(list(lengths.split(1)), torch.tensor([own.numel()]), group=group)
    lengths_bytes = lengths.tolist()
    for rank in ranks:
        _check_length(lengths_bytes[rank], _global_rank(rank, group))
    padded = torch.zeros(max(lengths_bytes), dtype=torch.uint8)
    padded[: own.numel()] = own
    texts = torch.empty(len(ranks), padded.numel(), dtype=torch.uint8)
    dist.all_gather(list(texts.unbind()), padded, group=group)
    return [_decode(texts[rank, : lengths_bytes[rank]], read, _global_rank(rank, group)) for rank in ranks]


def broadcast_json(value: Any, read: Callable[[Any], T], src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the value of rank `src` (a global rank) on every rank of `group`. The values of other ranks are ignored.
    Works like `gather_json` otherwise.
    """
    own = _encode(value if dist.get_rank() == src else None)
    length = torch.tensor([own.numel()])
    dist.broadcast(length, src, group=group)
    _check_length(int(length), src)
    text = own if dist.get_rank() == src else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, src, group=group)
    return _decode(text, read, src)


def _encode(value: Any) -> Tensor:
    """Encode as ASCII JSON, which can also hold file names that are not UTF-8 (lone surrogates)."""
    return torch.frombuffer(bytearray(json.dumps(value, allow_nan=False).encode()), dtype=torch.uint8)


def _decode(text: Tensor, read: Callable[[Any], T], rank: int) -> T:
    try:
        return read(json.loads(text.numpy().tobytes().decode(), parse_constant=_refuse_constant))
    except REFUSALS as error:
        raise _refused(rank, f"a message that cannot be read: {str(error) or type(error).__name__}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_length(length_bytes: int, rank: int) -> None:
    if not 0 < length_bytes <= MAX_BYTES:
        raise _refused(rank, f"a message of {length_bytes:,} bytes; from 1 to {MAX_BYTES:,} are allowed")


def _refused(rank: int, what: str) -> WorkerError:
    hint = "check that all nodes run the same version of trainspec, and that no other program reaches its ports"
    return WorkerError(f"rank {rank} sent {what}", code="bad_message", hint=hint)


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


# Share one rank's errors, so that all ranks end with the same message


def agree_on_error(error: TrainspecError | None) -> TrainspecError | None:
    """Return, on every rank, the error of the first rank that had one; None if no rank had an error. Called
    collectively by all ranks."""
    shared = error and to_plain(SharedError(error.exit_code, error.problems))
    return next(filter(None, gather_json(shared, _read)), None)


def raise_together(error: TrainspecError | None) -> None:
    """Raise, on every rank, the error of the first rank that had one."""
    if found := agree_on_error(error):
        raise found from error


@contextmanager
def errors_together() -> Iterator[None]:
    """If an error is raised in the block on any rank, raise it on all ranks at the end of the block. The block must not
    contain a collective."""
    error = None
    try:
        yield
    except TrainspecError as own:
        error = own
    raise_together(error)


@dataclass(frozen=True)
class SharedError:
    """A rank's error in the form in which it is sent to other ranks."""

    exit_code: int
    problems: tuple[Problem, ...]


def _read(content: object) -> TrainspecError | None:
    if content is None:
        return None
    error = from_plain(SharedError, content)
    return ERRORS_OF_RUNS[error.exit_code](error.problems)
