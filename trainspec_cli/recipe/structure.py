"""Build a RunSpec from a dict, and report every wrong key, type and choice together. This module knows types, not
files.

`1e3` is a whole number and `1` a number; true and false are neither. Text is never read as a number: if YAML or the
command line parsed a value as text, the author meant text or made a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.intentions import FORMER_KEYS, FORMER_WORDS, Former, closest, closest_path, hint_for
from trainspec_cli.recipe.field_types import LARGEST, MISSING, largest_of
from trainspec_cli.recipe.keys.run import RunSpec

# UNKNOWN: a placeholder in a draft for a missing or wrong value, so that other rules can still be checked. Computing
# with it raises `UnknownTouched`, which means that the rule cannot be decided yet.


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
"""The largest number of items in a list."""
MAX_TEXT_CHARS = 100_000
LISTED_CHARS = 250
"""The longest list of a section's keys in a message; `trainspec explain` shows longer ones."""
SHOWN_CHARS = 80

OPTION_SECTIONS = frozenset({
    *("model", "data", "optim", "batching", "cluster", "framework", "layout", "precision", "comm", "kernels"),
    *("checkpoint", "resilience", "scheduler"),
    *("cluster.fabric", "cluster.reliability", "cluster.site", "cluster.power", "cluster.cost", "cluster.slurm"),
})  # fmt: skip
"""Sections of a recipe that an option from a folder of conf/ fills."""

T = TypeVar("T")
_PLAIN = re.compile(r"[\w./:+-]+")
"""Text that needs no quotation marks on the command line."""


class WrongValueError(ValueError):
    """The value has the wrong type. Raised by `convert`."""


def build(cls: type[T], data: Mapping[str, object], path: str = "") -> tuple[T, list[Problem]]:
    """Return a draft of dataclass `cls`, with `UNKNOWN` in place of wrong values, and the problems."""
    hints = hints_of(cls)  # type: ignore[arg-type]
    fields = {key_of(field): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[Problem] = []
    for key in data:
        former = FORMER_KEYS.get((cls.__name__, str(key)))
        # An old file may still state a former choice that is now the only behaviour. That is correct, so it is
        # accepted.
        if key in fields or (former is not None and former.always == data[key]):
            continue
        problems.append(_unknown_key(cls, str(key), path, data[key], former))
    values: dict[str, object] = {}
    for key, field in fields.items():
        name = field.name
        # `???` asks for a value even if the field has a default: the author of the recipe wants the user to choose.
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
    """Return the key as recipes write it: the field `from_` is the key `from`, a Python keyword."""
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
        message = f"`{path}` is {show_value(value)}; {allowed} is needed"
        code = "wrong_choice" if _only_choices(wanted) else "wrong_type"
        # The draft continues with UNKNOWN, so that one check reports the mistakes of all other keys too.
        return UNKNOWN, [Problem(code=code, path=path, message=message, hint=_hint(wanted, value, path))]
    # No rule is checked with too large a number, alone or in a list: loops over it would not end.
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, (int, float)) and abs(number) > (most := largest_of(path, number)):
            message = f"`{path}` is {show_value(number)}; at most {most:,} is allowed"
            return UNKNOWN, [Problem("out_of_range", message, path, f"type {path}={most} or less")]
    if isinstance(converted, tuple) and len(converted) > MAX_ITEMS:
        message = f"`{path}` has {len(converted):,} values; at most {MAX_ITEMS} are allowed"
        return UNKNOWN, [Problem("out_of_range", message, path)]
    return converted, []


def _build_items(wanted: Any, items: Mapping[Any, object], path: str) -> tuple[dict[str, object], list[Problem]]:
    built = {str(key): _build_value(wanted, item, f"{path}.{key}") for key, item in items.items()}
    return {key: item for key, (item, _) in built.items()}, [wrong for _, found in built.values() for wrong in found]


