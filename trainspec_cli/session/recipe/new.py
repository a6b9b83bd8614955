"""Commented files for a model, an accelerator, a cluster or a recipe of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import cast

import yaml

from trainspec_cli.core.errors import Problem, RecipeError, did_you_mean
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import VERSION_LINE
from trainspec_cli.recipe.compose.folders import COMMAND_LINE, RECIPE, SUFFIX, Origin, find_folders, locate
from trainspec_cli.recipe.compose.values import parse_arguments
from trainspec_cli.recipe.json_schema import KeyMeaning, explain
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build, known_paths
from trainspec_cli.run.folder.files import write_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
CHECKPOINT = "hf:"


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    folder: str
    section: type
    choices: Mapping[str, str]
    """The keys whose values are options of groups -> the line below `defaults` that names the group."""
    asked: tuple[str, ...]
    """The keys that need a value."""
    offered: tuple[str, ...]
    """Keys that are written as comments with their defaults."""
    then: str
    """A command that uses the file."""


KINDS = {
    "model": Kind(
        "conf/model",
        DecoderModel,
        {},
        ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size"),
        *(
            ("head_dim", "tied_embeddings", "rope_theta", "norm_eps", "qk_norm", "attention_bias", "sliding_window"),
            "trainspec plan model={name} cluster=h100",
        ),
    ),
    "accelerator": Kind(
        "conf/accelerator",
        AcceleratorSpec,
        {},
        ("vendor", "bf16_tflops", "memory_gb", "memory_tb_per_s", "link_gb_per_s", "link_kind"),
        *(
            ("fp8_tflops", "matmul_bf16_tflops", "cache_mb", "tdp_w", "price_usd_per_hour"),
            "trainspec plan recipe=llama3_8b cluster.accelerator={name}",
        ),
    ),
    "cluster": Kind(
        "conf/cluster",
        ClusterSpec,
        {"accelerator": "/accelerator@accelerator"},
        ("num_nodes", "devices_per_node", "nic_gbit_per_s"),
        ("nic_kind", "storage_gb_per_s", "host_memory_gb"),
        "trainspec plan recipe=llama3_8b cluster={name}",
    ),
    "recipe": Kind(
        "recipes",
        RunSpec,
        {name: f"override /{name}" for name in ("model", "data", "cluster")},
        ("data.seq_len", "batching.global_batch_size", "train.max_steps", "optim.lr"),
        ("compile", "recompute", "precision.compute", "checkpoint.interval_steps", "resilience.mode"),
        "trainspec plan recipe={name}",
    ),
}


def new_file(
    kind: str, name: str, arguments: Sequence[str], source: str, ask: Callable[[str, str], str] | None
) -> tuple[Path, str]:
    """Write the file of a new option or recipe below the working directory; return its path, and a command to type
    next. `source`: an option to build on, or `hf:FOLDER`. `ask(key, meaning)` returns what the user types for a missing
    value; without it, a missing value is an error. Raises RecipeError; an existing file is never changed."""
    found = KINDS[kind]
    path = Path(found.folder) / f"{name}{SUFFIX}"
    if not NAME.fullmatch(name):
        raise RecipeError(
            Problem("wrong_name", f"`{name}` cannot be a file's name", hint="use letters, digits, _ and -")
        )
    if path.exists():
        raise RecipeError(Problem("output_exists", f"{path} exists", hint="choose another name, or edit the file"))
    texts = list(arguments)
    given, problems = parse_arguments(texts)
    values = {argument.key: argument.value for argument in given}
    defaults = [] if not source or source.startswith(CHECKPOINT) else [source]
    if source.startswith(CHECKPOINT):
        values = _read_folder(kind, source) | values
        if values.get("family") == "hybrid":
            found = replace(found, section=HybridModel, offered=())
    elif source and source not in _options(found):
        hint = did_you_mean(source, _options(found)) or f"trainspec list {kind} shows all"
        problems.append(Problem("unknown_option", f"there is no {kind} `{source}`", "--from", hint))
    known = [*found.choices, *known_paths(found.section)]
    for argument in given:
        if argument.key not in known:
            message = f"a {kind} has no key `{argument.key}`"
            problems.append(argument.origin.problem("unknown_key", message, did_you_mean(argument.key, known)))
    if problems:
        raise RecipeError(problems)
    wanted = () if source else (*found.choices, *found.asked)
    missing = [key for key in wanted if key not in values]
    if missing and ask is None:
        more = " ".join(f"{key}=..." for key in missing)
        message = f"a {kind} needs {', '.join(missing)}"
        raise RecipeError(
            Problem("missing_value", message, hint=f"trainspec new {kind} {' '.join([name, *texts, more])}")
        )
    for key in missing:
        assert ask is not None
        texts.append(f"{key}={ask(key, _meaning(found, key))}")
        typed, wrong = parse_arguments(texts[-1:])
        if wrong:
            raise RecipeError(wrong)
        values[key] = typed[0].value
    named: JsonObject = {"family": "decoder"} if kind == "model" and not defaults else {}
    if kind != RECIPE:
        named["name"] = name
        _check(found, named | values, texts)
    write_text(path, _render(found, kind, name, named | values, defaults))
    return path, found.then.format(name=name)


def _options(kind: Kind) -> list[str]:
    folders = find_folders(Path.cwd())
    return folders.recipe_names() if kind.section is RunSpec else folders.options(kind.folder.rpartition("/")[2])


def _read_folder(kind: str, source: str) -> JsonObject:
    """Return the values of a Hugging Face folder's config.json that differ from the defaults."""
    from trainspec_cli.data.huggingface.config import read_model  # deferred: loads the weight formats
    from trainspec_cli.data.huggingface.folder import CONFIG, read_config

    if kind != "model":
        raise RecipeError(Problem("usage", f"--from {source} describes a model, not a {kind}", "--from"))
    folder = Path(source.removeprefix(CHECKPOINT)).expanduser()
    if not (folder / CONFIG).is_file():
        hint = "name the folder of a Hugging Face model on this machine"
        raise RecipeError(Problem("missing_file", f"{folder} has no {CONFIG}", "--from", hint))
    read = read_model(read_config(folder), str(folder / CONFIG))
    section = HybridModel if read["family"] == "hybrid" else DecoderModel
    usual = {field.name: field.default for field in fields(section) if field.default is not MISSING}
    del read["name"]
    return {key: value for key, value in read.items() if key == "family" or key not in usual or value != usual[key]}


