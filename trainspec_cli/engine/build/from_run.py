"""Load a run's weights, or the model with its weights, into Python: on the CPU, in one process, from a checkpoint with
any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.engine.build.assemble import allocate, build_model, start_buffers
from trainspec_cli.engine.checkpoint.files import TensorPart
from trainspec_cli.engine.checkpoint.manifest import read_manifest, verify_files
from trainspec_cli.engine.checkpoint.memory import DTYPES
from trainspec_cli.engine.checkpoint.saver import PREFIX, fill_parts
from trainspec_cli.engine.shares import TENSORS
from trainspec_cli.run.folder.own_code import describe_changed_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan


def read_run_weights(run: RunDir, step: int) -> dict[str, Tensor]:
    """Return the model's tensors by name, as stored in the checkpoint. Raises MachineError if the checkpoint is
    damaged, and RecipeError if its matrices are 4-bit."""
    folder = run.checkpoint(step)
    manifest = read_manifest(folder)
    entries = {name: entry for name, entry in manifest.tensors.items() if name.startswith(PREFIX)}
    if any(name.endswith(TENSORS) for name in entries):
        message = f"{folder} holds 4-bit matrices (lora.base=nf4)"
        hint = "trainspec export RUN --output FOLDER writes them in full precision"
        raise RecipeError(Problem("unsupported", message, "lora.base", hint))
    verify_files(folder, manifest.files)
    tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
    fill_parts(folder, manifest, [TensorPart.whole(name, tensor) for name, tensor in tensors.items()])
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def read_run_model(run: RunDir, step: int) -> Any:
    """Return the engine's model, in fp32, with the weights of a checkpoint. Raises the same errors as
    `read_run_weights`, and RecipeError for adapters or for user-defined blocks whose file has changed."""
    spec = read_plan(run).spec
    if spec.lora.rank:
        message = f"{run.root} trained adapters, which load_model does not merge"
        hint = "trainspec export RUN --output FOLDER merges them; read_weights reads them as they are"
        raise RecipeError(Problem("unsupported", message, "lora.rank", hint))
    # Changed code with the same parameter shapes would load without an error, but compute something else.
    if changed := list(describe_changed_code(run)):
        hint = "restore the run's copy of the file, or call read_weights, which runs no user code"
        raise RecipeError([Problem("changed_code", line, hint=hint) for line in changed])
    weights = read_run_weights(run, step)
    cpu = torch.device("cpu")
    with torch.device("meta"):
        model = build_model(spec.model, spec.data.seq_len)
    allocate(model, cpu, offload=False)
    start_buffers(model, cpu, spec.train.seed, None)
    model.load_state_dict(weights)
    return model.eval()
