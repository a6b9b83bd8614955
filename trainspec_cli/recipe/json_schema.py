"""JSON Schemas of recipes and of the files of a group: editors check YAML by them, complete it and explain its keys.

They are written in draft-07, which yaml-language-server knows best. Nothing is required: a recipe is composed, and its
other values stand elsewhere. How keys depend on one another is left to `trainspec validate`.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from trainspec_cli.core.intentions import FORMER_KEYS
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.spec_version import KEY, VERSIONS
from trainspec_cli.recipe.explain import explain_field
from trainspec_cli.recipe.field_types import AUTO, Range, largest_of, ranges_of
from trainspec_cli.recipe.keys.cluster import ClusterSpec, PoolSpec
from trainspec_cli.recipe.keys.kernels import KERNELS, KernelSpec
from trainspec_cli.recipe.keys.model import AUTO_FAMILY
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import ScheduleSpec
from trainspec_cli.recipe.structure import (
    MAX_ITEMS,
    hints_of,
    is_required,
    key_of,
    known_paths,
    members_of,
    sections_of,
)

DRAFT = "http://json-schema.org/draft-07/schema#"
REFERENCE: JsonObject = {
    "title": "reference",
    "$comment": "A reference such as ${model.vocab_size}, or ??? for a value that is given elsewhere.",
    "type": "string",
    "pattern": r"\$\{|^\?\?\?$",
}
GROUPED_NUMBER: JsonObject = {
    "title": "number with underscores",
    "$comment": "A number such as 1_000_000, which YAML 1.2 reads as text.",
    "type": "string",
    "pattern": r"^[-+]?[0-9]+(_[0-9]+)+(\.[0-9_]*)?([eE][-+]?[0-9]+)?$",
}
SHARED: JsonObject = {"reference": REFERENCE, "grouped_number": GROUPED_NUMBER}
"""Definitions beside those of the sections, which have the names of their dataclasses."""
NAME: JsonObject = {"title": "name", "$comment": "The name of an option.", "type": "string"}
SHORT_POOL: JsonObject = {"type": "string", "pattern": r"^[^*\s]+\s*\*\s*\d+(\s*x\s*\d+)?$"}
SHORT_FORMS: dict[tuple[type, str], tuple[JsonObject, ...]] = {
    (PoolSpec, "accelerator"): (NAME,),
    (ClusterSpec, "pools"): ({"type": "array", "items": SHORT_POOL},),
    (ScheduleSpec, "warmup_steps"): (
        {"type": "string", "pattern": r"^\s*\d+(\.\d*)?\s*%\s*$"},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    ),
}
"""What may stand in the place of a value: `write_out_pools` and `complete_warmup` put the value there."""
TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null"}


def recipe_schema(groups: Iterable[str]) -> JsonObject:
    """Return the schema of a recipe; `groups` are those whose options it may choose."""
    keys: JsonObject = {f"override /{group}": _text(f"An option of conf/{group}.") for group in groups}
    entry: JsonObject = {
        "type": "object",
        "properties": keys,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    parent = _text("A recipe that this one builds on, or _self_.")
    doc = "The options that this recipe chooses, and the recipes that it builds on."
    version: JsonObject = {
        KEY: {
            "description": "The version of the training spec that the recipe is written for; 0.1 where it states none.",
            "enum": [*VERSIONS],
        }
    }
    return _SchemaWriter().document("a recipe", [RunSpec], version | _defaults(doc, entry, parent))


def group_schema(group: str, groups: Iterable[str]) -> JsonObject:
    """Return the schema of the files of conf/GROUP, of which `sections_of_group` is not empty."""
    names = "|".join(map(re.escape, groups))
    entry: JsonObject = {
        "type": "object",
        "patternProperties": {rf"^/?({names})@[\w.]+$": {"type": "string"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    parent = _text("An option of this group that this one builds on, or _self_.")
    doc = "The options that this one builds on."
    return _SchemaWriter().document(
        f"an option of conf/{group}", sections_of_group(group), _defaults(doc, entry, parent)
    )


def plain_schema(name: str, section: type) -> JsonObject:
    """Return the schema of the files of conf/NAME, which are read by themselves: without defaults and references."""
    return _SchemaWriter(has_references=False).document(f"an option of conf/{name}", [section], {})


def written_sections(roots: Iterable[type]) -> JsonObject:
    """Return definitions of what `from_plain` reads, by the names of the dataclasses: JSON that trainspec has written,
    without references, and with every key that has no default."""
    writer = _SchemaWriter(has_references=False, is_written=True)
    return writer.define(roots)


def sections_of_group(group: str) -> list[type]:
    """Return the dataclasses that an option of a group may be; empty if no section of a recipe has the group's name."""
    path = path_of_group(group)
    return _sections_at(RunSpec, path) if path else []


