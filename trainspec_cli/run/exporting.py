"""Export a run's weights as a Hugging Face folder: the engine writes the tensors, and this module writes the other
files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.data.corpus.bpe import decode, load
from trainspec_cli.data.corpus.chat import keep_template
from trainspec_cli.data.corpus.shards import publishing, read_manifest
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.data.huggingface.chat_template import CHATML_TOKENS
from trainspec_cli.data.huggingface.config import write_config
from trainspec_cli.data.huggingface.folder import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION,
    SMALL_FILES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_config,
)
from trainspec_cli.data.huggingface.module_tensors import module_adapter_config
from trainspec_cli.data.huggingface.safetensors import ADAPTER_CONFIG, adapter_config
from trainspec_cli.data.weights import litgpt_config
from trainspec_cli.data.weights.naming import other_tensors
from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec, TextModel, TransformersModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import ExportRequest
from trainspec_cli.run.folder.accounting import best_checkpoint
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir, read_plan
from trainspec_cli.run.tools import EXPORT, run_tool

DTYPES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}
"""The names of number formats in safetensors files and in config.json."""
BASE = "base"
"""Subfolder of the adapters' folder for the base model's weights, if no other folder contains them."""
CARD = "README.md"
"""The model card for adapters whose base model was quantised."""
OtherFormat = Literal["dcp", "megatron", "litgpt"]
DcpNaming = Literal["hf", "torchtitan"]
OtherNaming = Literal["hf", "torchtitan", "megatron", "litgpt"]
_TENSOR_FORMATS: Mapping[str, Literal["safetensors", "dcp", "litgpt"]] = {
    "hf": "safetensors",
    "dcp": "dcp",
    "megatron": "dcp",
    "litgpt": "litgpt",
}
MEGATRON_METADATA = "metadata.json"
_MEGATRON_BACKENDS: JsonObject = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Files that Megatron's loader requires in a checkpoint folder."""
KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Keys copied from the config.json of the run's initial weights."""


@dataclass(frozen=True)
class Export:
    """The checkpoint of a run to export, and the export format."""

    run: RunDir
    step: int
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_file_bytes: int = 5 * 10**9


def find_checkpoint(run: RunDir, step: int | None, *, best: bool = False) -> int:
    """Return `step`, or the newest step if it is None. With `best`, return the step with the lowest held-out loss.
    Raises RecipeError if the run has no such complete checkpoint."""
    if best and step is not None:
        raise RecipeError(Problem("usage", "--best and --step each select a checkpoint", "--best", "omit one of them"))
    steps = run.checkpoint_steps()
    if not steps:
        raise RecipeError(Problem("no_checkpoint", f"{run.root} has no complete checkpoint", hint="train it first"))
    if best and (step := best_checkpoint(run)) is None:
        message = "no checkpoint was evaluated on held-out data"
        hint = "set checkpoint.keep_best=true in a launch"
        raise RecipeError(Problem("no_checkpoint", message, "--best", hint))
    if step is not None and step not in steps:
        message = f"no checkpoint of step {step} exists"
        hint = ", ".join(map(str, steps))
        raise RecipeError(Problem("no_checkpoint", message, "--step", hint))
    return steps[-1] if step is None else step


def write_folder(
    wanted: Export, output: Path, format_: Literal["hf"] | OtherFormat = "hf", naming: DcpNaming = "hf"
) -> str:
    """Write a run's weights to the folder `output`, which must be empty or not exist yet, in the format of transformers
    or another project; return a description of what was written. Raises RecipeError if that project does not support
    the model, and MachineError."""
    plan = read_plan(wanted.run)
    model = plan.spec.model
    config = _config(plan, wanted)
    names: OtherNaming = naming if format_ == "dcp" else format_
    described = None
    if format_ != "hf":
        if not isinstance(model, TextModel):
            message = f"models of family {model.family} can only be exported for transformers"
            raise RecipeError(Problem("unsupported", message, "--format", "pass --format hf"))
        other_tensors(model, names)
        if format_ == "litgpt" and isinstance(model, DecoderModel):
            described = litgpt_config.write_config(model, plan.spec.data.seq_len)
    with publishing(output.expanduser().resolve()) as temporary:
        _write_beside(plan, wanted.run, config, temporary)
        _copy_code(model, temporary)
        if described is not None:
            (temporary / litgpt_config.CONFIG).write_text(described, encoding="utf-8")
        _write_tensors(wanted, temporary, "merged", _TENSOR_FORMATS[format_], names)
        if format_ == "megatron":
            write_json(temporary / MEGATRON_METADATA, _MEGATRON_BACKENDS)
    return str(config["model_type"]) if format_ == "hf" else f"{config['model_type']} with the names of {names}"


