"""A schema takes what the readers of its files take, and nothing that they refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.reading.files import VERSION_KEY, without_version
from trainspec_cli.recipe.json_schema import record_schema
from trainspec_cli.recipe.records import ABSENT, Absent, Count, FieldError, from_plain, number, read_record
from trainspec_cli.recipe.results.certificate import Certificate
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.events import event_types, parse_event
from trainspec_cli.run.folder.file_schemas import FILE_SCHEMAS, OF_DIRECTIVES
from trainspec_cli.run.folder.record import RunRecord, RunResult

FILES = Path(__file__).parent / "versions" / "0.1"
RUN = FILES / "run"
MOST_PLACES = 40
STRANGE: list[Any] = [None, True, -1, 0.5, 1e31, "", "nonsense", [], [[]], {}, {"a": None}]
READERS: dict[str, Callable[[Any], object]] = {
    "plan": lambda plain: from_plain(Plan, plain),
    "run": lambda plain: read_record(RunRecord, plain),
    "result": lambda plain: read_record(RunResult, plain),
    "event": parse_event,
    "directive": parse_event,
    "certificate": lambda plain: read_record(Certificate, plain),
}


class Validators(dict[str, Any]):
    """Kind of file -> jsonschema's validator of it, made on first use."""

    def __missing__(self, kind: str) -> Any:
        from jsonschema import Draft7Validator  # takes a second, which other tests' processes save

        self[kind] = Draft7Validator(json.loads(json.dumps(FILE_SCHEMAS[kind]())))
        return self[kind]


VALIDATORS = Validators()


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def real(kind: str) -> list[Any]:
    """Return what real runs and a real certification wrote, with the version that they did not state yet."""
    if kind == "event":
        every = [event for path in sorted((RUN / "events").iterdir()) for event in lines(path)]
        return list({event["type"]: event for event in every}.values())
    if kind == "directive":
        return lines(RUN / "directives.jsonl")
    if kind == "certificate":
        return [json.loads((FILES / "certificate.json").read_text())]
    return [{VERSION_KEY: "1.0", **json.loads((RUN / f"{kind}.json").read_text())}]


def is_read(kind: str, content: Any) -> bool:
    try:
        READERS[kind](without_version(content) if kind != "certificate" else content)
    except (FieldError, RecipeError):
        return False
    return True


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, of lists that of the first item."""
    below = node.items() if isinstance(node, dict) else list(enumerate(node))[:1] if isinstance(node, list) else ()
    for key, value in below:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(content: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    copied = copy.deepcopy(content)
    node = copied
    for key in path[:-1]:
        node = node[key]
    change(node, path[-1])
    return copied


def mutants(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of `content` with one value changed or removed; a long file is sampled at equal distances."""
    every = [path for path in places(content) if path != (VERSION_KEY,)]
    for turn, path in enumerate(every[:: max(1, len(every) // MOST_PLACES)]):
        yield f"{path} left out", changed(content, path, lambda node, key: node.__delitem__(key))
        for value in (STRANGE * 2)[turn % len(STRANGE) :][:3]:
            yield f"{path}={value!r}", changed(content, path, lambda node, key, v=value: node.__setitem__(key, v))


def is_of_words_or_ranges(kind: str, content: Any) -> bool:
    """Return whether a schema refuses a value of the right type alone: a word of no version yet, or one that rules
    refuse later."""
    keywords = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "maxItems"}
    leaves = [*VALIDATORS[kind].iter_errors(content)]
    found = set()
    while leaves:
        error = leaves.pop()
        leaves += error.context or []
        found |= set() if error.context else {error.validator}
    return bool(found & keywords)


@pytest.mark.clause("RUN-11")
@pytest.mark.parametrize("kind", FILE_SCHEMAS)
def test_real_files_keep_to_their_schema_and_no_mutant_is_taken_that_is_not_read(kind: str) -> None:
    validator, tried = VALIDATORS[kind], 0
    validator.check_schema(validator.schema)
    for content in real(kind):
        assert [error.message for error in validator.iter_errors(content)] == []
        for name, mutant in mutants(content):
            taken, read = validator.is_valid(mutant), is_read(kind, mutant)
            assert read or not taken, f"the schema of {kind} takes what is not read: {name}"
            assert taken or not read or is_of_words_or_ranges(kind, mutant), f"{kind} refuses what is read: {name}"
            tried += 1
    assert tried > 25


@pytest.mark.parametrize("kind", ["plan", "run", "result"])
def test_a_file_states_the_current_version(kind: str) -> None:
    (content,) = real(kind)
    assert not VALIDATORS[kind].is_valid(without_version(content))
    assert not VALIDATORS[kind].is_valid({**content, VERSION_KEY: "0.1"})


def test_every_type_of_event_has_a_schema_and_strangers_are_passed_over() -> None:
    cases = VALIDATORS["event"].schema["allOf"]
    assert [case["if"]["properties"]["type"]["const"] for case in cases] == [*event_types()]
    assert VALIDATORS["event"].is_valid({"type": "of a later version", "time": 1.0, "more": {}})
    assert not VALIDATORS["event"].is_valid({"type": "step", "time": 1.0})
    assert not VALIDATORS["directive"].is_valid({"type": "retry", "time": 1.0, "step": 1})
    assert {*OF_DIRECTIVES} <= {*event_types()}


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, number(0, 1)]
    """A share of it."""


@dataclass(frozen=True)
class Outer:
    word: Literal["a", "b"]
    inner: Inner | None
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Count] | Absent = ABSENT
    anything: object = None


def test_each_kind_of_field() -> None:
    schema = json.loads(json.dumps(record_schema("x", Outer, is_versioned=False)))
    assert schema["required"] == ["word", "inner"]
    assert schema["properties"] == {
        "word": {"enum": ["a", "b"]},
        "inner": {"anyOf": [{"anyOf": [{"$ref": "#/definitions/Inner"}]}, {"type": "null"}]},
        "many": {"type": "array", "items": {"anyOf": [{"$ref": "#/definitions/Inner"}]}},
        "by_name": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 2**53}},
        "anything": {},
    }
    share = {"description": "A share of it.", "type": "number", "minimum": 0, "maximum": 1}
    assert schema["definitions"]["Inner"]["properties"] == {"share": share}
