"""The weights that a run begins with, read tensor by tensor into the parts that each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.build import Machinery
from trainspec_cli.engine.checkpoint.manifest import read_manifest, verify_files
from trainspec_cli.engine.checkpoint.weights import load_weights
from trainspec_cli.engine.shares import Share
from trainspec_cli.huggingface.folder import open_weights
from trainspec_cli.huggingface.safetensors import Entry
from trainspec_cli.huggingface.tensors import Piece, parameters
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.plan import Plan

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_initial(plan: Plan, built: Machinery) -> None:
    """Fill the model from what `init.from` names; without it the values drawn from the seed stay.

    Called by every rank together. Raises RecipeError or MachineError where the checkpoint is not the model's.
    """
    init = plan.spec.init
    if init.hugging_face is not None:
        assert isinstance(plan.spec.model, DecoderModel), "other families are refused before launch"
        load_folder(init.hugging_face, plan.spec.model, built.shares)
    elif init.run is not None:
        run = RunDir(init.run)
        folder = run.checkpoint(run.checkpoint_steps()[-1])
        verify_files(folder, read_manifest(folder).files[dist.get_rank() :: dist.get_world_size()])
        load_weights(folder, built.held)


@torch.no_grad()
def load_folder(folder: Path, model: DecoderModel, shares: Sequence[Share]) -> None:
    """Of each tensor a rank reads what its parts cover: the files are mapped, and pages of others are never touched."""
    tensors = MappedTensors(open_weights(folder, model))
    by_name = {parameter.name: parameter.pieces for parameter in parameters(model)}
    for share in shares:
        if share.name in by_name:
            _fill(share, by_name[share.name], tensors)


def _fill(share: Share, pieces: Sequence[Piece], tensors: MappedTensors) -> None:
    for piece in pieces:
        met = piece.overlap(tuple(share.offsets), tuple(share.local.shape))
        if met is not None:
            inner, outer = met
            share.local[outer].copy_(tensors.box(piece)[inner])


class MappedTensors:
    """Tensors of safetensors files, as views of the mapped files."""

    def __init__(self, entries: Mapping[str, Entry]):
        self._entries = entries
        self._files: dict[Path, Tensor] = {}

    def box(self, piece: Piece) -> Tensor:
        """In the parameter's own order of dimensions."""
        tensor = self._read(self._entries[piece.tensor])
        return (tensor.transpose(-1, -2) if piece.transposed else tensor).view(piece.shape)

    def _read(self, entry: Entry) -> Tensor:
        if entry.file not in self._files:
            size = entry.file.stat().st_size
            self._files[entry.file] = torch.from_file(str(entry.file), shared=False, size=size, dtype=torch.uint8)
        content = self._files[entry.file][entry.start : entry.start + entry.bytes]
        dtype = DTYPES[entry.dtype]
        aligned = content.clone() if entry.start % dtype.itemsize else content
        return aligned.view(dtype).view(entry.shape)
