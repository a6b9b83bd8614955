"""Read the model, if the recipe leaves it open, and the tokenizer from the checkpoint in `init.from`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.node import check_tree
from trainspec_cli.core.reading.files import exists, how_to_copy
from trainspec_cli.data.huggingface.config import differences, read_model
from trainspec_cli.data.huggingface.folder import CONFIG, TOKENIZER, open_weights, read_config
from trainspec_cli.data.weights.folder import config_file, open_other, read_other_model
from trainspec_cli.recipe.compose.compose import Completion
from trainspec_cli.recipe.keys.model import AUTO_FAMILY, DecoderModel, ModelSpec, TextModel, TransformersModel
from trainspec_cli.recipe.keys.run import HUGGING_FACE, SAMPLE_SOURCES, InitSpec, RunSpec
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.records import build, choose_section, to_plain
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir, read_section
from trainspec_cli.session.recipe.complete import failed, section_of


def complete_from(begins_with: str, data: JsonObject, model: JsonObject, *, unchosen: bool) -> Completion:
    """Return the values that the recipe leaves to its checkpoint. `unchosen`: whether the recipe does not choose a
    model."""
    asked = dict(model)
    is_auto = model.get("family") == AUTO_FAMILY
    is_open = is_auto or unchosen
    if not is_open and (folder := InitSpec(begins_with).other) and not exists(config_file(folder)):
        return Completion(tokenizer_values(data, _if_there(folder / TOKENIZER)), begins_with)
    try:
        found, source, tokenizer = _read(InitSpec(begins_with))
    except TrainspecError as error:
        return failed(error.problems) if is_open else Completion({}, begins_with, problems=tuple(error.problems))
    if is_auto:
        del asked["family"]
    left_open = {key: value for key, value in found.items() if key not in asked} if is_open else {}
    found_model: JsonObject = {"model": left_open} if is_open else {}
    if not is_open and found.get("hf_type") and "hf_type" not in asked:
        # The type determines the names of the folder's tensors; several types can describe the same model.
        found_model = {"model": {"hf_type": found["hf_type"]}}
    # A problem for each key where the recipe's model differs from the checkpoint's.
    mine = _build(left_open | asked)
    theirs = _build(found)
    if mine is None or theirs is None:
        contradictions = []
    else:
        if isinstance(mine, TextModel) and isinstance(theirs, TextModel) and mine.family == theirs.family:
            differing = differences(mine, theirs)
        else:
            differing = {} if mine == theirs else {"family": (mine.family, theirs.family)}
        contradictions = [
            Problem(
                code="contradiction",
                message=f"`model.{key}` is {ours}, but {source} says {its}",
                path=f"model.{key}",
                hint=f"set model.{key}={its}, or model=auto for the checkpoint's model",
            )
            for key, (ours, its) in differing.items()
        ]
    return Completion(
        values=found_model | tokenizer_values(data, tokenizer),
        source=source,
        replaced=frozenset({"model"}) if unchosen else frozenset(),
        problems=tuple(contradictions),
    )


def _read(init: InitSpec) -> tuple[JsonObject, str, Path | None]:
    """Return the checkpoint's model, the file that defines it, and its tokenizer. Raises TrainspecError."""
    asked = init.from_ or ""
    if remote := how_to_copy(asked) or how_to_copy(asked.removeprefix(HUGGING_FACE)):
        message = f"`init.from` is {asked}, which is not on this machine"
        raise RecipeError(Problem("missing_file", message, "init.from", remote))
    if (folder := init.hugging_face) is not None:
        model = read_model(read_config(folder), str(folder / CONFIG))
        return model, str(folder / CONFIG), _if_there(folder / TOKENIZER)
    if (folder := init.other) is not None:
        return read_other_model(folder), str(config_file(folder)), _if_there(folder / TOKENIZER)
    assert init.run is not None
    run = RunDir(init.run)
    if not os.access(run.plan_json, os.R_OK):
        message = f"`init.from` is {asked}, which does not contain a trainspec run"
        hint = f"set init.from=hf:{asked} if it is a Hugging Face folder"
        raise RecipeError(Problem("missing_file", message, "init.from", hint))
    check_tree(run.root)
    kept = _if_there(run.huggingface / TOKENIZER)
    data_dir = read_data_dir(run)
    tokenizer = kept or (_tokenizer_of(data_dir) if data_dir and Path(data_dir).is_dir() else None)
    return read_section(run, "model"), str(run.plan_json), tokenizer


def _tokenizer_of(data_dir: str) -> Path | None:
    """Return the path of the tokenizer of prepared data."""
    from trainspec_cli.data.corpus.sources import Collection  # deferred: loads numpy, which plans do not need

    made = Collection.open(data_dir).tokenizer_folder
    return _if_there(made / TOKENIZER) if made else None


def check_initial(spec: RunSpec) -> Iterable[Problem]:
    """Return the problems of a checkpoint in `init.from` that does not contain the model's weights."""
    try:
        if (folder := spec.init.hugging_face) is not None:
            if isinstance(spec.model, TransformersModel):  # checked when it was described
                return []
            if not isinstance(spec.model, TextModel):
                raise RecipeError(
                    Problem("unsupported", "models from Hugging Face folders must be text models", "init.from")
                )
            open_weights(folder, spec.model)
        elif (folder := spec.init.other) is not None:
            if not isinstance(spec.model, DecoderModel):
                raise RecipeError(
                    Problem("unsupported", "weights from other projects can only be loaded into decoders", "init.from")
                )
            open_other(folder, spec.model)
        elif spec.init.run is not None:
            run = RunDir(spec.init.run)
            if not run.checkpoint_steps():
                raise RecipeError(Problem("missing_file", f"{run.root} has no complete checkpoint", "init.from"))
            lora = read_section(run, "lora")
            if lora.get("rank") and to_plain(LoraSpec()) | lora != to_plain(spec.lora):
                message = f"{run.root} has LoRA adapters of another size or base model, which would be lost"
                hint = f"merge them first: trainspec export {run.root} --output FOLDER, then init.from=hf:FOLDER"
                raise RecipeError(Problem("contradiction", message, "lora", hint))
    except TrainspecError as error:
        return error.problems
    return []


def _if_there(file: Path) -> Path | None:
    return file.absolute() if file.is_file() else None


def _build(section: JsonObject) -> ModelSpec | None:
    """Build the model; None if a value has the wrong type, which other checks report."""
    kind = choose_section(ModelSpec, section)
    assert kind is not None
    model: ModelSpec
    model, problems = build(kind, section)
    return None if problems else model


def tokenizer_values(data: JsonObject, found: Path | None) -> JsonObject:
    """Return the checkpoint's tokenizer for a recipe without one, because the weights were trained on its ids. Token
    folders already have a tokenizer, but they lack the chat template needed for validation on conversations."""
    reads = section_of(data, "data")
    named = section_of(reads, "tokenizer").get("path")
    validation = section_of(reads, "validation")
    is_ready = reads.get("source") == "tokens" and not any(
        section_of(validation, name).get("source") == "chat" for name in validation
    )
    if found is None or named or is_ready or reads.get("source") in SAMPLE_SOURCES:
        return {}
    return {"data": {"tokenizer": {"path": str(found)}}}
