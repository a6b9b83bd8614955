"""Read the files of engines as flat keys: JSON, YAML, a Python module (parsed, not run), or options in a shell
script."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.wings.interop.target import flat

RENDEZVOUS_OPTIONS = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--master-addr",
    "--master-port",
    "--node-rank",
    "--standalone",
)
"""torchrun's rendezvous options, which do not describe a run."""
MOST_CHARS = 1_000_000
"""Maximum size of a file, in characters."""


def read_source(file: Path, engine: str) -> dict[str, JsonValue]:
    """Return the engine's keys in a file. Raises RecipeError if the file cannot be read."""
    text = _text(file)
    try:
        return READERS[engine](text)
    except (ValueError, SyntaxError, yaml.YAMLError, RecursionError, MemoryError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = f"known engines: {', '.join(READERS)}; choose one with --from"
        message = f"{file} is not a configuration of {engine}: {what}"
        raise RecipeError(Problem("unreadable", message, hint=hint)) from error


def guess_engine(file: Path) -> str:
    """Return the engine that uses this file suffix. If several do, return the engine whose keys appear in the file."""
    engine = {".json": "deepspeed", ".yaml": "accelerate", ".yml": "accelerate", ".py": "torchtitan"}.get(
        file.suffix, "megatron"
    )
    if not file.is_file():
        return engine
    if engine == "torchtitan" and "ConfigContainer(" in _text(file):
        return "megatron-bridge"
    if engine != "accelerate":
        return engine
    # Three engines use this suffix, so identify the engine by keys that no other engine has.
    top = set(re.findall(r"^(\w+):", _text(file), re.MULTILINE))
    return next((name for name, keys in KEYS_OF_YAML.items() if keys & top), engine)


KEYS_OF_YAML: Mapping[str, set[str]] = {
    "maxtext": {"base_emb_dim", "per_device_batch_size", "max_target_length", "remat_policy"},
    "axolotl": {"base_model", "micro_batch_size", "sequence_len"},
}
"""Engine -> keys that occur in no other engine's YAML."""


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = "specify an existing file"
        raise RecipeError(Problem("missing_file", f"{file} cannot be read: {why}", hint=hint)) from error
    if len(text) > MOST_CHARS:
        message = f"{file} has more than {MOST_CHARS:,} characters"
        raise RecipeError(Problem("unreadable", message, hint="name another file"))
    return text


def _yaml_with_items(text: str) -> dict[str, JsonValue]:
    """Return the keys of a file. A list of sections becomes `name[i].key`, and a list of plain values is one value."""
    keys: dict[str, JsonValue] = {}
    for name, value in _section(yaml.safe_load(text)).items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            keys.update(flat({f"{name}[{index}]": item for index, item in enumerate(value)}))
        else:
            keys.update({name: value} if isinstance(value, list) else flat({name: value}))
    return keys


def _section(value: object) -> JsonObject:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("its top level is not a mapping")
    return value


def _words(text: str) -> dict[str, JsonValue]:
    """Return the `--name value` and `--name=value` options in a script. An option without a value is true."""
    keys: dict[str, JsonValue] = {}
    name = ""
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        if word.startswith("--") and len(word) > 2:
            name, _, value = word.partition("=")
            keys[name] = _number(value) if value else True
        elif name and keys[name] is True:
            keys[name] = _number(word)
        elif name and word != "$@":
            before = keys[name]
            keys[name] = [*(before if isinstance(before, list) else [before]), _number(word)]
    if not keys:
        raise ValueError("it contains no --options")
    return {name: value for name, value in keys.items() if name not in RENDEZVOUS_OPTIONS}


def _number(word: str) -> JsonValue:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _torchtitan(text: str) -> dict[str, JsonValue]:
    """Return the keyword arguments of the `Trainer.Config(...)` returned by a function, by section and name."""
    tree = ast.parse(text)
    keys: dict[str, JsonValue] = {}
    # The import and the call to `model_registry` determine the model, as `family.size`.
    nodes = list(ast.walk(tree))
    families = [
        (node.module or "").rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names)
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node) == "model_registry"]
    for family, call in zip(families, calls, strict=False):
        if call.args:
            keys["model"] = f"{family}.{_literal(call.args[0])}"
    for name, value in _arguments(tree, "Trainer.Config"):
        if name == "activation_checkpoint":
            keys[name] = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}.get(_called(value))
        elif isinstance(value, ast.Call):
            keys.update(_section_of(name, value))
        elif name != "model_spec":
            keys[name] = _literal(value)
    return keys


def _megatron_bridge(text: str) -> dict[str, JsonValue]:
    """Return the keyword arguments of a `ConfigContainer(...)`, by section and name."""
    keys: dict[str, JsonValue] = {}
    for name, value in _arguments(ast.parse(text), "ConfigContainer"):
        keys.update(_section_of(name, value) if isinstance(value, ast.Call) else {name: _literal(value)})
    return keys


def _arguments(tree: ast.Module, called: str) -> list[tuple[str, ast.expr]]:
    """Return the keyword arguments of the only call to `called`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == called]
    if len(calls) != 1:
        raise ValueError(f"it calls {called} {len(calls)} times; expected exactly one call")
    return [(argument.arg or "**", argument.value) for argument in calls[0].keywords]


def _section_of(name: str, call: ast.Call) -> dict[str, JsonValue]:
    return flat({name: {one.arg or "**": _literal(one.value) for one in call.keywords}})


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _literal(node: ast.expr) -> JsonValue:
    """Return a literal value, or the source text of an expression."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return list(value) if isinstance(value, tuple) else value


READERS: Mapping[str, Callable[[str], dict[str, JsonValue]]] = {
    "deepspeed": lambda text: flat(_section(json.loads(text))),
    "accelerate": lambda text: flat(_section(yaml.safe_load(text))),
    "torchtitan": _torchtitan,
    "megatron": _words,
    # MaxText's keys have no sections, and a list is one value.
    "maxtext": lambda text: dict(_section(yaml.safe_load(text))),
    "megatron-bridge": _megatron_bridge,
    "axolotl": _yaml_with_items,
}
"""Engine -> the function that reads its files."""