def choose_section(wanted: Any, value: Mapping[str, object]) -> type | None:
    """Return the dataclass that a mapping fills: among several, the one whose `family` the mapping names, else the
    first."""
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
    """Convert `value` to a type, for a union to the first member that accepts it. Raises WrongValueError."""
    if typing.get_origin(wanted) is Literal:
        for choice in typing.get_args(wanted):
            # True == 1 in Python: `true` must not pass for the choice 1.
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
        # A boolean is an int in Python: without this test `lr: true` would be 1.0.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WrongValueError
        if isinstance(value, float) and not math.isfinite(value):
            raise WrongValueError
        if wanted is float and abs(value) > LARGEST:
            value = 2 * LARGEST if value > 0 else -2 * LARGEST  # reported as too large, however it is written
        # YAML reads 1e3 as a float, and people write it for 1000.
        if wanted is int and value != int(value):
            raise WrongValueError
        return wanted(value)
    if wanted is str and isinstance(value, str) and not _can_be_written(value):
        raise WrongValueError
    if wanted in (str, bool, type(None)) and type(value) is wanted:
        return value
    raise WrongValueError


def _can_be_written(text: str) -> bool:
    """Return False for text that is too long, contains NUL (which would cut a path) or half a surrogate pair (not
    UTF-8)."""
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
    message = f"`{path}` has no value; {allowed} is needed"
    return [Problem(code="missing_value", path=path, message=message, hint=f"type {path}=<{allowed}>")]


def _unknown_key(cls: type, key: str, path: str, value: object, former: Former | None) -> Problem:
    """Return a problem for a key that its section does not have. If the value is a section with one key, as in
    `optm.lr=1` on the command line, the hint names the whole key."""
    if former is not None:
        message = f"`{path}{key}` is no longer a setting: {former.why}"
        return Problem("unknown_key", message, f"{path}{key}", former.hint)
    # A model of another family may have the key. That is a better hint than a similar key of this family.
    kinds = sections_of(hints_of(RunSpec).get(path[:-1]))
    having = [kind for kind in kinds if key in map(key_of, dataclasses.fields(kind))]
    if families := [str(family) for kind in having for family in choices_of(hints_of(kind).get("family"))]:
        hint = f"the family {_join_or(families)} has this key: `trainspec list {path[:-1]}` shows each option's family"
        if families == ["own"]:
            hint = f"type {path[:-1]}=own too"
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
    """Guess the intended key of a wrong section: keys that equal, contain or resemble `key`.

    A name that contains another matching name is left out.
    """
    names: dict[str, list[str]] = {}
    for known in paths:
        names.setdefault(known.rpartition(".")[2], []).append(known)
    # A name of up to three letters occurs in too many keys to point at one.
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
    """Return the only dotted path whose last word is `name`; "" if no path or several paths match."""
    found = {path for path in known_paths(RunSpec) if path.rpartition(".")[2] == name}
    return found.pop() if len(found) == 1 else ""


def known_choices(cls: type, path: str) -> list[str]:
    """Return the words that the value of a dotted path may be: choices, auto, true and false. Empty for numbers, text
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
            return f"type cluster.accelerator={value} on the command line, or write a file in conf/cluster"
        return f"set its keys one by one, such as {path}.{key_of(dataclasses.fields(sections[0])[0])}"
    if typing.get_origin(wanted) is tuple and choices_of(wanted):
        return f"type {path}=[{', '.join(map(str, choices_of(wanted)))}], or a part of this list"
    listed = next((member for member in members_of(wanted) if typing.get_origin(member) is tuple), None)
    if listed is not None and isinstance(value, (str, int, float)) and _PLAIN.fullmatch(str(value)):
        with contextlib.suppress(WrongValueError):  # one item, without the brackets
            convert(typing.get_args(listed)[0], value)
            return f"type {path}=[{value}]"
    if isinstance(value, str) and choices_of(wanted):
        meant = closest(value, [str(choice) for choice in choices_of(wanted)])
        if meant:
            return f"did you mean {path}={meant}?"
    if wanted is bool:
        return f"type {path}=true or {path}=false"
    if wanted in (str, str | None) and isinstance(value, (int, float)):
        hint = f"""quote it to make it text: '{path}="{show_value(value)}"'"""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 60:
            # YAML 1.1 reads 2:00:00 as a number in base 60, so whoever wrote that meant other text than the number's
            # digits.
            minutes, seconds = divmod(value, 60)
            hours, minutes = divmod(minutes, 60)
            written = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
            hint += f'; or "{written}", which YAML reads as that number if it is not quoted'
        return hint
    return f"type {path}=<{describe(wanted)}>"


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
