"""The meaning of a recipe's keys, and JSON Schemas for recipes, group files and records.

Editors use the schemas to check and complete YAML, and to explain its keys. They are written in draft-07, which
yaml-language-server supports best. A recipe has no required keys, because composition adds values from other files.
Dependencies between keys are checked by `trainspec validate`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainspec_cli.core.intentions import FORMER_KEYS
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import CURRENT_VERSION, VERSION_KEY, VERSIONS
from trainspec_cli.recipe.field_types import AUTO, Range, largest_of, ranges_of
from trainspec_cli.recipe.keys.cluster import ClusterSpec, PoolSpec
from trainspec_cli.recipe.keys.kernels import KERNELS, KernelSpec
from trainspec_cli.recipe.keys.model import AUTO_FAMILY
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import ScheduleSpec
from trainspec_cli.recipe.records import (
    MAX_ITEMS,
    PLAIN,
    Absent,
    describe,
    hints_of,
    is_required,
    key_of,
    known_choices,
    known_paths,
    members_of,
    sections_of,
    show_value,
)

# The meaning of a key: the docstring under its field, its type, range, unit and default.


UNITS = {
    "_gbit_per_s": "Gbit/s",
    "_gb_per_s": "GB/s (decimal)",
    "_tb_per_s": "TB/s (decimal)",
    "_tbit_per_s": "Tbit/s",
    "_g_per_kwh": "g/kWh",
    "_usd_per_kwh": "US dollars per kWh",
    "_usd_per_hour": "US dollars per hour",
    "_usd_per_device_hour": "US dollars per device-hour",
    "_usd_per_device_year": "US dollars per device-year",
    "_gbit_s": "Gbit/s",
    "_bytes_per_s": "bytes/s",
    "_exponentials_per_s": "1e12/s",
    "_per_hour": "per hour",
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
"""Suffix of a key -> its unit; the longest match wins."""


@dataclass(frozen=True)
class KeyMeaning:
    key: str
    of: str
    """The dataclass that has the field; different model families have keys with the same name."""
    doc: str
    value: str
    """The allowed values."""
    unit: str
    default: str | None
    """None if the user has to set a value."""
    choices: tuple[str, ...]
    below: tuple[str, ...]
    """The keys of a section."""


def explain(root: type, key: str, prefix: str = "") -> Iterator[KeyMeaning]:
    """Yield the meaning of a dotted key below `root`, once for each section that has it."""
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
    """Return the meaning of one field of a dataclass; `path` is the key to display."""
    wanted = hints_of(owner)[field.name]
    sections = sections_of(wanted)
    value = "a section"
    if not sections:
        limits = ranges_of(owner).get(field.name)
        value = describe(wanted) + (f", {limits.describe()}" if limits else "")
    default = None
    if field.default is not dataclasses.MISSING:
        default = show_value(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        default = "the defaults of its keys" if dataclasses.is_dataclass(made) else show_value(made)
    return KeyMeaning(
        key=path,
        of=owner.__name__,
        doc=docs_of(owner).get(field.name, ""),
        value=value,
        unit=next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if f"_{field.name}".endswith(end)), ""),
        default=default,
        choices=tuple(known_choices(owner, key_of(field))),
        below=tuple(dict.fromkeys(key_of(one) for section in sections for one in dataclasses.fields(section))),
    )


@cache
def docs_of(owner: type) -> Mapping[str, str]:
    """Return the docstring under each field of a dataclass, taken from its source."""
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


# Schemas of recipes and of group files.


DRAFT = "http://json-schema.org/draft-07/schema#"
REFERENCE: JsonObject = {
    "title": "reference",
    "$comment": "A reference such as ${model.vocab_size}, or ??? for a value that is set elsewhere.",
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
"""Definitions in addition to those of the sections, which are named after their dataclasses."""
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
"""Short forms allowed in place of a value, which `write_out_pools` and `complete_warmup` expand."""
TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null"}


def recipe_schema(groups: Iterable[str]) -> JsonObject:
    """Return the schema of a recipe; `groups` are the groups whose options it may select."""
    keys: JsonObject = {f"override /{group}": _text(f"An option of conf/{group}.") for group in groups}
    entry: JsonObject = {
        "type": "object",
        "properties": keys,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    parent = _text("A base recipe, or _self_.")
    doc = "The options that this recipe selects, and its base recipes."
    version: JsonObject = {
        VERSION_KEY: {
            "description": "The version of the training spec that the recipe is written for; 0.1 if it states none.",
            "enum": [*VERSIONS],
        }
    }
    return _SchemaWriter().document("a recipe", [RunSpec], version | _defaults(doc, entry, parent))


def group_schema(group: str, groups: Iterable[str]) -> JsonObject:
    """Return the schema for the files in conf/GROUP, a group with a recipe section (`sections_of_group`)."""
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
    """Return the schema for the files in conf/NAME, which are read without defaults or references."""
    return _SchemaWriter(has_references=False).document(f"an option of conf/{name}", [section], {})


def written_sections(roots: Iterable[type]) -> JsonObject:
    """Return the definitions, by dataclass name, for JSON that `from_plain` reads. trainspec writes this JSON without
    references, and with every key that has no default."""
    writer = _SchemaWriter(has_references=False, is_written=True)
    return writer.define(roots)


def sections_of_group(group: str) -> list[type]:
    """Return the dataclasses that a group's option can be; empty if no recipe section has the name of the group."""
    path = path_of_group(group)
    return _sections_at(RunSpec, path) if path else []


