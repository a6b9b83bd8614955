"""Values over files: apply the command line's, then resolve every `${...}`; faults are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainspec_cli.compose.arguments import Argument, problem_at
from trainspec_cli.errors import Problem, did_you_mean

MISSING = "???"
"""Hydra's word for a value that is left open, kept as it is: what belongs there is for `spec` to say."""


def apply_arguments(config: DictConfig, arguments: Iterable[Argument]) -> list[Problem]:
    """Set and delete in order. Keys that no file has are added: whether they mean something is not known here."""
    OmegaConf.set_struct(config, False)
    found = (_delete(config, argument) if argument.deletes else _set(config, argument) for argument in arguments)
    return [problem for problem in found if problem]


def _set(config: DictConfig, argument: Argument) -> Problem | None:
    scalar = _scalar_above(config, argument.key)
    if scalar:
        message = f"`{scalar}` is a single value: it has no key `{argument.key.removeprefix(f'{scalar}.')}`"
        return problem_at(argument.number, "unknown_key", message, f"type {scalar}=<value>", argument.key)
    try:
        OmegaConf.update(config, argument.key, argument.value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return problem_at(argument.number, "bad_override", _first_line(error), path=argument.key)
    return None


def _delete(config: DictConfig, argument: Argument) -> Problem | None:
    parent_path, _, name = argument.key.rpartition(".")
    parent = OmegaConf.select(config, parent_path) if parent_path else config
    if not isinstance(parent, DictConfig) or name not in parent:
        hint = did_you_mean(argument.key, _paths(config))
        message = f"there is no `{argument.key}` to take out"
        return problem_at(argument.number, "unknown_key", message, hint, argument.key)
    del parent[name]
    return None


def _scalar_above(config: DictConfig, key: str) -> str | None:
    """The part of `key` that names a single value, if one does."""
    node: Any = _as_written(config)
    words = key.split(".")
    for depth, word in enumerate(words[:-1], start=1):
        if word not in node:
            return None
        node = node[word]
        if not isinstance(node, dict):
            return ".".join(words[:depth])
    return None


def resolve(config: DictConfig, prefix: str = "") -> tuple[dict[str, Any], list[Problem]]:
    """-> plain dict, `???` kept where a value is open or its interpolation failed; and the failed ones."""
    plain: dict[str, Any] = {}
    problems: list[Problem] = []
    for key in config:
        name = str(key)
        path = f"{prefix}{name}"
        if OmegaConf.is_missing(config, key):
            plain[name] = MISSING
            continue
        try:
            value = config[key]
            if isinstance(value, DictConfig):
                value, inner = resolve(value, f"{path}.")
                problems += inner
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            value = MISSING
            problems.append(_bad_interpolation(config, name, path, error))
        plain[name] = value
    return plain, problems


def _bad_interpolation(config: DictConfig, key: str, path: str, error: Exception) -> Problem:
    written = str(_as_written(config)[key])
    said = "it refers to itself" if isinstance(error, RecursionError) else _first_line(error)
    hint = did_you_mean(written.strip("${}"), _paths(config._get_root())) if "not found" in said else ""
    return Problem(code="bad_interpolation", path=path, message=f"`{path}` is {written}: {said}", hint=hint)


def _paths(config: Any) -> list[str]:
    return list(_flatten(_as_written(config), ""))


def _flatten(plain: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in plain.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")


def _as_written(config: DictConfig) -> dict[str, Any]:
    """Plain, with interpolations as they stand."""
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