def _check(kind: Kind, values: JsonObject, texts: Sequence[str]) -> None:
    """Raise RecipeError for values of the wrong type or out of range."""
    plain = {key: value for key, value in values.items() if key not in kind.choices}
    problems = [problem for problem in build(kind.section, plain)[1] if problem.code != "missing_value"]
    if problems:
        origins = {text.partition("=")[0]: Origin(COMMAND_LINE, number) for number, text in enumerate(texts, 1)}
        raise RecipeError(locate(problems, origins, tuple(texts), Path.cwd()))


def check_recipe(path: Path) -> None:
    """Raise RecipeError with the problems of a recipe that was written, which may lack its data."""
    from trainspec_cli.session.recipe.load import load_for_planning  # deferred: loads hydra

    load_for_planning([f"{RECIPE}={path}"])


def _render(kind: Kind, kind_name: str, name: str, values: JsonObject, defaults: Sequence[str]) -> str:
    lines = [f"# {'An' if kind_name[0] in 'aeiou' else 'A'} {kind_name} of your own: {kind.then.format(name=name)}"]
    lines += [VERSION_LINE.rstrip()] if kind.section is RunSpec else []
    chosen = [f"  - {option}" for option in defaults]
    chosen += [f"  - {line}: {values[key]}" for key, line in kind.choices.items() if key in values]
    lines += ["defaults:", *chosen, ""] if chosen else []
    nested: JsonObject = {}
    for key, value in values.items():
        if key not in kind.choices:
            *above, leaf = key.split(".")
            section = nested
            for word in above:
                section = cast("JsonObject", section.setdefault(word, {}))
            section[leaf] = value
    lines += _lines(kind, nested)
    for key in kind.offered if not defaults else ():
        first, dot, leaf = key.partition(".")
        if first not in nested:
            default = _explain(kind, key).default or "..."
            lines.append(_line(f"# {first}: {f'{{{leaf}: {default}}}' if dot else default}", kind, key))
    return "\n".join(lines) + "\n"


def _lines(kind: Kind, values: JsonObject, path: str = "") -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(kind, value, f"{path}{key}.")
        else:
            yield _line(f"{indent}{key}: {_dump(value)}", kind, path + key)


def _line(text: str, kind: Kind, key: str) -> str:
    return f"{text}  # {_meaning(kind, key)}" if any(explain(kind.section, key)) else text


def _dump(value: JsonValue) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n")).rstrip()


def _explain(kind: Kind, key: str) -> KeyMeaning:
    return next(explain(kind.section, key))


def _meaning(kind: Kind, key: str) -> str:
    """Return the first sentence about a key, with its unit and allowed values."""
    if key in kind.choices:
        return f"an option of the group {key}: trainspec list {key}"
    found = _explain(kind, key)
    first = re.split(r"(?<=[.;])\s", " ".join(found.doc.split()), maxsplit=1)[0].rstrip(".;")
    return (
        first + (f" ({found.unit})" if found.unit else "") + (f": {', '.join(found.choices)}" if found.choices else "")
    )
