"""Convert dataclasses to and from plain data: recipes, with all mistakes reported, and records on disk.

A record is a dataclass whose annotations state which values a field may have on disk. Reading tolerates other versions
but rejects damaged files: unknown keys are ignored, a missing key gets the field's default, and a value of the wrong
type raises FieldError."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, Union

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.intentions import FORMER_KEYS, FORMER_WORDS, Former, closest, closest_path, hint_for
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import show_kind
from trainspec_cli.recipe.field_types import LARGEST, MISSING, largest_of
from trainspec_cli.recipe.keys.run import RunSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


# Conversion of dataclasses to JSON and back, and the digest of a run. Workers read the output of `to_plain` without
# Hydra.


class Absent(Enum):
    """The type of `ABSENT`, the value of a field that has no key in the JSON object; null is None."""

    ABSENT = "absent"

    def __bool__(self) -> Literal[False]:
        return False


ABSENT = Absent.ABSENT


def to_plain(value: DataclassInstance) -> JsonObject:
    """Convert a dataclass to JSON values: dicts, lists, numbers, text. Fields set to `ABSENT` are omitted."""
    items = ((key_of(field), getattr(value, field.name)) for field in dataclasses.fields(value))
    return {key: _plain(item) for key, item in items if item is not ABSENT}


def _plain(value: Any) -> JsonValue:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def from_plain(cls: type[T], data: object) -> T:
    """Build a dataclass from the output of `to_plain`. Raises a RecipeError that lists every invalid key."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"found {type(data).__name__}, expected {cls.__name__}'s fields", code="wrong_type")
    built, problems = build(cls, data)
    if problems:
        raise RecipeError(problems)
    return built


def canonical_json(data: object) -> str:
    """Return JSON that is the same for equal content: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(spec: RunSpec) -> str:
    """Return the sha256 of a spec. The run folder is excluded, because its location does not change the run."""
    plain = to_plain(spec)
    # A moved or copied run is still the same run.
    plain["run"] = {key: value for key, value in to_plain(spec.run).items() if key != "dir"}
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()


class FieldError(ValueError):
    """A field is missing or has a value of the wrong type."""


@dataclass(frozen=True)
class ValueKind:
    """The values that a field may have."""

    name: str
    """The kind's name in error messages."""
    read: Callable[[object], Any]
    """Returns the value as stored in the record. Raises FieldError for a value of the wrong type."""
    schema: JsonObject = dataclasses.field(default_factory=dict, compare=False)
    """The JSON Schema of these values; an empty schema allows anything."""
    section: type | None = None
    """The dataclass that `from_plain` builds from such a value; its schema applies."""


def number(low: float, high: float, *, whole: bool = False, may_diverge: bool = False) -> ValueKind:
    """Return the kind for numbers from `low` to `high`. `may_diverge`: also accept NaN and infinity."""

    def read(value: object) -> float:
        # Not isinstance: a bool is an int in Python, but `true` is not a count.
        if type(value) is int or (type(value) is float and not whole):
            if low <= value <= high:
                return value
            if may_diverge and not math.isfinite(value):
                return value
        raise FieldError

    limits = {"minimum": low, "maximum": high}
    schema: JsonObject = {"type": "integer" if whole else "number"}
    schema |= {name: limit for name, limit in limits.items() if math.isfinite(limit)}
    return ValueKind(f"{'a whole number' if whole else 'a number'} from {low:g} to {high:g}", read, schema)


# Other JSON readers store numbers as doubles, which are exact up to 2**53.
Count = Annotated[int, number(0, 2**53, whole=True)]
Rank = Annotated[int, number(-1, 1e7, whole=True)]
"""A rank; -1 means the supervisor."""
WorldSize = Annotated[int, number(1, 1e6, whole=True)]
Seconds = Annotated[float, number(-1e12, 1e12)]
Rate = Annotated[float, number(0, 1e30)]
"""Losses and similar values are plain floats. The writer replaces non-finite ones with null, so such fields allow
None."""


def _exactly(wanted: type[T], value: object) -> T:
    if type(value) is not wanted:
        raise FieldError
    return value


