"""The model that other engines are asked to train, its first weights and its reference, in Hugging Face's terms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trainspec_cli.certify.cases import Case
from trainspec_cli.certify.engine.protocol import BATCHES, MODEL, TOKENS
from trainspec_cli.certify.families import FAMILIES, LOSSES, SEQ_LEN, plain_decoder
from trainspec_cli.certify.runs import Measured, Run
from trainspec_cli.huggingface.config import write_config
from trainspec_cli.huggingface.tensors import parameters
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.recipe.model import DecoderModel

FAMILY = "llama"
REFERENCE = Run(Case(FAMILY), inputs=True)
OWN_BF16 = Run(Case(FAMILY, compute="bf16"), losses=False)
EXACT = Run(Case(FAMILY, compute="fp64"), losses=False)
OWN_RUNS = (REFERENCE, OWN_BF16, EXACT)
"""The runs of trainspec's own engine, in one process, that others are held against."""

Arrays = Mapping[str, np.ndarray]


def ask_for_plain_model() -> DecoderModel:
    """Let the clauses be measured in this process on a plain Llama, which other engines know; return it."""
    FAMILIES.clear()
    LOSSES.clear()
    model = plain_decoder()
    FAMILIES[FAMILY] = model
    return model


def to_hugging_face(arrays: Arrays, model: DecoderModel) -> dict[str, np.ndarray]:
    """Return parameters of the engine as the tensors that Hugging Face has of them."""
    found = {}
    for parameter in parameters(model):
        for piece in parameter.pieces:
            box = tuple(slice(low, low + size) for low, size in zip(piece.start, piece.shape, strict=True))
            held = arrays[parameter.name][box].reshape(piece.shape)
            found[piece.tensor] = np.ascontiguousarray(np.swapaxes(held, -1, -2) if piece.transposed else held)
    return found


def write_inputs(reference: Measured, model: DecoderModel, folder: Path) -> None:
    """Write the model with its first weights, and the batches of all steps."""
    (folder / MODEL).mkdir(parents=True, exist_ok=True)
    write_json(folder / MODEL / "config.json", write_config(model, SEQ_LEN, "float32"))
    first = to_hugging_face(reference.first_weights, model)
    save_file(first, folder / MODEL / "model.safetensors", {"format": "pt"})
    save_file({TOKENS: reference.tokens}, folder / BATCHES)
