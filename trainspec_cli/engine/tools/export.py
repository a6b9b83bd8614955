"""A run's weights as a Hugging Face folder's safetensors files, by one process without a GPU.

Parameters are read a file's worth at a time, so that a checkpoint larger than memory passes
through. The files are named by an index where there is more than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainspec_cli.data.huggingface.safetensors import (
    ADAPTERS,
    DTYPE_BYTES,
    INDEX,
    SINGLE,
    Parameter,
    adapters_of,
    make_header,
    parameters,
)
from trainspec_cli.data.weights.naming import other_tensors
from trainspec_cli.engine.checkpoint.memory import DTYPES
from trainspec_cli.engine.checkpoint.saver import read_weights
from trainspec_cli.engine.tools.export_other import cut, reader, write_distributed, write_state
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import LITGPT_FILE
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import ExportRequest, ExportResult
from trainspec_cli.run.folder.record import read_plan_file

MEGATRON_COMMON = "common.pt"
"""The file of what Megatron does not shard, without which its loader refuses a folder."""


def run(request: ExportRequest) -> ExportResult:
    plan = read_plan_file(Path(request.plan_json))
    if request.what == "base":
        plan = replace(plan, spec=replace(plan.spec, lora=LoraSpec()))  # nothing is merged
    if request.format != "safetensors":
        return ExportResult(export_other(plan, request))
    return ExportResult((export_adapters if request.what == "adapters" else export)(plan, request))


def export(plan: Plan, request: ExportRequest) -> int:
    """Write the safetensors files of `plan`'s model, and their index, into the folder; return their number."""
    files = list(_files(_parameters(plan), request))
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SINGLE]
    where: dict[str, str] = {}
    for name, held in zip(names, files, strict=True):
        write_file(Path(request.output) / name, held, read(plan, Path(request.checkpoint), held), request.dtype)
        where |= {piece.tensor: name for parameter in held for piece in parameter.pieces}
    if len(names) > 1:
        total = sum(parameter.numel for held in files for parameter in held) * DTYPE_BYTES[request.dtype]
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (Path(request.output) / INDEX).write_text(json_text(index) + "\n", encoding="utf-8")
    return len(names)


def export_other(plan: Plan, request: ExportRequest) -> int:
    """Write the weights as a project other than Hugging Face has them; return the number of files."""
    model = plan.spec.model
    folder = Path(request.output)
    assert isinstance(model, DecoderModel), "other families are refused by name"
    tensors = other_tensors(model, request.naming)
    dtype = DTYPES[request.dtype]
    read_tensor = reader(model, lambda held: read(plan, Path(request.checkpoint), held))
    if request.naming == "megatron":
        torch.save({}, folder / MEGATRON_COMMON)
    if request.format == "dcp":
        return write_distributed(tensors, read_tensor, dtype, folder)
    return write_state(tensors, read_tensor, dtype, folder / LITGPT_FILE)


def _files(wanted: Sequence[Parameter], request: ExportRequest) -> Iterator[list[Parameter]]:
    """Yield the parameters of one file after another: at most `max_file_bytes` each, unless a single one is larger."""
    held: list[Parameter] = []
    size = 0
    for parameter in wanted:
        added = parameter.numel * DTYPE_BYTES[request.dtype]
        if held and size + added > request.max_file_bytes:
            yield held
            held = []
            size = 0
        held.append(parameter)
        size += added
    yield held


def export_adapters(plan: Plan, request: ExportRequest) -> int:
    adapters = [half for parameter in _parameters(plan) for half in adapters_of(parameter, plan.spec.lora)]
    full = read(plan, Path(request.checkpoint), adapters)
    write_file(Path(request.output) / ADAPTERS, adapters, full, request.dtype)
    return 1


def _parameters(plan: Plan) -> list[Parameter]:
    assert isinstance(plan.spec.model, DecoderModel), "other families are refused by name"
    return parameters(plan.spec.model)


def read(plan: Plan, checkpoint: Path, wanted: Sequence[Parameter]) -> dict[str, Tensor]:
    """Read whole parameters, with adapters merged in: W + (alpha / R) B A."""
    halves = {parameter.name: adapters_of(parameter, plan.spec.lora) for parameter in wanted}
    shapes = {held.name: held.shape for parameter in wanted for held in (parameter, *halves[parameter.name])}
    full = read_weights(checkpoint, shapes)
    for name, adapters in halves.items():
        if adapters:
            a_RD, b_FR = (full.pop(half.name) for half in adapters)
            full[name].addmm_(b_FR, a_RD, alpha=plan.spec.lora.scale)
    return full


def write_file(path: Path, held: Sequence[Parameter], full: Mapping[str, Tensor], dtype: str) -> None:
    pieces = [(parameter.name, piece) for parameter in held for piece in parameter.pieces]
    with path.open("wb") as file:
        file.write(make_header({piece.tensor: (dtype, piece.tensor_shape) for _, piece in pieces}))
        for name, piece in pieces:
            tensor = cut(full[name], piece).to(DTYPES[dtype]).contiguous()
            file.write(tensor.view(torch.uint8).numpy().data)
