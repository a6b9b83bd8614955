"""Types of plain values that are read from or written to JSON files and sockets."""

from __future__ import annotations

from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]


def flatten(data: JsonObject, prefix: str = "") -> JsonObject:
    """Flatten nested sections: map dotted paths to the values that are not sections."""
    flat: JsonObject = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
