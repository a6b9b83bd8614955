"""A run's weights in the formats of other projects: a distributed checkpoint of torch (DCP), and a file of torch.save.

A distributed checkpoint is written box by box, a stack of layers one layer after another, so that a checkpoint larger
than memory passes through. A file of torch.save is put together in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from trainspec_cli.data.huggingface.safetensors import Parameter, Piece, parameters
from trainspec_cli.data.weights.naming import OtherTensor, RowRange
from trainspec_cli.data.weights.stored import Shape
from trainspec_cli.recipe.keys.model import DecoderModel

ReadTensor = Callable[[str], Tensor]
"""Given the name of a Hugging Face tensor, return it."""


@dataclass(frozen=True)
class WrittenBox:
    """A part of a tensor that is written at once."""

    tensor: OtherTensor
    start: Shape
    shape: Shape
    rows: tuple[RowRange, ...]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor:
        """Put the box together from Hugging Face's tensors."""
        whole = torch.empty(self.shape, dtype=dtype)
        box = whole if self.rows[0].layer is None else whole[0]
        tensors = {name: read(name) for name in dict.fromkeys(rows.tensor for rows in self.rows)}
        for rows in self.rows:
            box[rows.at : rows.at + rows.step * rows.count : rows.step].copy_(
                tensors[rows.tensor][rows.start : rows.start + rows.count]
            )
        return whole


def boxes_of(tensor: OtherTensor) -> Iterator[WrittenBox]:
    """Yield the whole tensor, or one layer of a stack after another."""
    layers = list(dict.fromkeys(rows.layer for rows in tensor.rows))
    for layer in layers:
        if layer is None:
            yield WrittenBox(tensor, (0,) * len(tensor.shape), tensor.shape, tensor.rows)
        else:
            start = (layer, *(0 for _ in tensor.shape[1:]))
            rows = tuple(rows for rows in tensor.rows if rows.layer == layer)
            yield WrittenBox(tensor, start, (1, *tensor.shape[1:]), rows)


def write_distributed(tensors: Sequence[OtherTensor], read: ReadTensor, dtype: torch.dtype, folder: Path) -> int:
    """Write a distributed checkpoint; return the number of its files of weights."""
    planner = _Planner([box for tensor in tensors for box in boxes_of(tensor)], read, dtype)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    return len(list(folder.glob("*.distcp")))


class _Planner(dcp.DefaultSavePlanner):
    """Plans one item for each box, and reads it when it is written."""

    def __init__(self, boxes: Sequence[WrittenBox], read: ReadTensor, dtype: torch.dtype):
        super().__init__()
        self._boxes = {MetadataIndex(box.tensor.name, box.start): box for box in boxes}
        self._read = read
        self._dtype = dtype

    def create_local_plan(self) -> SavePlan:
        paths = {box.tensor.name: (box.tensor.name,) for box in self._boxes.values()}
        self.plan = SavePlan([self._item(index, box) for index, box in self._boxes.items()], planner_data=paths)
        return self.plan

    def _item(self, index: MetadataIndex, box: WrittenBox) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        data = TensorWriteData(chunk, TensorProperties(dtype=self._dtype), torch.Size(box.tensor.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = replace(write_item.index, index=None)
        return self._boxes[index].read(self._read, self._dtype)


def write_state(tensors: Sequence[OtherTensor], read: ReadTensor, dtype: torch.dtype, file: Path) -> int:
    """Write one file of torch.save as litgpt has it; return 1."""
    state = {box.tensor.name: box.read(read, dtype) for tensor in tensors for box in boxes_of(tensor)}
    torch.save({"model": state}, file)
    return 1


def reader(model: DecoderModel, read: Callable[[Sequence[Parameter]], Mapping[str, Tensor]]) -> ReadTensor:
    """Return what reads one Hugging Face tensor, given what reads whole parameters of the engine."""
    places = {piece.tensor: (parameter, piece) for parameter in parameters(model) for piece in parameter.pieces}

    def read_tensor(name: str) -> Tensor:
        parameter, piece = places[name]
        return cut(read([parameter])[parameter.name], piece)

    return read_tensor


def cut(full: Tensor, piece: Piece) -> Tensor:
    """Cut a Hugging Face tensor out of a whole parameter."""
    box = full[tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))]
    return box.flatten(0, -2).transpose(-1, -2) if piece.transposed else box