PLAIN: dict[Any, ValueKind] = {
    int: number(-(2**53), 2**53, whole=True),
    float: number(-1e30, 1e30, may_diverge=True),
    str: ValueKind("text", partial(_exactly, str), {"type": "string"}),
    bool: ValueKind("true or false", partial(_exactly, bool), {"type": "boolean"}),
    object: ValueKind("anything", lambda value: value),
}
"""Kinds for fields whose annotation is a plain type."""


def _any_of(kinds: Sequence[ValueKind]) -> ValueKind:
    def read(value: Any) -> Any:
        for kind in kinds:
            with suppress(FieldError):
                return kind.read(value)
        raise FieldError

    return ValueKind(" or ".join(kind.name for kind in kinds), read)


def _kind_of(annotation: Any) -> ValueKind:
    """Return the kind of value allowed in a field with this annotation. The key may be missing if the annotation
    includes `Absent` or the field has a default."""
    origin = typing.get_origin(annotation)
    members = typing.get_args(annotation)
    if origin is Annotated:
        kind: ValueKind = annotation.__metadata__[0]
        return kind
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind_of(member) for member in members if member not in (types.NoneType, Absent)]
        kind = kinds[0] if len(kinds) == 1 else _any_of(kinds)
        if types.NoneType not in members:
            return kind
        return ValueKind(f"{kind.name} or null", lambda value: None if value is None else kind.read(value))
    if origin is tuple:
        item = _kind_of(members[0])
        return ValueKind(f"a list, each item {item.name},", lambda value: tuple(map(item.read, _exactly(list, value))))
    if origin is dict:
        one = _kind_of(members[1])
        return ValueKind(
            f"an object, each value {one.name},",
            lambda value: {key: one.read(inner) for key, inner in _exactly(dict, value).items()},
        )
    if origin is typing.Literal:
        # Files from a newer version must stay readable, even if they contain words that are unknown to this version.
        return PLAIN[str]
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return ValueKind("an object", lambda value: read_record(annotation, _exactly(dict, value)))
    return PLAIN[annotation]


@dataclass(frozen=True)
class _Field:
    name: str
    key: str
    kind: ValueKind
    needed: bool


@cache
def _fields_of(cls: type[Any]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        _Field(one.name, key_of(one), _kind_of(hints[one.name]), is_required(one)) for one in dataclasses.fields(cls)
    )


def read_record(cls: type[T], plain: Mapping[str, object]) -> T:
    """Build the dataclass `cls` from the values in `plain`. Raises FieldError, which describes the first invalid
    field."""
    values = {}
    record: Any = cls
    for one in _fields_of(record):
        if one.key in plain:
            try:
                values[one.name] = one.kind.read(plain[one.key])
            except FieldError as error:
                if inner := str(error):
                    raise FieldError(f"`{one.key}` is invalid: {inner}") from error
                wrong = show_kind(plain[one.key])
                raise FieldError(f"`{one.key}` is {wrong}; expected {one.kind.name}") from error
        elif one.needed:
            raise FieldError(f"it has no `{one.key}`")
    return cls(**values)


# A RunSpec is built from a dict, and all wrong keys, types and choices are reported together. This part deals with
# types, not with files. `1e3` is a valid integer and `1` a valid float; true and false are neither. Text is never read
# as a number: if YAML or the command line parsed a value as text, the author meant text or made a mistake.


# UNKNOWN: a placeholder in a draft for a missing or wrong value, so that other rules can still be checked. Computing
# with it raises `UnknownTouched`, meaning that the rule cannot be decided yet.


class UnknownTouched(Exception):  # noqa: N818 - an undecidable rule, not an error
    """A rule needs a value that is unknown."""


class Unknown:
    def _touch(self, *_: Any) -> NoReturn:
        raise UnknownTouched

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _touch
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _touch
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _touch
    __neg__ = __pos__ = __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = _touch
    __fspath__ = __str__ = __format__ = __bytes__ = __int__ = __float__ = __complex__ = __index__ = _touch
    __getattr__ = __getitem__ = __contains__ = __iter__ = __reversed__ = __len__ = __call__ = _touch

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = Unknown()


