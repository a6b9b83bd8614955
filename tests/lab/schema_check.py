"""What an editor does with a YAML file and its JSON Schema: a validator of the keywords that trainspec writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
UNCHECKED = {"$schema", "$comment", "title", "description", "default", "definitions"}


class _EditorsLoader(yaml.SafeLoader):
    """YAML 1.2, in which 1e9 is a number, and `off` and 1_000 are text."""


_EditorsLoader.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "null": r"~|null|",
    "bool": r"true|false",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}.items():
    _EditorsLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^({_pattern})$"), None)


def load_as_editors_do(text: str) -> Any:
    return yaml.load(text, _EditorsLoader)


def find_errors(schema: Any, value: Any) -> list[str]:
    """Return the dotted places in `value` that the schema refuses; of a union, those of the nearest alternative."""
    return [".".join(place) for place in dict.fromkeys(_errors(schema, schema, value, ()))]


def _errors(root: Any, schema: Any, value: Any, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for keyword, wanted in schema.items():
        if keyword == "$ref":
            yield from _errors(root, root["definitions"][wanted.removeprefix("#/definitions/")], value, at)
        elif keyword == "anyOf":
            found = [[*_errors(root, one, value, at)] for one in wanted]
            yield from max(found, key=lambda places: (not places, max(map(len, places), default=0), -len(places)))
        elif keyword == "items" and isinstance(value, list):
            for number, item in enumerate(value):
                yield from _errors(root, wanted, item, (*at, str(number)))
        elif keyword == "additionalProperties" and isinstance(value, dict):
            for key, item in value.items():
                patterns = [
                    one for pattern, one in schema.get("patternProperties", {}).items() if re.search(pattern, key)
                ]
                below = schema.get("properties", {}).get(key, next(iter(patterns), wanted))
                yield from [(*at, key)] if below is False else _errors(root, below, item, (*at, key))
        elif keyword not in UNCHECKED and not _holds(keyword, wanted, value):
            yield at


def _holds(keyword: str, wanted: Any, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match keyword:
        case "type":
            names = wanted if isinstance(wanted, list) else [wanted]
            return any(is_number if name == "number" else isinstance(value, TYPES[name]) for name in names)
        case "enum":
            return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in wanted)
        case "pattern":
            return not isinstance(value, str) or re.search(wanted, value) is not None
        case "minimum" | "exclusiveMinimum":
            return not is_number or value > wanted or (keyword == "minimum" and value == wanted)
        case "maximum" | "exclusiveMaximum":
            return not is_number or value < wanted or (keyword == "maximum" and value == wanted)
        case "multipleOf":
            return not is_number or value % wanted == 0
        case "maxItems":
            return not isinstance(value, list) or len(value) <= wanted
        case "minProperties" | "maxProperties":
            fits = len(value) >= wanted if keyword.startswith("min") else len(value) <= wanted
            return not isinstance(value, dict) or fits
        case "items" | "properties" | "patternProperties" | "additionalProperties":
            return True
    raise AssertionError(f"the validator does not know {keyword}")