def _config(plan: Plan, wanted: Export) -> JsonObject:
    dtype = DTYPES[wanted.dtype][1]
    if isinstance(plan.spec.model, TransformersModel):
        kept = json.loads(plan.spec.model.config)
        # Without permission to run the folder's code, transformers' own module was trained.
        left_out = ("torch_dtype",) if plan.spec.model.trust_remote_code else ("torch_dtype", "auto_map")
        return {key: value for key, value in kept.items() if key not in left_out} | {"dtype": dtype}
    config = write_config(plan.spec.model, plan.spec.data.seq_len, dtype)  # type: ignore[arg-type]
    original = wanted.run.huggingface
    if (original / CONFIG).is_file():
        began = read_config(original)
        config |= {key: began[key] for key in KEPT_KEYS if key in began}
    return config


def _write_beside(plan: Plan, run: RunDir, config: JsonObject, folder: Path) -> None:
    """Write config.json, tokenizer, chat template and generation config: copies of those that the run started from, or
    new ones derived from the tokenizer of its data."""
    for name in SMALL_FILES:
        if (run.huggingface / name).is_file():
            shutil.copyfile(run.huggingface / name, folder / name)
    keep_template(plan.spec.data, folder)
    data_dir = read_data_dir(run)
    kept = (folder / TOKENIZER).is_file()
    token_folder = Collection.open(data_dir).tokenizer_folder if data_dir is not None and not kept else None
    if token_folder is not None:
        # Generation stops at the end-of-document token and, with ChatML, at the end-of-message token.
        document_end = read_manifest(token_folder).end_of_document_id
        shutil.copyfile(token_folder / TOKENIZER, folder / TOKENIZER)
        template = folder / CHAT_TEMPLATE
        message_end = None
        if template.is_file() and CHATML_TOKENS[1] in template.read_text(encoding="utf-8"):
            message_end = load(token_folder / TOKENIZER).token_to_id(CHATML_TOKENS[1])
        end = document_end if message_end is None else message_end
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": decode(token_folder, [end]),
            "model_max_length": plan.spec.data.seq_len,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / TOKENIZER_CONFIG, settings)
        config["eos_token_id"] = document_end if message_end is None else [message_end, document_end]
    if not (folder / GENERATION).is_file():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        write_json(folder / GENERATION, ids)
    write_json(folder / CONFIG, config)


def _copy_code(model: ModelSpec, folder: Path) -> None:
    """Copy the Python files that compute the model, if the run was permitted to run them."""
    if runs_code(model):
        for file in sorted(Path(model.folder).glob("*.py")):
            shutil.copyfile(file, folder / file.name)


def runs_code(model: ModelSpec) -> TypeGuard[TransformersModel]:
    """Return whether Python files of the model's folder compute it."""
    return isinstance(model, TransformersModel) and model.trust_remote_code and "auto_map" in json.loads(model.config)


