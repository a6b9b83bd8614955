"""The weights that a run begins with, read tensor by tensor into the parts that each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.data.huggingface.folder import list_names, open_weights
from trainspec_cli.data.huggingface.safetensors import Piece, StoredTensor, parameters
from trainspec_cli.data.weights.folder import open_other
from trainspec_cli.data.weights.stored import PartedTensor
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.manifest import read_manifest, verify_files
from trainspec_cli.engine.checkpoint.memory import DTYPES
from trainspec_cli.engine.checkpoint.saver import load_weights
from trainspec_cli.engine.comm.json_collectives import errors_together
from trainspec_cli.engine.digest import NOT_FINITE, count_not_finite, is_finite
from trainspec_cli.engine.shares import QuantisedMatrix, Share, split_quantised
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.paths import RunDir


def load_initial(plan: Plan, state: TrainState) -> None:
    """Fill the model from what `init.from` names; without it the values drawn from the seed stay.

    Called by every rank together. Raises RecipeError or MachineError, on all of them, where the checkpoint is not the
    model's or a weight is not finite.
    """
    init = plan.spec.init
    with errors_together():
        if init.hugging_face is not None:
            assert isinstance(plan.spec.model, DecoderModel), "other families are refused before launch"
            load_folder(init.hugging_face, plan.spec.model, state.shares)
        elif init.other is not None:
            assert isinstance(plan.spec.model, DecoderModel), "other families are refused before launch"
            load_tensors(init.other, open_other(init.other, plan.spec.model), plan.spec.model, state.shares)
        elif init.run is not None:
            run = RunDir(init.run)
            folder = run.checkpoint(run.checkpoint_steps()[-1])
            verify_files(folder, read_manifest(folder).files[dist.get_rank() :: dist.get_world_size()])
            load_weights(folder, state.held)


def load_folder(folder: Path, model: DecoderModel, shares: Sequence[Share]) -> None:
    """Load the weights in a Hugging Face folder. Raises as `load_tensors` does."""
    load_tensors(folder, open_weights(folder, model), model, shares)


@torch.no_grad()
def load_tensors(
    folder: Path, entries: Mapping[str, StoredTensor | PartedTensor], model: DecoderModel, shares: Sequence[Share]
) -> None:
    """Load the weights in `folder`. A rank reads what its parts cover: files are mapped, other pages stay unread.

    Raises MachineError that names the tensors in which something is not finite.
    """
    tensors = MappedTensors(entries)
    by_name = {parameter.name: parameter.pieces for parameter in parameters(model)}
    plain, quantised = split_quantised(shares)
    faults = [fault for share in plain for fault in _fill(share, by_name.get(share.name, ()), tensors)]
    faults += [fault for matrix in quantised for fault in _quantise(matrix, by_name[matrix.name], tensors)]
    if faults:
        message = f"{folder} holds {NOT_FINITE}: {list_names(list(dict.fromkeys(faults)))}"
        hint = "download it again, or name another folder in init.from"
        raise MachineError(Problem("bad_checkpoint", message, "init.from", hint))


def _fill(share: Share, pieces: Sequence[Piece], tensors: MappedTensors) -> Iterator[str]:
    """-> the tensors of which something that was read is not finite as a weight, each with the number of such values
    in the whole of it."""
    for piece in pieces:
        met = piece.overlap(tuple(share.offsets), tuple(share.local.shape))
        if met is None:
            continue
        inner, outer = met
        filled = share.local[outer].copy_(tensors.box(piece)[inner])
        if not is_finite(filled):
            count = count_not_finite(tensors.box(piece).to(filled.dtype))
            yield f"{count:,} of {math.prod(piece.shape):,} in {piece.tensor} ({tensors.file(piece).name})"


def _quantise(matrix: QuantisedMatrix, pieces: Sequence[Piece], tensors: MappedTensors) -> list[str]:
    """Read a whole matrix and keep this rank's part in 4 bits; -> as `_fill`."""
    whole = Share(matrix.name, nn.Parameter(torch.empty(matrix.full_shape), requires_grad=False))
    faults = list(_fill(whole, pieces, tensors))
    matrix.fill(whole.local)
    return faults


class MappedTensors:
    """Tensors of files: a safetensors file's as views of the mapped file, others put together of their parts."""

    def __init__(self, entries: Mapping[str, StoredTensor | PartedTensor]):
        self._entries = entries
        self._files: dict[Path, Tensor] = {}

    def box(self, piece: Piece) -> Tensor:
        """Return the piece's tensor in the parameter's own order of dims."""
        entry = self._entries[piece.tensor]
        tensor = self._assemble(entry) if isinstance(entry, PartedTensor) else self._read(entry)
        return (tensor.transpose(-1, -2) if piece.transposed else tensor).view(piece.shape)

    def file(self, piece: Piece) -> Path:
        return self._entries[piece.tensor].file

    def _assemble(self, entry: PartedTensor) -> Tensor:
        """Copy the parts of a tensor together. What no part holds is not a number, and is reported as such."""
        dtypes = [DTYPES[part.held.dtype] for part in entry.parts]
        whole = torch.full(entry.shape, torch.nan, dtype=reduce(torch.promote_types, dtypes))
        for part in entry.parts:
            held = part.held
            numbers = self._numbers(held.file, held.start, held.span_bytes, DTYPES[held.dtype])
            box = tuple(slice(at, at + size) for at, size in zip(part.start, held.shape, strict=True))
            whole[box] = numbers.as_strided(held.shape, held.strides)
        return whole

    def _read(self, entry: StoredTensor) -> Tensor:
        return self._numbers(entry.file, entry.start, entry.bytes, DTYPES[entry.dtype]).view(entry.shape)

    def _numbers(self, file: Path, start: int, size: int, dtype: torch.dtype) -> Tensor:
        if file not in self._files:
            whole = file.stat().st_size
            self._files[file] = torch.from_file(str(file), shared=False, size=whole, dtype=torch.uint8)
        content = self._files[file][start : start + size]
        return (content.clone() if start % dtype.itemsize else content).view(dtype)
