"""Render a composed recipe as YAML, each value with the file:line it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import yaml

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.printable import is_printable, on_one_line
from trainspec_cli.recipe.compose.compose import Composed
from trainspec_cli.recipe.compose.folders import Origin, Origins

WIDEST_ALIGNED = 44
"""Origins are aligned in one column after lines of up to this length."""


def render_yaml(composed: Composed, paint_origin: Callable[[str], str] = str) -> str:
    """Return valid YAML with origins as comments, which `paint_origin` may colour."""
    lines = list(_lines(composed.data, composed.origins, ""))
    column = max((len(text) for text, _ in lines if len(text) <= WIDEST_ALIGNED), default=0)
    rendered = [
        f"{text:<{column}}  {paint_origin(on_one_line(f'# {origin}'))}" if origin else text for text, origin in lines
    ]
    return "\n".join(rendered) + "\n"


def render_value(value: JsonValue) -> str:
    """Return a value on one line of YAML; in ASCII if it holds invisible characters."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    if not is_printable(text):
        text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _lines(data: JsonObject, origins: Origins, prefix: str) -> Iterator[tuple[str, Origin | None]]:
    indent = "  " * prefix.count(".")
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{render_value(key)}:", None
            yield from _lines(value, origins, f"{path}.")
        else:
            yield f"{indent}{render_value(key)}: {render_value(value)}", origins.get(path)
