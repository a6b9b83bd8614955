"""The meaning of a recipe's key: the doc that stands under its field, its type, range, unit and default."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainspec_cli.recipe.field_types import ranges_of
from trainspec_cli.recipe.structure import describe, hints_of, key_of, known_choices, sections_of, show_value

UNITS = {
    "_gbit_per_s": "Gbit/s",
    "_gb_per_s": "GB/s (decimal)",
    "_tb_per_s": "TB/s (decimal)",
    "_tbit_per_s": "Tbit/s",
    "_g_per_kwh": "g/kWh",
    "_usd_per_kwh": "US dollars a kWh",
    "_usd_per_hour": "US dollars an hour",
    "_usd_per_device_hour": "US dollars a device-hour",
    "_per_hour": "an hour",
    "_tflops": "TFLOP/s",
    "_usd": "US dollars",
    "_hours": "hours",
    "_years": "years",
    "_bytes": "bytes",
    "_steps": "steps",
    "_gb": "GB (decimal)",
    "_mb": "MB (decimal)",
    "_us": "microseconds",
    "_s": "seconds",
    "_w": "watts",
}
"""The end of a key -> its unit; the longest that fits counts."""


@dataclass(frozen=True)
class KeyMeaning:
    key: str
    of: str
    """The dataclass that has the field: families of models have a key of one name each."""
    doc: str
    value: str
    """The values that are allowed."""
    unit: str
    default: str | None
    """None where a value must be given."""
    choices: tuple[str, ...]
    below: tuple[str, ...]
    """The keys of a section."""


def explain(root: type, key: str, prefix: str = "") -> Iterator[KeyMeaning]:
    """Yield what a dotted key below `root` means, once for each section that has it."""
    name, _, rest = key.partition(".")
    for field in dataclasses.fields(root):
        if key_of(field) != name:
            continue
        sections = sections_of(hints_of(root)[field.name])
        path = f"{prefix}{name}"
        if not rest:
            yield explain_field(root, field, path)
        for section in sections if rest else ():
            yield from explain(section, rest, f"{path}.")


def explain_field(owner: type, field: dataclasses.Field[Any], path: str) -> KeyMeaning:
    """Return what one field of a dataclass means; `path` is its key, as it is shown."""
    sections = sections_of(hints_of(owner)[field.name])
    return KeyMeaning(
        key=path,
        of=owner.__name__,
        doc=docs_of(owner).get(field.name, ""),
        value="a section" if sections else _allowed(owner, field),
        unit=next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if field.name.endswith(end)), ""),
        default=_default(field),
        choices=tuple(known_choices(owner, key_of(field))),
        below=tuple(dict.fromkeys(key_of(one) for section in sections for one in dataclasses.fields(section))),
    )


def _allowed(owner: type, field: dataclasses.Field[Any]) -> str:
    """Return `a whole number, at least 1`."""
    limits = ranges_of(owner).get(field.name)
    return describe(hints_of(owner)[field.name]) + (f", {limits.describe()}" if limits else "")


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return show_value(field.default)
    if field.default_factory is dataclasses.MISSING:
        return None
    value = field.default_factory()
    return "that of its keys" if dataclasses.is_dataclass(value) else show_value(value)


@cache
def docs_of(owner: type) -> Mapping[str, str]:
    """Return the text under each field of a dataclass, from its source."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                found[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return found
