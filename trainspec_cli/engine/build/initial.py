"""Read a run's initial weights, tensor by tensor, into each rank's parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.data.huggingface.folder import list_names, open_weights
from trainspec_cli.data.huggingface.module_tensors import module_parameters, open_module
from trainspec_cli.data.huggingface.safetensors import PackedTensor, Piece, StoredTensor, parameters
from trainspec_cli.data.weights.folder import open_other
from trainspec_cli.data.weights.stored import PartedTensor
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.files import kept_buffers
from trainspec_cli.engine.checkpoint.manifest import read_manifest, verify_files
from trainspec_cli.engine.checkpoint.memory import DTYPES
from trainspec_cli.engine.checkpoint.saver import load_weights
from trainspec_cli.engine.comm.json_collectives import errors_together
from trainspec_cli.engine.digest import NOT_FINITE, count_not_finite, is_finite
from trainspec_cli.engine.models.lora import start_magnitudes
from trainspec_cli.engine.shares import Share, split_quantised
from trainspec_cli.recipe.keys.model import DecoderModel, TextModel, TransformersModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.paths import RunDir


def load_initial(plan: Plan, state: TrainState) -> None:
    """Fill the model with the weights of `init.from`. If that is not set, keep the values generated from the seed.
    Called collectively by all ranks.

    Raises RecipeError or MachineError on all ranks if the checkpoint does not match the model or a weight is not
    finite.
    """
    init = plan.spec.init
    model = plan.spec.model
    folder = init.hugging_face or init.other
    new = False
    with errors_together():
        if folder is not None:
            if isinstance(model, TransformersModel):
                entries: Mapping[str, StoredTensor | PackedTensor | PartedTensor] = open_module(folder, model)
            elif init.hugging_face is not None:
                assert isinstance(model, TextModel), "other families are rejected before launch"
                entries = open_weights(folder, model)
            else:
                assert isinstance(model, DecoderModel), "other families are rejected before launch"
                entries = open_other(folder, model)
            load_tensors(folder, entries, model, [*state.shares, *buffer_shares(state.parts)])
            new = True
        elif init.run is not None:
            run = RunDir(init.run)
            folder = run.checkpoint(run.checkpoint_steps()[-1])
            verify_files(folder, read_manifest(folder).files[dist.get_rank() :: dist.get_world_size()])
            new = any(name.endswith("lora_m") for name in load_weights(folder, state.held))
        elif unset := [share.name for share in state.shares if not is_finite(share.local)]:
            message = f"the model's code does not define initial values for {list_names(unset)}"
            raise RecipeError(Problem("unsupported", message, "init.from", "set init.from to a folder with weights"))
    if new:  # the lengths of the rows of the loaded weights
        start_magnitudes(state.parts)


def buffer_shares(parts: Sequence[nn.Module]) -> list[Share]:
    """Return the buffers that checkpoints hold (the biases of routers), which no layout splits."""
    found = dict(named for part in parts for named in kept_buffers(part))
    return [Share(name, nn.Parameter(buffer, requires_grad=False)) for name, buffer in found.items()]


@torch.no_grad()
def load_tensors(
    folder: Path,
    entries: Mapping[str, StoredTensor | PackedTensor | PartedTensor],
    model: TextModel | TransformersModel,
    shares: Sequence[Share],
) -> None:
    """Load the weights in `folder`. Files are memory-mapped, so a rank reads only the pages that contain its parts.
    Raises a MachineError that lists the tensors with non-finite values."""
    tensors = MappedTensors(entries)
    of_model = module_parameters(entries) if isinstance(model, TransformersModel) else parameters(model)
    by_name = {parameter.name: parameter.pieces for parameter in of_model}
    plain, quantised = split_quantised(shares)
    faults = [fault for share in plain for fault in tensors.fill(share, by_name.get(share.name, ()))]
    for matrix in quantised:  # read the full matrix, and keep this rank's part in 4 bits
        whole = Share(matrix.name, nn.Parameter(torch.empty(matrix.full_shape), requires_grad=False))
        faults += tensors.fill(whole, by_name[matrix.name])
        matrix.fill(whole.local)
    if faults:
        message = f"{folder} holds {NOT_FINITE}: {list_names(list(dict.fromkeys(faults)))}"
        hint = "download it again, or set init.from to another folder"
        raise MachineError(Problem("bad_checkpoint", message, "init.from", hint))


class MappedTensors:
    """Tensors read from files. A tensor in a safetensors file is a view of the memory-mapped file; any other tensor is
    assembled from its parts."""

    def __init__(self, entries: Mapping[str, StoredTensor | PackedTensor | PartedTensor]):
        self._entries = entries
        self._files: dict[Path, Tensor] = {}
        self._unpacked: tuple[str, slice, Tensor] | None = None
        """The tensor that was unpacked last: its name, its experts, their matrices."""

    def fill(self, share: Share, pieces: Sequence[Piece]) -> Iterator[str]:
        """Read a share's data. Yield each tensor with non-finite weights, and the number of such values in the full
        tensor."""
        for piece in pieces:
            if piece.is_copy:
                continue
            met = piece.overlap(tuple(share.offsets), tuple(share.local.shape))
            if met is None:
                continue
            inner, outer = met
            filled = share.local[outer].copy_(self._box(piece, inner))
            if not is_finite(filled):
                count = count_not_finite(
                    self._box(piece, tuple(slice(0, size) for size in piece.shape)).to(filled.dtype)
                )
                file = self._entries[piece.tensor].file.name
                yield f"{count:,} of {math.prod(piece.shape):,} in {piece.tensor} ({file})"

    def _box(self, piece: Piece, inner: tuple[slice, ...]) -> Tensor:
        """Return a part of the piece's tensor, with its dims in the parameter's order."""
        entry = self._entries[piece.tensor]
        if not isinstance(entry, PackedTensor):
            return piece.part_of(self.read(piece.tensor))[inner]
        # Unpack only this rank's experts, and once for both halves.
        experts, *rest = inner
        if self._unpacked is None or self._unpacked[:2] != (piece.tensor, experts):
            packed = (self._whole(held, torch.uint8)[experts] for held in (entry.numbers, entry.exponents))
            self._unpacked = piece.tensor, experts, unpack(*packed)
        part = replace(piece, shape=(experts.stop - experts.start, *piece.shape[1:]))
        return part.part_of(self._unpacked[2])[(slice(None), *rest)]

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        entry = self._entries[name]
        if isinstance(entry, PartedTensor):
            # Copy the parts into one tensor. Elements that no part covers become NaN, which is reported.
            dtypes = [DTYPES[part.held.dtype] for part in entry.parts]
            tensor = torch.full(entry.shape, torch.nan, dtype=reduce(torch.promote_types, dtypes))
            for part in entry.parts:
                held = part.held
                numbers = self._numbers(held.file, held.start, held.span_bytes, DTYPES[held.dtype])
                box = tuple(slice(at, at + size) for at, size in zip(part.start, held.shape, strict=True))
                tensor[box] = numbers.as_strided(held.shape, held.strides)
            return tensor
        if isinstance(entry, PackedTensor):
            return unpack(*(self._whole(held, torch.uint8) for held in (entry.numbers, entry.exponents)))
        return self._whole(entry, DTYPES[entry.dtype])

    def _whole(self, entry: StoredTensor, dtype: torch.dtype) -> Tensor:
        return self._numbers(entry.file, entry.start, entry.bytes, dtype).view(entry.shape)

    def _numbers(self, file: Path, start: int, size: int, dtype: torch.dtype) -> Tensor:
        if file not in self._files:
            whole = file.stat().st_size
            self._files[file] = torch.from_file(str(file), shared=False, size=whole, dtype=torch.uint8)
        content = self._files[file][start : start + size]
        # Multi-byte numbers must be aligned in memory, but in a file they may not be.
        return (content.clone() if start % dtype.itemsize else content).view(dtype)


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers with 2 bits of exponent and 1 bit of mantissa, without their sign."""


def unpack(numbers_EFB16: Tensor, exponents_EFB: Tensor) -> Tensor:
    """Return the matrices (E, D, F) of a tensor in MXFP4, in bf16, which represents them exactly."""
    values = torch.tensor([sign * value for sign in (1, -1) for value in FP4_VALUES], dtype=torch.bfloat16)
    matrices_EFD = []
    for numbers, exponents in zip(numbers_EFB16, exponents_EFB, strict=True):  # indices take 8 times as much memory
        pairs = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
        matrices_EFD.append(torch.ldexp(values[pairs.int()], exponents.int()[..., None] - 127).flatten(-2))
    return torch.stack(matrices_EFD).swapaxes(-1, -2)
