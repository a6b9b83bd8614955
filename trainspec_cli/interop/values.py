"""Values that several engines write in the same way."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.interop.line import CannotSayError
from trainspec_cli.interop.run_values import RunValues
from trainspec_cli.json_value import JsonValue


@dataclass(frozen=True)
class Prefix:
    """The path of a data set without its ending."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        path = str(value)
        if not path.endswith(".bin") or "*" in path:
            raise CannotSayError("one .bin file", "data.path=NAME.bin")
        return path.removesuffix(".bin")

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return f"{value}.bin"


@dataclass(frozen=True)
class WholeNumber:
    """A number without a fraction."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        if not isinstance(value, (int, float)) or int(value) != value:
            raise CannotSayError("a whole number")
        return int(value)

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return value