MAX_GUESSES = 3
MAX_ITEMS = 1_000
"""Maximum number of items in a list."""
MAX_TEXT_CHARS = 100_000
LISTED_CHARS = 250
"""Maximum length of a list of a section's keys in a message; `trainspec explain` shows longer ones."""
SHOWN_CHARS = 80

OPTION_SECTIONS = frozenset({
    *("model", "data", "optim", "batching", "cluster", "framework", "layout", "precision", "comm", "kernels"),
    *("checkpoint", "resilience", "scheduler"),
    *("cluster.fabric", "cluster.reliability", "cluster.site", "cluster.power", "cluster.cost", "cluster.slurm"),
})  # fmt: skip
"""Recipe sections that are filled by an option from a folder in conf/."""

_PLAIN = re.compile(r"[\w./:+-]+")
"""Text that does not need quotes on the command line."""


class WrongValueError(ValueError):
    """The value has the wrong type. Raised by `convert`."""


def build(cls: type[T], data: Mapping[str, object], path: str = "") -> tuple[T, list[Problem]]:
    """Return a draft of dataclass `cls`, with `UNKNOWN` in place of wrong values, and the problems."""
    hints = hints_of(cls)  # type: ignore[arg-type]
    fields = {key_of(field): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[Problem] = []
    for key in data:
        former = FORMER_KEYS.get((cls.__name__, str(key)))
        # An old file may still state a choice that has since become the only behaviour; such a file is correct, so
        # accept it.
        if key in fields or (former is not None and former.always == data[key]):
            continue
        problems.append(_unknown_key(cls, str(key), path, data[key], former))
    values: dict[str, object] = {}
    for key, field in fields.items():
        name = field.name
        # `???` requires a value even if the field has a default, because the recipe's author wants the user to choose.
        if data.get(key, MISSING) == MISSING and (key in data or is_required(field)):
            values[name] = UNKNOWN
            problems += _missing(hints[name], f"{path}{key}")
        elif key in data:
            value = data[key]
            gone = FORMER_WORDS.get((cls.__name__, key, value)) if isinstance(value, str) else None
            if gone is not None:
                message = f"`{path}{key}` is {value}, which is no longer a setting: {gone.why}"
                values[name] = UNKNOWN
                problems.append(Problem("wrong_choice", message, f"{path}{key}", gone.hint))
                continue
            values[name], wrong = _build_value(hints[name], value, f"{path}{key}")
            problems += wrong
    return cls(**values), problems


def key_of(field: dataclasses.Field[Any]) -> str:
    """Return the key as written in recipes: the field `from_` is the key `from`, which is a Python keyword."""
    return field.name.removesuffix("_")


def _build_value(wanted: Any, value: Any, path: str) -> tuple[Any, list[Problem]]:
    section = choose_section(wanted, value) if isinstance(value, Mapping) else None
    if section is not None:
        return build(section, value, f"{path}.")
    by_name = next((member for member in members_of(wanted) if typing.get_origin(member) is dict), None)
    if by_name and isinstance(value, Mapping):
        return _build_items(typing.get_args(by_name)[1], value, path)
    is_list = typing.get_origin(wanted) is tuple and isinstance(value, (list, tuple))
    if is_list and sections_of(item := typing.get_args(wanted)[0]):
        built, problems = _build_items(item, dict(enumerate(value)), path)
        return tuple(built.values()), problems
    try:
        converted = convert(wanted, value)
    except WrongValueError:
        allowed = describe(wanted)
        if sections_of(wanted) and len(allowed) > LISTED_CHARS:
            allowed = f"a section of keys{' or null' * (type(None) in members_of(wanted))}"
        message = f"`{path}` is {show_value(value)}; expected {allowed}"
        code = "wrong_choice" if _only_choices(wanted) else "wrong_type"
        # The draft continues with UNKNOWN, so a single check also reports the mistakes in all other keys.
        return UNKNOWN, [Problem(code=code, path=path, message=message, hint=_hint(wanted, value, path))]
    # Never check rules with numbers that are too large (single values or list items), because loops up to them would
    # never end.
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, (int, float)) and abs(number) > (most := largest_of(path, number)):
            message = f"`{path}` is {show_value(number)}; at most {most:,} is allowed"
            return UNKNOWN, [Problem("out_of_range", message, path, f"set {path}={most} or less")]
    if isinstance(converted, tuple) and len(converted) > MAX_ITEMS:
        message = f"`{path}` has {len(converted):,} values; at most {MAX_ITEMS} are allowed"
        return UNKNOWN, [Problem("out_of_range", message, path)]
    return converted, []


