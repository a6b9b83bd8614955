"""Write a run's weights as the safetensors files of a Hugging Face folder, in a single process without a GPU.

Parameters are read and written file by file, so a checkpoint may be larger than memory. An index lists the files if
there are several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.data.huggingface.folder import list_names
from trainspec_cli.data.huggingface.module_tensors import module_adapters, module_parameters
from trainspec_cli.data.huggingface.safetensors import (
    ADAPTERS,
    DTYPE_BYTES,
    INDEX,
    SINGLE,
    Parameter,
    Piece,
    Places,
    adapters_of,
    make_header,
    parameters,
    places_of,
    stored_shape,
)
from trainspec_cli.data.weights.naming import OtherTensor, RowRange, other_tensors
from trainspec_cli.data.weights.stored import Shape
from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.checkpoint.manifest import read_manifest
from trainspec_cli.engine.checkpoint.memory import DTYPES
from trainspec_cli.engine.checkpoint.saver import PREFIX, read_weights
from trainspec_cli.engine.shares import ADAPTERS as ADAPTER_ENDS
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.model import TextModel, TransformersModel
from trainspec_cli.recipe.keys.run import LITGPT_FILE
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import ExportRequest, ExportResult
from trainspec_cli.run.folder.record import read_plan_file

MEGATRON_COMMON = "common.pt"
"""The file for everything that Megatron does not shard. Megatron's loader rejects a folder without it."""


def run(request: ExportRequest) -> ExportResult:
    plan = read_plan_file(Path(request.plan_json))
    if request.what == "base":
        plan = replace(plan, spec=replace(plan.spec, lora=LoraSpec()))  # there are no adapters to merge
    if plan.spec.lora.rank:
        _refuse_lost_adapters(plan, Path(request.checkpoint))
    if request.format != "safetensors":
        return ExportResult(export_other(plan, request))
    if request.what == "adapters":
        adapters = [half for parameter in _parameters(plan) for half in _adapters(plan, parameter)]
        full = read(plan, Path(request.checkpoint), adapters)
        flat = [flatten_experts(half, full) for half in adapters]
        write_file(Path(request.output) / ADAPTERS, flat, full, request.dtype)
        return ExportResult(1)
    return ExportResult(export(plan, request))


def _refuse_lost_adapters(plan: Plan, checkpoint: Path) -> None:
    """Raise MachineError if the checkpoint contains an adapter that the export would leave out."""
    exported = {half.name for parameter in _parameters(plan) for half in _adapters(plan, parameter)}
    lost = sorted(stored_adapters(checkpoint) - exported)
    if lost:
        message = f"no exported matrix has the adapters {list_names(lost)} of {checkpoint}"
        hint = "export with the version of trainspec that trained them"
        raise MachineError(Problem("bad_checkpoint", message, "", hint))


def stored_adapters(checkpoint: Path) -> set[str]:
    """Return the names of the adapters' parameters in a checkpoint."""
    names = {name.removeprefix(PREFIX) for name in read_manifest(checkpoint).tensors if name.startswith(PREFIX)}
    return {name for name in names if name.endswith(ADAPTER_ENDS)}


