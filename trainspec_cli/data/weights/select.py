"""The parts of another project's tensors that make up Hugging Face's, whatever boxes its files hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trainspec_cli.data.huggingface.safetensors import DTYPE_BYTES
from trainspec_cli.data.weights.naming import OtherTensor, RowRange
from trainspec_cli.data.weights.stored import Part, PartedTensor, Shape, StridedTensor


def select(
    wanted: Iterable[OtherTensor], held: Mapping[str, PartedTensor], shapes: Mapping[str, Shape]
) -> dict[str, PartedTensor]:
    """Return the Hugging Face tensors of these `shapes`. `held` has every one of `wanted`, by its name."""
    parts: dict[str, list[Part]] = {tensor: [] for tensor in shapes}
    for other in wanted:
        for rows in () if other.is_copy else other.rows:
            parts[rows.tensor] += _cut(held[other.name].parts, rows)
    return {tensor: PartedTensor(shape, tuple(parts[tensor])) for tensor, shape in shapes.items()}


def _cut(parts: Iterable[Part], rows: RowRange) -> Iterator[Part]:
    """Yield what the parts of another tensor hold of `rows`."""
    for part in parts:
        found = part if rows.layer is None else _unstack(part, rows.layer)
        if found is None:
            continue
        begin = found.start[0]
        extent = found.held.shape[0]
        low = max(0, -(-(begin - rows.at) // rows.step))
        high = min(rows.count, -(-(begin + extent - rows.at) // rows.step))
        if low < high:
            skipped = rows.at + low * rows.step - begin
            yield Part((rows.start + low, *found.start[1:]), _stride(found.held, skipped, high - low, rows.step))


def _unstack(part: Part, layer: int) -> Part | None:
    """Return what a part of a stack holds of one layer."""
    at = layer - part.start[0]
    if not 0 <= at < part.held.shape[0]:
        return None
    held = part.held
    start = held.start + at * held.strides[0] * DTYPE_BYTES[held.dtype]
    return Part(part.start[1:], StridedTensor(held.file, held.dtype, held.shape[1:], start, held.strides[1:]))


def _stride(held: StridedTensor, skipped: int, count: int, step: int) -> StridedTensor:
    """Return every `step`-th row, `count` of them, behind the first `skipped`."""
    start = held.start + skipped * held.strides[0] * DTYPE_BYTES[held.dtype]
    strides = (held.strides[0] * step, *held.strides[1:])
    return StridedTensor(held.file, held.dtype, (count, *held.shape[1:]), start, strides)
