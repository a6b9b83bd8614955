"""Apply the command line's values to those of the files, then resolve every `${...}`; faults are collected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainspec_cli.compose.arguments import Argument, problem_at
from trainspec_cli.compose.folders import SHIPPED, find_shipped
from trainspec_cli.compose.interpolation import MISSING, InterpolationError, Resolver
from trainspec_cli.errors import Problem, did_you_mean

SHOWN_CHARS = 200
"""The longest excerpt of a value that cannot be resolved."""


def apply_arguments(config: DictConfig, arguments: Iterable[Argument]) -> list[Problem]:
    """Set and delete values in order. Unknown keys are added; they are checked later."""
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
    except (OmegaConfBaseException, RecursionError) as error:
        return problem_at(argument.number, "bad_override", _first_line(error), path=argument.key)
    return None


def _delete(config: DictConfig, argument: Argument) -> Problem | None:
    parent_path, _, name = argument.key.rpartition(".")
    parent = OmegaConf.select(config, parent_path) if parent_path else config
    if not isinstance(parent, DictConfig) or name not in parent:
        hint = did_you_mean(argument.key, _flatten(_as_written(config), ""))
        message = f"there is no `{argument.key}` to delete"
        return problem_at(argument.number, "unknown_key", message, hint, argument.key)
    del parent[name]
    return None


def _scalar_above(config: DictConfig, key: str) -> str | None:
    """Return the prefix of `key` that names a single value, if there is one."""
    node: Any = _as_written(config)
    names = key.split(".")
    for depth, name in enumerate(names[:-1], start=1):
        if name not in node:
            return None
        node = node[name]
        if not isinstance(node, dict):
            return ".".join(names[:depth])
    return None


def resolve(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Return a plain dict, with `???` for values that are open or failed to resolve, and the problems."""
    written = _as_written(config)
    problems: list[Problem] = []
    plain = _resolve_section(
        Resolver(written, {SHIPPED: find_shipped}), written, (), problems, list(_flatten(written, ""))
    )
    return plain, problems


def _resolve_section(
    resolver: Resolver, written: dict[str, Any], above: tuple[str, ...], problems: list[Problem], keys: list[str]
) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in written.items():
        path = (*above, key)
        if isinstance(value, dict):
            plain[str(key)] = _resolve_section(resolver, value, path, problems, keys)
            continue
        try:
            plain[str(key)] = resolver.value(path)
        except InterpolationError as error:
            plain[str(key)] = MISSING
            problems.append(_bad_interpolation(value, ".".join(map(str, path)), str(error), keys))
    return plain


def _bad_interpolation(value: Any, path: str, reason: str, keys: Iterable[str]) -> Problem:
    shown = str(value)
    hint = did_you_mean(shown.strip("${}"), keys) if "not found" in reason else ""
    shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
    return Problem(code="bad_interpolation", path=path, message=f"`{path}` is {shown}: {reason}", hint=hint)


def _flatten(plain: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in plain.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")


def _as_written(config: DictConfig) -> dict[str, Any]:
    """Return a plain dict with interpolations unresolved."""
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