def export(plan: Plan, request: ExportRequest) -> int:
    """Write the model of `plan` to the folder, as safetensors files with an index. Return the number of files."""
    files = list(_files(_parameters(plan), request))
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SINGLE]
    where: dict[str, str] = {}
    for name, held in zip(names, files, strict=True):
        write_file(Path(request.output) / name, held, read(plan, Path(request.checkpoint), held), request.dtype)
        where |= {piece.tensor: name for parameter in held for piece in parameter.pieces}
    if len(names) > 1:
        total = sum(_bytes(held, request) for held in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (Path(request.output) / INDEX).write_text(json_text(index) + "\n", encoding="utf-8")
    return len(names)


def export_other(plan: Plan, request: ExportRequest) -> int:
    """Write the weights in the format of a project other than Hugging Face; return the number of files."""
    model = plan.spec.model
    folder = Path(request.output)
    assert isinstance(model, TextModel), "other families are rejected with an error that names them"
    tensors = other_tensors(model, request.naming)
    dtype = DTYPES[request.dtype]
    read_tensor = reader(model, lambda held: read(plan, Path(request.checkpoint), held))
    if request.naming == "megatron":
        torch.save({}, folder / MEGATRON_COMMON)
    if request.format == "dcp":
        return write_distributed(tensors, read_tensor, dtype, folder)
    return write_state(tensors, read_tensor, dtype, folder / LITGPT_FILE)


def _files(wanted: Sequence[Parameter], request: ExportRequest) -> Iterator[list[Parameter]]:
    """Yield the parameters of one file after another. A file has at most `max_file_bytes`, unless a single parameter is
    larger, or several that one tensor consists of."""
    held: list[Parameter] = []
    size = 0
    for together in _sharing(wanted):
        added = _bytes(together, request)
        if held and size + added > request.max_file_bytes:
            yield held
            held = []
            size = 0
        held += together
        size += added
    yield held


def _bytes(held: Sequence[Parameter], request: ExportRequest) -> int:
    return sum(
        math.prod(piece.shape) * DTYPE_BYTES[parameter.dtype or request.dtype]
        for parameter in held
        for piece in parameter.pieces
    )


def _sharing(wanted: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Yield the parameters in runs, so that no tensor consists of parameters of two runs."""
    last = {piece.tensor: index for index, parameter in enumerate(wanted) for piece in parameter.pieces}
    together: list[Parameter] = []
    end = 0
    for index, parameter in enumerate(wanted):
        together.append(parameter)
        end = max(end, *(last[piece.tensor] for piece in parameter.pieces))
        if index == end:
            yield together
            together = []
            end = index + 1


def _parameters(plan: Plan) -> list[Parameter]:
    if isinstance(plan.spec.model, TransformersModel):
        with torch.device("meta"):
            module = build_model(plan.spec.model, plan.spec.data.seq_len).module
        return module_parameters(dict(module.named_parameters()))
    assert isinstance(plan.spec.model, TextModel), "other families are rejected with an error that names them"
    return parameters(plan.spec.model)


def read(plan: Plan, checkpoint: Path, wanted: Sequence[Parameter]) -> dict[str, Tensor]:
    """Read full parameters with merged adapters: W + (alpha / R) B A, or for experts, W + (alpha / R) A B. With
    magnitudes, the rows of the result are scaled to them."""
    halves = {parameter.name: _adapters(plan, parameter) for parameter in wanted}
    shapes = {held.name: held.shape for parameter in wanted for held in (parameter, *halves[parameter.name])}
    full = read_weights(checkpoint, shapes)
    for name, adapters in halves.items():
        if adapters:
            a, b, *magnitude = (full.pop(half.name) for half in adapters)
            if full[name].dim() == 3:
                full[name].baddbmm_(a, b, alpha=plan.spec.lora.scale)
            else:
                full[name].addmm_(b, a, alpha=plan.spec.lora.scale)
            for m_F in magnitude:
                full[name] *= (m_F / torch.linalg.vector_norm(full[name], dim=1))[:, None]
    return full


def _adapters(plan: Plan, parameter: Parameter) -> list[Parameter]:
    """Return the two factors of a matrix's adapter; nothing if it has none."""
    if isinstance(plan.spec.model, TransformersModel):
        return module_adapters(parameter, plan.spec.model, plan.spec.lora)
    return adapters_of(parameter, plan.spec.lora)


def flatten_experts(half: Parameter, full: dict[str, Tensor]) -> Parameter:
    """Convert a factor of experts' adapters in `full` to PEFT's layout: A (E, D, R) to (E * R, D), and B (E, R, F) to
    (F, R * E), whose columns are ordered by rank and then by expert. Factors of matrices stay the same."""
    if len(half.shape) < 3:
        return half
    order = (0, 2, 1) if half.name.endswith("lora_a") else (2, 1, 0)
    tensor = full[half.name].permute(order)
    tensor = tensor.flatten(0, 1) if half.name.endswith("lora_a") else tensor.flatten(1, 2)
    full[half.name] = tensor
    shape = tuple(tensor.shape)
    return Parameter(half.name, shape, (Piece(half.pieces[0].tensor, (0, 0), shape),))


def write_file(path: Path, held: Sequence[Parameter], full: Mapping[str, Tensor], dtype: str) -> None:
    tensors = places_of(held)
    with path.open("wb") as file:
        formats = {name: places[0][0].dtype or dtype for name, places in tensors.items()}
        file.write(make_header({name: (formats[name], stored_shape(places)) for name, places in tensors.items()}))
        for name, places in tensors.items():
            tensor = assemble(places, full).to(DTYPES[formats[name]]).contiguous()
            file.write(tensor.view(torch.uint8).numpy().data)


# Write a run's weights in the formats of other projects: a torch distributed checkpoint (DCP) or a torch.save file.
#
# A distributed checkpoint is written box by box (a stack of layers, layer by layer), so it may be larger than memory. A
# torch.save file is assembled in memory.


ReadTensor = Callable[[str], Tensor]
"""Given a Hugging Face tensor's name, returns the tensor."""


@dataclass(frozen=True)
class WrittenBox:
    """A part of a tensor that is written as one piece."""

    tensor: OtherTensor
    start: Shape
    shape: Shape
    rows: tuple[RowRange, ...]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor:
        """Assemble the box from Hugging Face's tensors."""
        whole = torch.empty(self.shape, dtype=dtype)
        box = whole if self.rows[0].layer is None else whole[0]
        tensors = {name: read(name) for name in dict.fromkeys(rows.tensor for rows in self.rows)}
        for rows in self.rows:
            box[rows.at : rows.at + rows.step * rows.count : rows.step].copy_(
                tensors[rows.tensor][rows.start : rows.start + rows.count]
            )
        return whole


def boxes_of(tensor: OtherTensor) -> Iterator[WrittenBox]:
    """Yield one box for the full tensor, or one for each layer of a stack."""
    layers = list(dict.fromkeys(rows.layer for rows in tensor.rows))
    for layer in layers:
        if layer is None:
            yield WrittenBox(tensor, (0,) * len(tensor.shape), tensor.shape, tensor.rows)
        else:
            start = (layer, *(0 for _ in tensor.shape[1:]))
            rows = tuple(rows for rows in tensor.rows if rows.layer == layer)
            yield WrittenBox(tensor, start, (1, *tensor.shape[1:]), rows)


def write_distributed(tensors: Sequence[OtherTensor], read: ReadTensor, dtype: torch.dtype, folder: Path) -> int:
    """Write a distributed checkpoint; return its number of weight files."""
    planner = _Planner([box for tensor in tensors for box in boxes_of(tensor)], read, dtype)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    return len(list(folder.glob("*.distcp")))


class _Planner(dcp.DefaultSavePlanner):
    """A save planner with one item per box. A box's contents are not read until it is written."""

    def __init__(self, boxes: Sequence[WrittenBox], read: ReadTensor, dtype: torch.dtype):
        super().__init__()
        self._boxes = {MetadataIndex(box.tensor.name, box.start): box for box in boxes}
        self._read = read
        self._dtype = dtype

    def create_local_plan(self) -> SavePlan:
        paths = {box.tensor.name: (box.tensor.name,) for box in self._boxes.values()}
        items = []
        for index, box in self._boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=self._dtype), torch.Size(box.tensor.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = replace(write_item.index, index=None)
        return self._boxes[index].read(self._read, self._dtype)


def write_state(tensors: Sequence[OtherTensor], read: ReadTensor, dtype: torch.dtype, file: Path) -> int:
    """Write one torch.save file in litgpt's format; return 1."""
    state = {box.tensor.name: box.read(read, dtype) for tensor in tensors for box in boxes_of(tensor)}
    torch.save({"model": state}, file)
    return 1


def reader(model: TextModel, read: Callable[[Sequence[Parameter]], Mapping[str, Tensor]]) -> ReadTensor:
    """Return a function that reads one Hugging Face tensor, given one that reads the engine's full parameters."""
    places = places_of(parameters(model))

    def read_tensor(name: str) -> Tensor:
        return assemble(places[name], read([parameter for parameter, _ in places[name]]))

    return read_tensor


def assemble(places: Places, full: Mapping[str, Tensor]) -> Tensor:
    """Return the Hugging Face tensor that consists of these pieces of full parameters."""
    boxes = [cut(full[parameter.name], piece) for parameter, piece in places]
    if places[0][1].lane is not None:
        return torch.stack(boxes, dim=-1).flatten(-2)
    return boxes[0] if len(boxes) == 1 else torch.cat(boxes, dim=1 if places[0][1].transposed else 0)


def cut(full: Tensor, piece: Piece) -> Tensor:
    """Extract a piece of a full parameter, with the dimensions that it has in the file."""
    box = full[tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))]
    return (box.transpose(-1, -2) if piece.transposed else box).reshape(piece.tensor_shape)
