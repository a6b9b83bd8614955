"""A folder of weights from another project: the project, the model, and the location of each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import exists
from trainspec_cli.data.huggingface.config import read_model
from trainspec_cli.data.huggingface.folder import CONFIG, check_count, compare_tensors, list_names, read_config
from trainspec_cli.data.huggingface.safetensors import DTYPE_BYTES, tensor_shapes
from trainspec_cli.data.weights import litgpt_config
from trainspec_cli.data.weights.naming import Naming, OtherTensor, RowRange, other_spellings, other_tensors
from trainspec_cli.data.weights.stored import Part, PartedTensor, Shape, StridedTensor
from trainspec_cli.data.weights.torch_file import Checkpoint, read_state
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DCP_FILE, LITGPT_FILE

_FIRST: Mapping[Naming, str] = {
    "hf": "model.embed_tokens.weight",
    "torchtitan": "tok_embeddings.weight",
    "megatron": "embedding.word_embeddings.weight",
}
"""The tensor that identifies the naming scheme of a distributed checkpoint."""
_PREFIXES = ("", "model.", "module.", "model.module.")
"""Prefixes of the names if the model was saved as part of a larger object."""
_TRAINING = re.compile(
    r"^(optimizer|optim|lr_scheduler|opt_param_scheduler|dataloader|train_state|rng_state|chained_\d+)\b"
    r"|_extra_state\b|rotary_emb\.inv_freq$|^freqs_cis$"
)
"""Tensors that are not weights."""


def config_file(folder: Path) -> Path:
    """Return the path of the file that describes the model; it need not exist."""
    return folder / (CONFIG if exists(folder / DCP_FILE) else litgpt_config.CONFIG)


def read_other_model(folder: Path) -> JsonObject:
    """Return the `model` section that the folder describes. Raises RecipeError."""
    _refuse_nanogpt(folder)
    file = config_file(folder)
    if not exists(file):
        message = f"{folder} has weights without {file.name}, so their model is unknown"
        raise RecipeError(Problem("missing_file", message, "init.from", "name the model: model=llama_1b, or another"))
    if file.name == CONFIG:
        return read_model(read_config(folder), str(file))
    return litgpt_config.read_model(file)


def _refuse_nanogpt(folder: Path) -> None:
    if not exists(folder / DCP_FILE) and not exists(folder / LITGPT_FILE):
        message = (
            f"{folder} has a checkpoint of nanoGPT, whose layers have LayerNorm and learned position embeddings; "
            "the engine's decoder has RMSNorm and rotary embeddings"
        )
        raise RecipeError(Problem("unsupported", message, "init.from", "name other weights"))


def open_other(folder: Path, model: DecoderModel) -> dict[str, PartedTensor]:
    """Return the tensors of `model`, under Hugging Face's names.

    Raises RecipeError, naming any tensors that are missing, unexpected or of the wrong shape, and MachineError if a
    file is damaged."""
    _refuse_nanogpt(folder)
    check_count(model)
    if exists(folder / DCP_FILE):
        checkpoint = Checkpoint(folder)
        naming, prefix = _recognise(checkpoint.shapes, folder)
        wanted = other_tensors(model, naming)
        names = _match(wanted, naming, prefix, checkpoint.shapes, folder)
        needed = {one.name for one in wanted if not one.is_copy}
        held = {name: checkpoint.open(theirs) for name, theirs in names.items() if name in needed}
        return select(wanted, held, tensor_shapes(model))
    state = read_state(folder / LITGPT_FILE, ("model",))
    wanted = other_tensors(model, "litgpt")
    names = _match(wanted, "litgpt", "", {name: held.shape for name, held in state.items()}, folder)
    return select(wanted, {name: state[theirs] for name, theirs in names.items()}, tensor_shapes(model))


def _recognise(shapes: Mapping[str, Shape], folder: Path) -> tuple[Naming, str]:
    """Determine the naming scheme of the tensors, and the prefix of their names."""
    for naming, first in _FIRST.items():
        for prefix in _PREFIXES:
            if prefix + first in shapes:
                # Depending on its version, Megatron saves layers individually or stacked into one tensor.
                numbered = naming == "megatron" and any(re.search(r"layers\.\d", name) for name in shapes)
                return ("megatron_layers" if numbered else naming), prefix
    known = ", ".join(_FIRST.values())
    message = f"{folder} contains none of {known}, but {list_names(list(shapes)) or 'no tensor'}"
    hint = "supported are the names of Hugging Face, torchtitan and Megatron"
    raise RecipeError(Problem("bad_checkpoint", message, "init.from", hint))


def _match(
    wanted: list[OtherTensor], naming: Naming, prefix: str, shapes: Mapping[str, Shape], folder: Path
) -> dict[str, str]:
    """Map each tensor's name to its name in the folder, which must contain all tensors except for copies. Raises
    RecipeError."""
    names = {}
    for one in wanted:
        spellings = [prefix + spelled for spelled in other_spellings(one.name, naming)]
        names[one.name] = next((spelled for spelled in spellings if spelled in shapes), spellings[0])
    # Copies (such as a tied head) are read only if they exist, because some projects omit them.
    asked = {names[one.name]: one.shape for one in wanted if not one.is_copy or names[one.name] in shapes}
    found = {name: shape for name, shape in shapes.items() if not _TRAINING.search(name.removeprefix(prefix))}
    if problems := compare_tensors(asked, found, (), folder):
        raise RecipeError(problems)
    return {name: theirs for name, theirs in names.items() if theirs in shapes}


# The parts of another project's tensors that make up Hugging Face's tensors, regardless of how that project's files
# divide them into rectangular pieces.


def select(
    wanted: Iterable[OtherTensor], held: Mapping[str, PartedTensor], shapes: Mapping[str, Shape]
) -> dict[str, PartedTensor]:
    """Return the Hugging Face tensors with these `shapes`. `held` contains every tensor in `wanted`, by name."""
    parts: dict[str, list[Part]] = {tensor: [] for tensor in shapes}
    for other in wanted:
        for rows in () if other.is_copy else other.rows:
            parts[rows.tensor] += _cut(held[other.name].parts, rows)
    return {tensor: PartedTensor(shape, tuple(parts[tensor])) for tensor, shape in shapes.items()}


def _cut(parts: Iterable[Part], rows: RowRange) -> Iterator[Part]:
    """Yield the parts of another project's tensor that contain `rows`."""
    for part in parts:
        held = part.held
        start = part.start
        element = DTYPE_BYTES[held.dtype]
        if rows.layer is not None:  # this tensor stacks layers, and one of them is read
            at = rows.layer - start[0]
            if not 0 <= at < held.shape[0]:
                continue
            begins = held.start + at * held.strides[0] * element
            held = StridedTensor(held.file, held.dtype, held.shape[1:], begins, held.strides[1:])
            start = start[1:]
        low = max(0, -(-(start[0] - rows.at) // rows.step))
        high = min(rows.count, -(-(start[0] + held.shape[0] - rows.at) // rows.step))
        if low < high:
            # Take every `step`-th row from `low` to `high`.
            skipped = rows.at + low * rows.step - start[0]
            strides = (held.strides[0] * rows.step, *held.strides[1:])
            begins = held.start + skipped * held.strides[0] * element
            shape = (high - low, *held.shape[1:])
            yield Part((rows.start + low, *start[1:]), StridedTensor(held.file, held.dtype, shape, begins, strides))
