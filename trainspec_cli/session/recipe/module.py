"""Describe a model of transformers (`model.backend=transformers`) by building it, without memory, in a separate
process."""

from __future__ import annotations

import json
from functools import lru_cache

from trainspec_cli.core.errors import Problem, TrainspecError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.huggingface.folder import CONFIG, TOKENIZER, read_config
from trainspec_cli.recipe.compose.compose import Completion
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.model import AUTO_FAMILY
from trainspec_cli.recipe.keys.run import InitSpec
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.records import build, to_plain
from trainspec_cli.recipe.results.tools import ModuleCount, ModuleRequest
from trainspec_cli.session.recipe.complete import failed, section_of
from trainspec_cli.session.recipe.initial_checkpoint import tokenizer_values

FOLDER = "model.folder"
USUAL_SEQ_LEN = 4096
"""The sequence length that is traced if the recipe leaves it open."""


def complete_module(data: JsonObject, begins_with: str | None, *, to_run: bool) -> Completion:
    """Return the description of the model in the folder of `init.from`, or, for random weights, of `model.folder`."""
    asked = {key: value for key, value in section_of(data, "model").items() if value != AUTO_FAMILY}
    if "blocks" in asked:  # the recipe of a run, which has been described
        return Completion({}, "")
    named = asked.get("folder")
    folder = InitSpec(begins_with).hugging_face if begins_with else None
    if folder is None and isinstance(named, str):
        folder = expand(named).absolute()
    if folder is None:
        message = "`model.backend` is transformers, but no folder with the model's config.json is specified"
        hint = f"set init.from=hf:FOLDER, or {FOLDER}=FOLDER for random weights"
        return failed([Problem("missing_value", message, "init.from", hint)])
    seq_len = section_of(data, "data").get("seq_len")
    precision = section_of(data, "precision").get("compute", AUTO)
    lora, problems = build(LoraSpec, section_of(data, "lora"))
    on_cpu = section_of(data, "cluster").get("device") == "cpu"
    try:
        config = read_config(folder)
        counted = _count(
            ModuleRequest(
                config=json.dumps(config, separators=(",", ":"), allow_nan=False),
                folder=str(folder),
                seq_len=seq_len if isinstance(seq_len, int) and seq_len > 0 else USUAL_SEQ_LEN,
                compute="fp32" if precision in ("fp32", "tf32") or (precision == AUTO and on_cpu) else "bf16",
                lora=LoraSpec() if problems else lora,
                has_weights=to_run and begins_with is not None,
                trust_remote_code=asked.get("trust_remote_code") is True,
            )
        )
    except TrainspecError as error:
        return failed(error.problems)
    if counted.model is None:
        return failed(counted.problems)
    described: JsonObject = {"model": to_plain(counted.model)}
    tokenizer = folder / TOKENIZER
    described |= tokenizer_values(data, tokenizer.absolute() if tokenizer.is_file() else None)
    return Completion(described, str(folder / CONFIG), replaced=frozenset({"model"}))


@lru_cache(maxsize=64)
def _count(request: ModuleRequest) -> ModuleCount:
    from trainspec_cli.run.tools import COUNT_MODULE, run_tool  # deferred: plans do not start processes

    return run_tool(COUNT_MODULE, request)