def path_of_group(group: str) -> str:
    """Return the section that an option of a group fills; empty if no section of a recipe has the group's name.

    `optim` is `optim`, `fabric` is `cluster.fabric`: of several the one nearest to the root.
    """
    ending = f".{group.replace('/', '.')}"
    paths = [path for path in dict.fromkeys(known_paths(RunSpec)) if f".{path}".endswith(ending)]
    nearest = sorted(paths, key=lambda path: path.count("."))
    return next((path for path in nearest if _sections_at(RunSpec, path)), "")


def _sections_at(root: type, path: str) -> list[type]:
    name, _, rest = path.partition(".")
    hints = hints_of(root)
    fields = [field for field in dataclasses.fields(root) if key_of(field) == name]
    found = [section for field in fields for section in sections_of(hints[field.name])]
    return [below for section in found for below in _sections_at(section, rest)] if rest else found


def _text(description: str) -> JsonObject:
    return {"type": "string", "description": description}


def _defaults(description: str, *items: JsonObject) -> JsonObject:
    return {"defaults": {"description": description, "type": "array", "items": {"anyOf": [*items]}}}


class _SchemaWriter:
    """Writes one schema. Every section below the root becomes a definition, to which the keys refer."""

    def __init__(self, *, has_references: bool = True, is_written: bool = False):
        """`is_written`: the file is JSON of trainspec's own, not YAML of a person's."""
        self._has_references = has_references
        self._is_written = is_written
        self._definitions: JsonObject = {}

    def document(self, title: str, roots: list[type], further: JsonObject) -> JsonObject:
        """Return the schema of a file that is one of `roots`, with the keys of `further` besides."""
        alternatives = [self._section(root, further) for root in roots]
        return {
            "$schema": DRAFT,
            "title": f"trainspec: {title}",
            **_any_of(alternatives),
            "definitions": {**SHARED, **dict(sorted(self._definitions.items()))},
        }

    def define(self, roots: Iterable[type]) -> JsonObject:
        """Return the definitions of `roots` and of all sections below them."""
        for root in roots:
            self._refer(root)
        return dict(sorted(self._definitions.items()))

    def _section(self, section: type, further: JsonObject) -> JsonObject:
        keys = {key_of(field): self._key(section, field) for field in dataclasses.fields(section)}
        needed: list[JsonValue] = [key_of(field) for field in dataclasses.fields(section) if is_required(field)]
        required: JsonObject = {"required": needed} if self._is_written and needed else {}
        if self._is_written:
            # Files of earlier versions state every key of their time, and `build` passes over these where they agree.
            for (owner, key), former in FORMER_KEYS.items():
                if owner == section.__name__ and former.always is not None:
                    keys[key] = {"description": f"No longer a setting: {former.why}.", "const": former.always}
        return {"type": "object", "properties": {**further, **keys}, "additionalProperties": False, **required}

    def _key(self, owner: type, field: dataclasses.Field[Any]) -> JsonObject:
        wanted = _wanted(owner, field.name)
        # Editors show the description alone, so it repeats the unit, the allowed values and the default.
        meaning = explain_field(owner, field, key_of(field))
        paragraphs = [" ".join(paragraph.split()) for paragraph in meaning.doc.split("\n\n")]
        default = "No default." if meaning.default is None else f"Default: {meaning.default}."
        facts = [f"Unit: {meaning.unit}." if meaning.unit else "", f"Value: {meaning.value}.", default]
        found: JsonObject = {
            "description": "\n\n".join(filter(None, [*paragraphs, " ".join(filter(None, facts))])),
            **_default(field),
        }
        alternatives = [*self._alternatives(wanted, ranges_of(owner).get(field.name), field.name)]
        short = () if self._is_written else SHORT_FORMS.get((owner, field.name), ())
        return found | _any_of([*alternatives, *short])

    def _alternatives(self, wanted: Any, limits: Range | None, name: str) -> Iterator[JsonObject]:
        """Yield a schema for each member of a union; where text is not one, a reference may stand for any of them."""
        members = members_of(wanted)
        for member in members:
            yield self._alternative(member, limits, name)
        if {int, float} & set(members) and not self._is_written:
            yield {"$ref": "#/definitions/grouped_number"}
        if self._has_references and str not in members:
            yield {"$ref": "#/definitions/reference"}

    def _alternative(self, wanted: Any, limits: Range | None, name: str) -> JsonObject:
        origin = typing.get_origin(wanted)
        inner = typing.get_args(wanted)
        if origin is Literal:
            return {"enum": [*inner]}
        if origin is tuple:
            items = _any_of([*self._alternatives(inner[0], limits, name)])
            array: JsonObject = {"type": "array", "items": items}
            return array if sections_of(inner[0]) else array | {"maxItems": MAX_ITEMS}
        if origin is dict:
            return {"type": "object", "additionalProperties": _any_of([*self._alternatives(inner[1], limits, "")])}
        if wanted in (int, float):
            return _number(wanted, limits, name)
        return {"type": TYPE_NAMES[wanted]} if wanted in TYPE_NAMES else self._refer(wanted)

    def _refer(self, section: type) -> JsonObject:
        if section.__name__ not in self._definitions:
            self._definitions[section.__name__] = {}  # a section that holds itself refers to what is being written
            self._definitions[section.__name__] = self._section(section, {})
        return {"$ref": f"#/definitions/{section.__name__}"}