def path_of_group(group: str) -> str:
    """Return the section that a group's option fills; empty if no recipe section has the name of the group.

    `optim` fills `optim`, and `fabric` fills `cluster.fabric`: among several sections, the one nearest to the root is
    chosen."""
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
    """Writes one schema. Every section below the root becomes a definition that the keys reference."""

    def __init__(self, *, has_references: bool = True, is_written: bool = False):
        """`is_written`: whether the file is JSON written by trainspec, as opposed to YAML written by a person."""
        self._has_references = has_references
        self._is_written = is_written
        self._definitions: JsonObject = {}

    def document(self, title: str, roots: list[type], further: JsonObject) -> JsonObject:
        """Return the schema for a file whose content is one of `roots`, plus the keys in `further`."""
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
            # Files written by earlier versions contain every key of their version, and `build` accepts removed keys
            # that have the expected value.
            for (owner, key), former in FORMER_KEYS.items():
                if owner == section.__name__ and former.always is not None:
                    keys[key] = {"description": f"No longer a setting: {former.why}.", "const": former.always}
        return {"type": "object", "properties": {**further, **keys}, "additionalProperties": False, **required}

    def _key(self, owner: type, field: dataclasses.Field[Any]) -> JsonObject:
        wanted = _wanted(owner, field.name)
        # Editors show only the description, so it repeats the unit, the allowed values and the default.
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
        """Yield a schema for each member of a union. If text is not a member, a reference may replace any member."""
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
            self._definitions[section.__name__] = {}  # a recursive section refers to this one
            self._definitions[section.__name__] = self._section(section, {})
        return {"$ref": f"#/definitions/{section.__name__}"}


def _wanted(owner: type, name: str) -> Any:
    """Return the type of value that a key accepts: the field's type, except for kernels and model families, which
    accept additional words."""
    wanted: Any = hints_of(owner)[name]
    if owner is KernelSpec:
        return Literal[(AUTO, *KERNELS[name])]
    return Literal[(*typing.get_args(wanted), AUTO_FAMILY)] if name == "family" else wanted


def _any_of(alternatives: list[JsonObject]) -> JsonObject:
    """Return the only alternative, or the union of several. Keywords next to a `$ref` are ignored, so a reference is
    always wrapped in a union."""
    if len(alternatives) == 1 and "$ref" not in alternatives[0]:
        return alternatives[0]
    return {"anyOf": [*alternatives]}


def _number(wanted: type, limits: Range | None, name: str) -> JsonObject:
    """Return the schema of a number. An integer may be written as 1e9, which some editors do not accept as
    `integer`."""
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
    """Return the default of a key that is not a section; editors insert it as the key's value."""
    value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
        return {}
    plain: JsonValue = list(value) if isinstance(value, tuple) else value
    return {"default": plain}


# Schemas of records, derived from the annotations that `read_record` uses. They describe what this version writes.
# Readers are more tolerant than the schemas: they ignore unknown keys, and enum values added by later versions.


STATED: JsonObject = {
    "description": "The version of the training spec that the file follows.",
    "const": CURRENT_VERSION,
}
DIGEST: JsonObject = {"description": "SHA-256 of all other keys except the version.", "type": "string"}
NULL: JsonObject = {"type": "null"}


def plan_schema(title: str, root: type) -> JsonObject:
    """Return the schema of a versioned file from which `from_plain` builds `root`."""
    definitions = written_sections([root])
    found = definitions.pop(root.__name__)
    assert isinstance(found, dict), "a section"
    keys = found["properties"]
    needed = found.get("required", [])
    assert isinstance(keys, dict) and isinstance(needed, list), "as _SchemaWriter leaves them"
    whole = {**found, "properties": {VERSION_KEY: STATED, **keys, "sha256": DIGEST}, "required": [VERSION_KEY, *needed]}
    return {"$schema": DRAFT, "title": f"trainspec: {title}", **whole, "definitions": definitions}