def _build_items(wanted: Any, items: Mapping[Any, object], path: str) -> tuple[dict[str, object], list[Problem]]:
    built = {str(key): _build_value(wanted, item, f"{path}.{key}") for key, item in items.items()}
    return {key: item for key, (item, _) in built.items()}, [wrong for _, found in built.values() for wrong in found]


def choose_section(wanted: Any, value: Mapping[str, object]) -> type | None:
    """Return the dataclass that a mapping fills. Among several, it is the one with the `family` named in the mapping,
    or the first one."""
    sections = sections_of(wanted)
    named = [section for section in sections if value.get("family") in choices_of(hints_of(section).get("family"))]
    return next(iter([*named, *sections]), None)


def sections_of(wanted: Any) -> list[type]:
    """Return the dataclass itself, or the dataclasses of a union."""
    return [member for member in members_of(wanted) if isinstance(member, type) and dataclasses.is_dataclass(member)]


def members_of(wanted: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(wanted) if _is_union(wanted) else (wanted,)


@cache
def hints_of(section: type) -> dict[str, object]:
    return typing.get_type_hints(section)


def _is_union(wanted: Any) -> bool:
    return typing.get_origin(wanted) in (Union, types.UnionType)


def convert(wanted: Any, value: Any) -> Any:
    """Convert `value` to a type; for a union, to the first member that accepts it. Raises WrongValueError."""
    if typing.get_origin(wanted) is Literal:
        for choice in typing.get_args(wanted):
            # True == 1 in Python, but `true` must not be accepted as the choice 1.
            if choice == value and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise WrongValueError
    if _is_union(wanted):
        for member in typing.get_args(wanted):
            try:
                return convert(member, value)
            except WrongValueError:
                continue
        raise WrongValueError
    if typing.get_origin(wanted) is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(typing.get_args(wanted)[0], item) for item in value)
    if wanted in (int, float):
        # A bool is an int in Python: without this test, `lr: true` would be 1.0.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WrongValueError
        if isinstance(value, float) and not math.isfinite(value):
            raise WrongValueError
        if wanted is float and abs(value) > LARGEST:
            value = 2 * LARGEST if value > 0 else -2 * LARGEST  # this is reported as too large, however it is written
        # YAML reads 1e3 as a float, but people use it for 1000.
        if wanted is int and value != int(value):
            raise WrongValueError
        return wanted(value)
    if wanted is str and isinstance(value, str) and not _can_be_written(value):
        raise WrongValueError
    if wanted in (str, bool, type(None)) and type(value) is wanted:
        return value
    raise WrongValueError


def _can_be_written(text: str) -> bool:
    """Return False for text that is too long, or that contains NUL (which would truncate a path) or half a surrogate
    pair (which is not UTF-8)."""
    if len(text) > MAX_TEXT_CHARS or "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _missing(wanted: Any, path: str) -> list[Problem]:
    """Return a problem for a missing value, or for each required key of a missing section."""
    if dataclasses.is_dataclass(wanted):
        _, problems = build(wanted, {}, f"{path}.")  # type: ignore[arg-type]
        return problems
    allowed = describe(wanted, with_null=False)
    message = f"`{path}` has no value; expected {allowed}"
    return [Problem(code="missing_value", path=path, message=message, hint=f"set {path}=<{allowed}>")]