def write_adapters(wanted: Export, output: Path) -> str:
    """Write a run's LoRA adapters in PEFT's format, and the tokenizer, to the new folder `output`.

    The base model is the folder whose weights the run started from. If the run did not start from a folder, its frozen
    weights are also written, to `output`/base. Raises RecipeError if the run did not train adapters."""
    plan = read_plan(wanted.run)
    if not plan.spec.lora.rank:
        message = f"{wanted.run.root} trained full weights, not adapters"
        raise RecipeError(Problem("unsupported", message, "--format", "pass --format hf"))
    output = output.expanduser().resolve()
    config = _config(plan, wanted)
    base = plan.spec.init.hugging_face
    with publishing(output) as temporary:
        _write_beside(plan, wanted.run, config, temporary)
        if base is None:
            (temporary / BASE).mkdir()
            _write_beside(plan, wanted.run, config, temporary / BASE)
            _copy_code(plan.spec.model, temporary / BASE)
            _write_tensors(wanted, temporary / BASE, "base")
        for name in (CONFIG, GENERATION):  # they belong to the base model
            (temporary / name).unlink()
        named = plan.spec.init.hub_name
        by_name = named.name if named and named.revision == "main" else None
        above = by_name or str((base or output / BASE).absolute())
        model = plan.spec.model
        if isinstance(model, TransformersModel):
            write_json(temporary / ADAPTER_CONFIG, module_adapter_config(model, plan.spec.lora, above))
        else:
            assert isinstance(model, DecoderModel), "other families have no adapters"
            write_json(temporary / ADAPTER_CONFIG, adapter_config(model, plan.spec.lora, above))
        if plan.spec.lora.is_quantised:
            # The model card states how the base model was quantised.
            lines = ["---", "library_name: peft", f"base_model: {json.dumps(above, allow_nan=False)}", "---", ""]
            lines += [
                "LoRA adapters that were trained on a base in 4-bit NormalFloat (nf4, blocks of 64, double",
                "quantisation; QLoRA, arXiv:2305.14314). The matrices of the blocks were quantised; embedding, head",
                "and norms were not.",
            ]
            if base is None:
                lines += ["The base weights here are those used in training, dequantised."]
            else:
                compute = DTYPES[plan.compute][1] if plan.compute in DTYPES else "float32"
                lines += ["The base model above is in full precision. To quantise it as in training:", "", "```python"]
                lines += [
                    "BitsAndBytesConfig(",
                    '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,',
                ]
                lines += [f"    bnb_4bit_compute_dtype=torch.{compute},", ")", "```"]
            (temporary / CARD).write_text("\n".join([*lines, ""]), encoding="utf-8")
        _write_tensors(wanted, temporary, "adapters")
    return "LoRA adapters"


def how_to_load(output: Path, format_: str = "hf") -> list[str]:
    """Return lines that show how to load an exported folder."""
    trust = ", trust_remote_code=True" if any(output.rglob("*.py")) else ""
    loaded = f"from_pretrained({str(output)!r}{trust})"
    lines = [f"load it with transformers: AutoModelForCausalLM.{loaded}"]
    if (output / ADAPTER_CONFIG).is_file():
        lines = [f"load it with peft: AutoPeftModelForCausalLM.{loaded}"]
    if format_ in _LOADERS:
        lines = [f"load it with {_LOADERS[format_].format(folder=repr(str(output)))}"]
    if (output / CHAT_TEMPLATE).is_file():
        lines.append(f"chat template: AutoTokenizer.{loaded}.apply_chat_template(messages)")
    return lines


_LOADERS = {
    "dcp": "torch: torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id={folder})",
    "megatron": "megatron-core: dist_checkpointing.load(model.sharded_state_dict(), {folder})",
    "litgpt": "litgpt: litgpt.LLM.load({folder})",
}


def _write_tensors(
    wanted: Export,
    folder: Path,
    what: Literal["merged", "adapters", "base"],
    format_: Literal["safetensors", "dcp", "litgpt"] = "safetensors",
    naming: OtherNaming = "hf",
) -> None:
    request = ExportRequest(
        plan_json=str(wanted.run.plan_json.absolute()),
        checkpoint=str(wanted.run.checkpoint(wanted.step).absolute()),
        output=str(folder),
        dtype=DTYPES[wanted.dtype][0],
        max_file_bytes=wanted.max_file_bytes,
        what=what,
        format=format_,
        naming=naming,
    )
    run_tool(EXPORT, request)