def record_schema(title: str, record: type, *, left_out: Collection[str] = (), is_versioned: bool = True) -> JsonObject:
    """Return the schema of a file that contains a record. `left_out`: fields that are not in the file. `is_versioned`:
    whether the file states its version; if not, it has its own schema and is protected by a digest."""
    writer = _RecordWriter()
    found = writer.record(record, left_out)
    keys = found["properties"]
    needed = found["required"]
    assert isinstance(keys, dict) and isinstance(needed, list), "as `record` returns them"
    stated: JsonObject = {VERSION_KEY: STATED} if is_versioned else {}
    whole = {**found, "properties": {**stated, **keys}, "required": [*stated, *needed]}
    return {"$schema": DRAFT, "title": f"trainspec: {title}", **whole, "definitions": writer.definitions()}


def events_schema(
    title: str, base: type, kinds: Mapping[str, type], one_of: Mapping[str, Collection[str]], *, closed: bool = False
) -> JsonObject:
    """Return the schema for a line of an events file. `base` has the fields of all events, `kinds` those of each type,
    and at least one field of `one_of` must be present. `closed`: whether the file has no events of other types."""
    writer = _RecordWriter()
    found = writer.record(base, ())
    keys = found["properties"]
    assert isinstance(keys, dict), "as `record` returns them"
    names: list[JsonValue] = [*kinds]
    stated_type: JsonObject = {"type": {"enum": names}} if closed else {}
    keys |= {VERSION_KEY: STATED, **stated_type}
    cases: list[JsonValue] = []
    for name, kind in kinds.items():
        reference = writer.refer(kind)
        choices: list[JsonValue] = [{"required": [field]} for field in one_of.get(name, ())]
        then: JsonObject = {"allOf": [reference, {"anyOf": choices}]} if choices else reference
        cases.append({"if": {"properties": {"type": {"const": name}}}, "then": then})
    whole: JsonObject = {**found, "required": ["type", "time"], "allOf": cases}
    return {"$schema": DRAFT, "title": f"trainspec: {title}", **whole, "definitions": writer.definitions()}


class _RecordWriter:
    """Writes one schema. Every record below the root becomes a definition that the keys reference."""

    def __init__(self) -> None:
        self._definitions: JsonObject = {}
        self._sections: list[type] = []

    def definitions(self) -> JsonObject:
        return {**dict(sorted(self._definitions.items())), **written_sections(self._sections)}

    def record(self, record: type, left_out: Collection[str]) -> JsonObject:
        hints = typing.get_type_hints(record, include_extras=True)
        docs = docs_of(record)
        fields = [one for one in dataclasses.fields(record) if one.name not in left_out]
        keys: JsonObject = {}
        for one in fields:
            doc = " ".join(docs.get(one.name, "").split())
            keys[key_of(one)] = {**({"description": doc} if doc else {}), **self._value(hints[one.name])}
        needed: list[JsonValue] = [key_of(one) for one in fields if is_required(one)]
        return {"type": "object", "properties": keys, "required": needed}

    def refer(self, record: type) -> JsonObject:
        if record.__name__ not in self._definitions:
            self._definitions[record.__name__] = {}  # like a section, a record may be recursive
            self._definitions[record.__name__] = self.record(record, ())
        return {"$ref": f"#/definitions/{record.__name__}"}

    def _value(self, annotation: Any) -> JsonObject:
        """Return the schema of the values that `read_record` accepts for a type. A reference is wrapped in a union with
        one member, because keywords next to a `$ref` are ignored."""
        origin = typing.get_origin(annotation)
        members = typing.get_args(annotation)
        if origin is typing.Annotated:
            kind = annotation.__metadata__[0]
            if kind.section is None:
                return dict(kind.schema)
            self._sections.append(kind.section)
            return {"anyOf": [{"$ref": f"#/definitions/{kind.section.__name__}"}]}
        if origin in (typing.Union, types.UnionType):
            kinds = [NULL if one is types.NoneType else self._value(one) for one in members if one is not Absent]
            return kinds[0] if len(kinds) == 1 else {"anyOf": [*kinds]}
        if origin is tuple:
            return {"type": "array", "items": self._value(members[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self._value(members[1])}
        if origin is typing.Literal:
            return {"enum": [*members]}
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            return {"anyOf": [self.refer(annotation)]}
        return dict(PLAIN[annotation].schema)