def _unknown_key(cls: type, key: str, path: str, value: object, former: Former | None) -> Problem:
    """Return a problem for a key that its section does not have. If the value is a section with one key, as in
    `optm.lr=1` on the command line, the hint names the full key."""
    if former is not None:
        message = f"`{path}{key}` is no longer a setting: {former.why}"
        return Problem("unknown_key", message, f"{path}{key}", former.hint)
    # A model of another family may have the key. That is a better hint than a similar key in this family.
    kinds = sections_of(hints_of(RunSpec).get(path[:-1]))
    having = [kind for kind in kinds if key in map(key_of, dataclasses.fields(kind))]
    if families := [str(family) for kind in having for family in choices_of(hints_of(kind).get("family"))]:
        hint = (
            f"this key exists only if `family` is {_join_or(families)}: "
            f"`trainspec list {path[:-1]}` shows each option's family"
        )
        if families == ["own"]:
            hint = f"set {path[:-1]}=own too"
        return Problem("unknown_key", f"unknown key `{path}{key}`", f"{path}{key}", hint)
    # The dotted path of the only value in nested sections; "" for a plain value, or for several values.
    names: list[str] = []
    while isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        names.append(str(name))
    tail = "" if isinstance(value, Mapping) else ".".join(names)
    siblings = [key_of(field) for field in dataclasses.fields(cls)]
    near = closest(key, siblings)
    # Walking all sections takes time, so it is done only for a key that resembles none of its neighbours.
    paths = list(dict.fromkeys(known_paths(RunSpec))) if tail or not near else []
    if tail and f"{path}{near}.{tail}" in paths:
        meant = [f"{path}{near}.{tail}"]
    elif tail and (hint := hint_for(tail.rpartition(".")[2]) or hint_for(key)):
        meant = []
    elif tail and (corrected := closest_path(f"{path}{key}.{tail}", paths)):
        meant = [corrected]
    elif hint := hint_for(key):
        meant = []
    else:
        meant = [f"{path}{near}"] if near else _guess(tail.rpartition(".")[2] or key, paths)
        place = f"`{path[:-1]}`" if path else "a recipe"
        hint = f"{place} has: {', '.join(siblings)}"
    if meant:
        hint = f"did you mean {_join_or([f'`{guess}`' for guess in meant])}?"
    return Problem(code="unknown_key", path=f"{path}{key}", message=f"unknown key `{path}{key}`", hint=hint)


def _guess(key: str, paths: list[str]) -> list[str]:
    """Guess the intended key if the section is wrong: keys that equal, contain or resemble `key`.

    A name that contains another matching name is omitted."""
    names: dict[str, list[str]] = {}
    for known in paths:
        names.setdefault(known.rpartition(".")[2], []).append(known)
    # A name of up to three letters occurs in too many keys to identify one.
    within = [name for name in names if len(key) > 3 and key in name]
    holding = [
        known for name in within if not any(other in name for other in within if other != name) for known in names[name]
    ]
    guesses = names.get(key) or holding or names.get(closest(key, names) or "", [])
    return guesses if len(guesses) <= MAX_GUESSES else []