def _wanted(owner: type, name: str) -> Any:
    """Return the type of what may be written for a key: that of the field, but for words that other rules know."""
    wanted: Any = hints_of(owner)[name]
    if owner is KernelSpec:
        return Literal[(AUTO, *KERNELS[name])]
    return Literal[(*typing.get_args(wanted), AUTO_FAMILY)] if name == "family" else wanted


def _any_of(alternatives: list[JsonObject]) -> JsonObject:
    """Return the only one, or their union. What stands beside a `$ref` is not read, so it is never alone."""
    if len(alternatives) == 1 and "$ref" not in alternatives[0]:
        return alternatives[0]
    return {"anyOf": [*alternatives]}


def _number(wanted: type, limits: Range | None, name: str) -> JsonObject:
    """Return the schema of a number; a whole one may be written as 1e9, which is no `integer` for some editors."""
    most = largest_of(name, wanted(0))
    limits = limits or Range(-most)
    below = "minimum" if limits.includes_low else "exclusiveMinimum"
    above = "maximum" if limits.includes_high or limits.high > most else "exclusiveMaximum"
    bounds: JsonObject = {below: _plain(limits.low), above: _plain(min(limits.high, most))}
    kind: JsonObject = {"type": "number", "multipleOf": 1} if wanted is int else {"type": "number"}
    return kind | bounds


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) and abs(number) < 2**53 else number


def _default(field: dataclasses.Field[Any]) -> JsonObject:
    """Return the default of a key that is no section, which editors write behind the key."""
    value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
        return {}
    plain: JsonValue = list(value) if isinstance(value, tuple) else value
    return {"default": plain}
