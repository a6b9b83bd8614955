"""Collectives over JSON: ranks exchange small values as UTF-8 text in tensors of bytes.

Nothing that a peer sends is unpickled. A reader turns the parsed JSON into the value that the caller wants, and refuses
everything else. The tensors lie on the CPU: every process group has gloo for those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.errors import TrainspecError, WorkerError

T = TypeVar("T")

MAX_BYTES = 2**26
"""The longest message of one rank. The list of the parts that a rank holds of a very large model takes a few MiB."""
REFUSALS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, TrainspecError)
"""What a reader raises where the message is not what it should be."""


def gather_json(value: Any, read: Callable[[Any], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Give every rank of `group` (None: all) the values of all of them, in the order of the group's ranks.

    All ranks of the group call it together. `read` converts what `json.loads` gives: there are no tuples, no bytes, and
    keys are text. Raises WorkerError on every rank alike where a message is too long, no JSON, or refused by `read`.
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
    """Give every rank of `group` the value of rank `src` (its number among all ranks); the others' is not looked at.

    As for the rest, see `gather_json`.
    """
    own = _encode(value if dist.get_rank() == src else None)
    length = torch.tensor([own.numel()])
    dist.broadcast(length, src, group=group)
    _check_length(int(length), src)
    text = own if dist.get_rank() == src else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, src, group=group)
    return _decode(text, read, src)


def _encode(value: Any) -> Tensor:
    """ASCII, so that names of files which are no UTF-8 (lone surrogates) pass too."""
    return torch.frombuffer(bytearray(json.dumps(value, allow_nan=False).encode()), dtype=torch.uint8)


def _decode(text: Tensor, read: Callable[[Any], T], rank: int) -> T:
    try:
        return read(json.loads(text.numpy().tobytes().decode(), parse_constant=_refuse_constant))
    except REFUSALS as error:
        raise _refused(rank, f"a message that cannot be read: {str(error) or type(error).__name__}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _check_length(length_bytes: int, rank: int) -> None:
    if not 0 < length_bytes <= MAX_BYTES:
        raise _refused(rank, f"a message of {length_bytes:,} bytes; from 1 to {MAX_BYTES:,} are allowed")


def _refused(rank: int, what: str) -> WorkerError:
    hint = "see that all hosts run the same version of trainspec, and that nobody else reaches its ports"
    return WorkerError(f"rank {rank} sent {what}", code="bad_message", hint=hint)


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