def known_paths(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield every dotted path below `cls`."""
    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        yield f"{prefix}{key_of(field)}"
        for section in sections_of(hints[field.name]):
            yield from known_paths(section, f"{prefix}{key_of(field)}.")


def only_key_named(name: str) -> str:
    """Return the only dotted path whose last word is `name`; "" if there is no such path or more than one."""
    found = {path for path in known_paths(RunSpec) if path.rpartition(".")[2] == name}
    return found.pop() if len(found) == 1 else ""


def known_choices(cls: type, path: str) -> list[str]:
    """Return the words allowed as the value of a dotted path: choices, auto, true and false. Empty for numbers, text
    and unknown paths."""
    name, _, rest = path.partition(".")
    found: list[str] = []
    for field in dataclasses.fields(cls):
        if key_of(field) != name:
            continue
        wanted = hints_of(cls)[field.name]
        if rest:
            found += [choice for section in sections_of(wanted) for choice in known_choices(section, rest)]
        else:
            found += ["true", "false"] if bool in members_of(wanted) else map(str, choices_of(wanted))
    return list(dict.fromkeys(found))


def _hint(wanted: Any, value: Any, path: str) -> str:
    if sections := sections_of(wanted):
        if isinstance(value, str) and ":" in value:
            return "put a space after the colon"
        if isinstance(value, str) and path in OPTION_SECTIONS:  # `model: llama_tiny` in a recipe
            option = f"- override /{path.rpartition('.')[2]}: {value}"
            return f"to select the option of that name, write `{option}` in the recipe's defaults"
        if isinstance(value, str) and path == "cluster.accelerator":
            return f"set cluster.accelerator={value} on the command line, or write a file in conf/cluster"
        return f"set its keys one by one, such as {path}.{key_of(dataclasses.fields(sections[0])[0])}"
    if typing.get_origin(wanted) is tuple and choices_of(wanted):
        return f"set {path}=[{', '.join(map(str, choices_of(wanted)))}], or a part of this list"
    listed = next((member for member in members_of(wanted) if typing.get_origin(member) is tuple), None)
    if listed is not None and isinstance(value, (str, int, float)) and _PLAIN.fullmatch(str(value)):
        with suppress(WrongValueError):  # one item, without the brackets
            convert(typing.get_args(listed)[0], value)
            return f"set {path}=[{value}]"
    if isinstance(value, str) and choices_of(wanted):
        meant = closest(value, [str(choice) for choice in choices_of(wanted)])
        if meant:
            return f"did you mean {path}={meant}?"
    if wanted is bool:
        return f"set {path}=true or {path}=false"
    if wanted in (str, str | None) and isinstance(value, (int, float)):
        hint = f"""quote it to make it text: '{path}="{show_value(value)}"'"""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 60:
            # YAML 1.1 reads 2:00:00 as a base-60 number, so the author did not intend that number.
            minutes, seconds = divmod(value, 60)
            hours, minutes = divmod(minutes, 60)
            written = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
            hint += f'; or "{written}", which YAML reads as that number if it is not quoted'
        return hint
    return f"set {path}=<{describe(wanted)}>"


def choices_of(wanted: Any) -> tuple[Any, ...]:
    """Return the allowed words if the type is a choice of words."""
    if typing.get_origin(wanted) is Literal:
        return typing.get_args(wanted)
    return tuple(choice for member in typing.get_args(wanted) for choice in choices_of(member))


def _only_choices(wanted: Any) -> bool:
    if _is_union(wanted):
        return all(member is type(None) or _only_choices(member) for member in typing.get_args(wanted))
    return typing.get_origin(wanted) is Literal


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def describe(wanted: Any, *, with_null: bool = True) -> str:
    """Describe a type: `int | Literal["auto"]` -> `a whole number or auto`."""
    return _join_or(list(dict.fromkeys(_alternatives(wanted, with_null))))


def _alternatives(wanted: Any, with_null: bool) -> Iterator[str]:
    if typing.get_origin(wanted) is Literal:
        yield from (str(choice) for choice in typing.get_args(wanted))
    elif _is_union(wanted):
        for member in typing.get_args(wanted):
            if with_null or member is not type(None):
                yield from _alternatives(member, with_null)
    elif dataclasses.is_dataclass(wanted):
        yield f"a section with the keys {', '.join(map(key_of, dataclasses.fields(wanted)))}"
    elif typing.get_origin(wanted) is tuple:
        words = [str(choice) for choice in choices_of(wanted)]
        yield f"a list of {_join_or(words)}" if words else "a list"
    elif typing.get_origin(wanted) is dict:
        yield "a section of values by name"
    else:
        yield _TYPE_NAMES[wanted]


def _join_or(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def show_value(value: object) -> str:
    """Return a short description of a value for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value == "":
        return "empty"
    if isinstance(value, Mapping):
        value = f"a section (keys {', '.join(map(str, value))})"
        return value if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]}...)"
    text = ascii(value) if isinstance(value, str) and not _can_be_written(value) else repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
