"""JSON Schemas of records, by the annotations that `read_record` reads them by.

They are of what this version writes. Keys that a record does not know are passed over, as its reader does; where a
field is a choice of words, a reader passes over those of later versions, and the schema does not.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.spec_version import CURRENT, KEY
from trainspec_cli.recipe.explain import docs_of
from trainspec_cli.recipe.json_schema import DRAFT, written_sections
from trainspec_cli.recipe.records import PLAIN, Absent
from trainspec_cli.recipe.structure import is_required, key_of

STATED: JsonObject = {"description": "The version of the training spec that the file keeps to.", "const": CURRENT}
DIGEST: JsonObject = {"description": "SHA-256 of all other keys but the version.", "type": "string"}
NULL: JsonObject = {"type": "null"}


def plan_schema(title: str, root: type) -> JsonObject:
    """Return the schema of a file of which `from_plain` builds `root`, and which states its version."""
    definitions = written_sections([root])
    found = definitions.pop(root.__name__)
    assert isinstance(found, dict), "a section"
    keys = found["properties"]
    needed = found.get("required", [])
    assert isinstance(keys, dict) and isinstance(needed, list), "as the writer of schemas leaves them"
    whole = {**found, "properties": {KEY: STATED, **keys, "sha256": DIGEST}, "required": [KEY, *needed]}
    return {"$schema": DRAFT, "title": f"trainspec: {title}", **whole, "definitions": definitions}


def record_schema(title: str, record: type, *, left_out: Collection[str] = (), is_versioned: bool = True) -> JsonObject:
    """Return the schema of a file that holds a record. `left_out`: fields that are not in the file. `is_versioned`:
    it states its version; else it has a schema of its own, under a digest."""
    writer = _RecordWriter()
    found = writer.record(record, left_out)
    keys = found["properties"]
    needed = found["required"]
    assert isinstance(keys, dict) and isinstance(needed, list), "as `record` returns them"
    stated: JsonObject = {KEY: STATED} if is_versioned else {}
    whole = {**found, "properties": {**stated, **keys}, "required": [*stated, *needed]}
    return {"$schema": DRAFT, "title": f"trainspec: {title}", **whole, "definitions": writer.definitions()}


def events_schema(
    title: str, base: type, kinds: Mapping[str, type], one_of: Mapping[str, Collection[str]], *, closed: bool = False
) -> JsonObject:
    """Return the schema of a line of a file of events. `base` has the fields of all of them, `kinds` those of each
    type, of which `one_of` names some that do not all miss. `closed`: no other types stand in the file."""
    writer = _RecordWriter()
    found = writer.record(base, ())
    keys = found["properties"]
    assert isinstance(keys, dict), "as `record` returns them"
    names: list[JsonValue] = [*kinds]
    stated_type: JsonObject = {"type": {"enum": names}} if closed else {}
    keys |= {KEY: STATED, **stated_type}
    cases: list[JsonValue] = [
        {"if": {"properties": {"type": {"const": name}}}, "then": _case(writer, kind, one_of.get(name, ()))}
        for name, kind in kinds.items()
    ]
    whole: JsonObject = {**found, "required": ["type", "time"], "allOf": cases}
    return {"$schema": DRAFT, "title": f"trainspec: {title}", **whole, "definitions": writer.definitions()}


def _case(writer: _RecordWriter, kind: type, one_of: Collection[str]) -> JsonObject:
    reference = writer.refer(kind)
    choices: list[JsonValue] = [{"required": [name]} for name in one_of]
    return {"allOf": [reference, {"anyOf": choices}]} if choices else reference


class _RecordWriter:
    """Writes one schema. Every record below the root becomes a definition, to which the keys refer."""

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
            self._definitions[record.__name__] = {}  # as for sections: a record may hold itself
            self._definitions[record.__name__] = self.record(record, ())
        return {"$ref": f"#/definitions/{record.__name__}"}

    def _value(self, annotation: Any) -> JsonObject:
        """Return the schema of what `read_record` reads as a type. A reference stands alone in a union of one, since
        what stands beside a `$ref` is not read."""
        origin = typing.get_origin(annotation)
        members = typing.get_args(annotation)
        if origin is typing.Annotated:
            kind = annotation.__metadata__[0]
            return dict(kind.schema) if kind.section is None else self._section(kind.section)
        if origin in (typing.Union, types.UnionType):
            return self._union([member for member in members if member is not Absent])
        if origin is tuple:
            return {"type": "array", "items": self._value(members[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self._value(members[1])}
        if origin is typing.Literal:
            return {"enum": [*members]}
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            return {"anyOf": [self.refer(annotation)]}
        return dict(PLAIN[annotation].schema)

    def _section(self, section: type) -> JsonObject:
        self._sections.append(section)
        return {"anyOf": [{"$ref": f"#/definitions/{section.__name__}"}]}

    def _union(self, members: list[Any]) -> JsonObject:
        found: list[JsonValue] = [NULL if one is types.NoneType else self._value(one) for one in members]
        if len(found) == 1 and isinstance(found[0], dict):
            return found[0]
        return {"anyOf": found}
